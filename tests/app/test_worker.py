"""Parts of the worker on their own: frames, the lanes file, the plan of chunks, and the process's manners."""

from __future__ import annotations

import asyncio
import io
import os
import select
import signal
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.publisher.worker_handle import WorkerDied, WorkerHandle
from app.worker import frames
from app.worker import protocol as p
from app.worker.encoder import plan
from app.worker.lanes import LanesReader, LanesWriter
from app.worker.launching import start_process
from app.worker.spool import RankSpool, write_atomic
from engine.detect.base import TILE, tile_count
from engine.errors import CodecError, StateConflict
from engine.pending import Level, empty


def test_frames_go_round_and_are_bounded() -> None:
    data = frames.pack({"a": [1, 2], "b": "ü"}) + frames.pack({})
    stream = io.BytesIO(data)
    assert frames.read(stream) == {"a": [1, 2], "b": "ü"}
    assert frames.read(stream) == {}
    assert frames.read(stream) is None
    assert frames.read(io.BytesIO(data[:9])) is None
    too_long = struct.pack("<I", frames.MAX_FRAME_BYTES + 1)
    for bad in (too_long, struct.pack("<I", 2) + b"[]", struct.pack("<I", 1) + b"{"):
        with pytest.raises(CodecError):
            frames.read(io.BytesIO(bad))


@pytest.mark.anyio
async def test_a_worker_answers_errors_and_its_death_ends_every_call() -> None:
    worker = WorkerHandle(await start_process())
    try:
        with pytest.raises(StateConflict, match="open"):
            await worker.call(p.Settle(version=1, committed=True), p.Done)
        calls = [asyncio.create_task(worker.call(p.Release(hold=1), p.Done)) for _ in range(3)]
        worker.kill()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(r, WorkerDied | StateConflict) for r in results)
        with pytest.raises(WorkerDied):
            await worker.call(p.Release(hold=1), p.Done)
    finally:
        await worker.stop()


@pytest.mark.anyio
async def test_a_worker_ends_with_its_input_and_without_its_parent() -> None:
    worker = WorkerHandle(await start_process())
    with pytest.raises(StateConflict, match="open"):
        await worker.call(p.Release(hold=1), p.Done)
    await worker.stop()
    assert worker.returncode == 0
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app.worker", str(os.getpid() + 1), stdin=asyncio.subprocess.PIPE
    )
    assert await process.wait() == 1


def test_the_lanes_file_is_whole_or_gone(tmp_path: Path) -> None:
    path = tmp_path / "lanes-3.bin"
    writer = LanesWriter(path)
    arrays = [np.arange(n, dtype=np.uint16) for n in (5, 1, 70_000)]
    for array in arrays:
        writer.put(array)
    writer.finish()
    reader = LanesReader(path, 70_006)
    for array in arrays:
        assert np.array_equal(reader.take(array.size), array)
    reader.close()
    with pytest.raises(p.SpoolLost):
        LanesReader(path, 70_005)
    with pytest.raises(p.SpoolLost):
        LanesReader(tmp_path / "other", 1)
    abandoned = LanesWriter(tmp_path / "x.bin")
    abandoned.put(arrays[0])
    abandoned.abandon()
    abandoned.abandon()
    assert not (tmp_path / "x.bin").exists()


def test_a_lanes_file_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    writer = LanesWriter(tmp_path / "missing" / "lanes.bin")
    with pytest.raises(FileNotFoundError):
        writer.finish()
    with pytest.raises(FileNotFoundError):
        writer.put(np.zeros(10, np.uint16))
    writer.abandon()


def test_a_failed_atomic_write_leaves_the_old_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    path.with_name("file.part").mkdir()
    with pytest.raises(OSError):  # noqa: PT011
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_rank_that_comes_while_another_goes_gets_its_directory(tmp_path: Path) -> None:
    """What one rank removes as empty is the parent another one is about to make its own directory in."""
    spools = [RankSpool.of(tmp_path, "run", "launch", rank) for rank in range(3)]

    def come_and_go(spool: RankSpool) -> None:
        for _ in range(300):
            spool.create()
            assert spool.root.is_dir()
            spool.remove()

    with ThreadPoolExecutor() as pool:
        list(pool.map(come_and_go, spools))


def test_leftovers_of_other_versions_go(tmp_path: Path) -> None:
    spool = RankSpool(tmp_path / "run" / "launch" / "0")
    spool.create()
    for version in (1, 2):
        spool.lanes_file(version).write_bytes(b"x")
        spool.chunk_dir(version).mkdir()
    spool.drop_others(2)
    assert sorted(f.name for f in spool.root.iterdir()) == ["chunks-2", "lanes-2.bin"]
    spool.drop_version(2)
    spool.remove()
    assert list(tmp_path.iterdir()) == []


@given(
    st.lists(st.tuples(st.integers(0, 5 * TILE), st.floats(0, 1), st.integers(0, 3000)), max_size=5),
    st.integers(1 << 16, 1 << 20),
    st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_the_plan_covers_every_changed_tile_once_and_in_order(
    shapes: list[tuple[int, float, int]], chunk_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    levels, lanes = [], []
    for n, dense_share, entries in shapes:
        level = empty(tile_count(n))
        dense = rng.random(level.dense.size) < dense_share
        ranks = np.unique(rng.integers(0, max(1, n), entries)) if n else np.empty(0, np.int64)
        ranks = ranks[~dense[ranks // TILE]] if n else ranks
        bits = np.zeros(ranks.size, np.uint16)
        levels.append(Level(ranks.astype(np.int64), bits, bits + np.uint16(1), dense))
        lanes.append(n)
    seen: list[tuple[int, int]] = []
    for chunk in plan(levels, lanes, [100] * len(levels), chunk_bytes):
        assert chunk
        assert len({c.index for c in chunk}) == len(chunk)
        tiles = 0
        for piece in chunk:
            assert piece.first < piece.stop <= levels[piece.index].dense.size
            for tile in range(piece.first, piece.stop):
                level = levels[piece.index]
                if level.dense[tile] or level.entries(tile, tile + 1) != slice(
                    level.entries(tile, tile + 1).start, level.entries(tile, tile + 1).start
                ):
                    seen.append((piece.index, tile))
                    tiles += 1
        assert tiles
    wanted = [
        (i, t)
        for i, level in enumerate(levels)
        for t in range(level.dense.size)
        if level.dense[t] or level.tile_counts()[t]
    ]
    assert seen == wanted


def test_a_worker_that_computes_ends_with_its_daemon() -> None:
    """It may not see the end of its input for as long as it computes: the kernel ends it."""
    daemon = """
import asyncio
from app.publisher.worker_handle import WorkerHandle
from app.worker import protocol as p
from app.worker.launching import start_process
from engine.errors import StateConflict

async def main():
    worker = WorkerHandle(await start_process())
    try:
        await worker.call(p.Release(hold=1), p.Done)
    except StateConflict:
        print(worker.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        handle = os.pidfd_open(worker := int(process.stdout.readline()))
        os.kill(worker, signal.SIGSTOP)
        process.kill()
        assert select.select([handle], [], [], 60)[0]
    os.close(handle)
