"""Converter units on the daemon's side: what is converted together, and files with proven bits."""

from __future__ import annotations

import os
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.chain import Chain
from app.degraded import Degraded
from app.metrics import Metrics
from app.subscriber.cache import ChunkCache
from app.subscriber.jigsaw import Jigsaw
from app.subscriber.targets import NoSource, Targets
from app.subscriber.units import NoRoom, UnitFiles
from clients.rollout.protocol import Description
from clients.rollout.sglang.call import StageUnit
from engine.codec.chunk import ChunkHeader, encode
from engine.errors import InvalidInput, LayoutError
from engine.layout.algebra import identity
from engine.records import keys, record_bytes, sha256_hex
from tests.support.versions import Publisher, State, changed, digest_of, item, metas_of
from transports.store.local import LocalStore

pytestmark = pytest.mark.anyio

METAS = metas_of(
    {"q": ((30, 8), "bfloat16"), "k": ((9, 8), "bfloat16"), "r": ((5,), "float32"), "n": ((8,), "bfloat16")}
)
LANES = {"q": 240, "k": 72, "r": 10, "n": 8}
META = {m.name: m for m in METAS}


# --- what is converted together ---------------------------------------------------------------------------------------


def rank(units: list[list[str]], kept: list[str], **odd: Any) -> Description:
    def form(name: str) -> dict[str, Any]:
        return {"names": [name, f"{name}-alias"], "shape": list(META[name].shape), "dtype": META[name].dtype} | odd

    return Description.model_validate(
        {
            "protocol": 1, "name": "x", "run": "r", "pid": 1, "rank": 0, "ranks": 1,
            "tensors": [{**form(n), "held": LANES[n]} for n in kept],
            "units": [{"tensors": [form(n) for n in unit], "parameters": ["p"]} for unit in units],
        }
    )  # fmt: skip


def test_units_of_several_ranks_that_share_a_tensor_are_converted_together() -> None:
    jigsaw = Jigsaw([rank([["q", "k"], ["r"]], ["n"]), rank([["k"]], ["n"])], METAS)
    assert jigsaw.converted == {"q", "k", "r"}
    assert [set(u) for u in jigsaw.units({"k"})] == [{"q", "k"}]
    assert [set(u) for u in jigsaw.units({"r", "q"})] == [{"q", "k"}, {"r"}]
    assert jigsaw.units({"n"}) == []
    assert jigsaw.provable({"q": "1", "n": "2"}) == {"n": "2"}
    assert jigsaw.combine([{"n": "0" * 16}, {"n": "0" * 16}]) == {"n": "0" * 16}


def test_experts_of_other_ranks_are_units_of_their_own() -> None:
    jigsaw = Jigsaw([rank([["q"]], ["n", "r"]), rank([["k"]], ["n", "r"])], METAS)
    assert [set(u) for u in jigsaw.units({"q", "k"})] == [{"q"}, {"k"}]


def test_a_receiver_without_units_is_what_it_was() -> None:
    jigsaw = Jigsaw([rank([], list(META))], METAS)
    assert (jigsaw.converted, jigsaw.units(set(META))) == (frozenset(), [])


def test_units_that_do_not_fit_the_version_are_refused() -> None:
    with pytest.raises(InvalidInput, match="holds 'q'"):
        Jigsaw([rank([["q"]], [], dtype="float16")], METAS)
    with pytest.raises(InvalidInput, match="has not"):
        Jigsaw([rank([["q"], ["r"]], ["k", "n"])], METAS[:2])
    with pytest.raises(InvalidInput, match="converted on another"):
        Jigsaw([rank([["q"]], ["k", "r", "n"]), rank([], list(META))], METAS)
    with pytest.raises(LayoutError):
        Jigsaw([rank([["q"]], ["k", "n"])], METAS)


# --- files ------------------------------------------------------------------------------------------------------------


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(folder / "store")
        self.publisher = Publisher(self.store, METAS, writers=2)
        self.rng = np.random.default_rng(3)
        self.state: State = {n: self.rng.integers(0, 1 << 16, size).astype(np.uint16) for n, size in LANES.items()}
        metrics = Metrics()
        self.cache = ChunkCache(
            folder / "cache", self.store, max_bytes=1 << 20, parallel=2, metrics=metrics, degraded=Degraded(metrics)
        )
        self.chain = Chain("r", self.store)
        self.targets = Targets(self.chain, self.cache)

    async def versions(self, count: int) -> None:
        """Versions 0 to count - 1."""
        await self.cache.open()
        for _ in range(count):
            if self.publisher.head is not None:
                self.state = changed(self.state, self.rng, 0.2)
            await self.publisher.publish(self.state)

    def files(self, max_bytes: int = 1 << 20) -> UnitFiles:
        return UnitFiles(self.targets, self.folder / "units", max_bytes=max_bytes)

    async def read(self, version: int, units: list[list[str]], **more: Any) -> dict[str, bytes]:
        """What is in the files, tensor by tensor; only one file is there at a time."""
        await self.chain.refresh()
        found: dict[str, bytes] = {}
        async with aclosing(self.files(**more).written(version, units)) as bodies:
            async for body in bodies:
                assert [str(p) for p in (self.folder / "units").iterdir()] == [body.path]
                found |= contents(body)
        if (self.folder / "units").exists():
            assert list((self.folder / "units").iterdir()) == []
        return found

    def expected(self, version: int, names: list[str]) -> dict[str, bytes]:
        return {n: self.publisher.states[version][n].tobytes() for n in names}


def contents(body: StageUnit) -> dict[str, bytes]:
    path = Path(body.path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    data = path.read_bytes()
    out = {}
    for t in body.tensors:
        assert t.offset % 64 == 0
        out[t.name] = data[t.offset : t.offset + 2 * LANES[t.name]]
        assert digest_of(t.name, np.frombuffer(out[t.name], np.uint16)) == t.digest
    return out


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_every_version_comes_out_bit_for_bit(world: World) -> None:
    await world.versions(5)
    await world.publisher.anchor(2)
    for version in range(5):
        assert await world.read(version, [["q", "k"], ["r"]]) == world.expected(version, ["q", "k", "r"])
    assert await world.read(4, [["r"]]) == world.expected(4, ["r"])
    assert await world.read(4, []) == {}


async def test_where_an_anchors_chunk_is_missing_an_older_start_serves(world: World) -> None:
    await world.versions(4)
    for version in (1, 3):
        anchor = await world.publisher.anchor(version)
        await world.store.delete(anchor.chunks[0].key)
    assert await world.read(3, [["q", "k"]]) == world.expected(3, ["q", "k"])
    for path in (world.folder / "store").rglob("versions/0/chunks/*.dtc"):
        path.unlink()
    for path in (world.folder / "cache").iterdir():
        path.unlink()
    await world.cache.open()
    world.cache._sizes.clear()
    with pytest.raises(NoSource, match="version 3"):
        await world.read(3, [["q", "k"]])


async def test_bits_that_are_not_the_decisions_are_never_handed_out(world: World) -> None:
    """An anchor whose chunk is intact and carries wrong bits: passed over where there is another start."""
    await world.versions(2)
    await lie(world, 1)
    assert await world.read(1, [["q", "k"], ["r"]]) == world.expected(1, ["q", "k", "r"])
    for path in (world.folder / "store").rglob("versions/0/chunks/*.dtc"):
        path.unlink()
    await world.cache.discard([ref for step in await world.targets.path(0, 1) for ref in step.chunks])
    fresh = World.__new__(World)
    fresh.__dict__ |= world.__dict__ | {"folder": world.folder / "again"}
    fresh.cache = ChunkCache(
        world.folder / "again", world.store, max_bytes=1 << 20, parallel=2, metrics=Metrics(),
        degraded=Degraded(Metrics()),
    )  # fmt: skip
    await fresh.cache.open()
    fresh.targets = Targets(world.chain, fresh.cache)
    with pytest.raises(NoSource, match="digest"):
        await fresh.read(1, [["q", "k"]])
    assert not list((world.folder / "again" / "units").iterdir())


async def lie(world: World, version: int) -> None:
    """An anchor whose manifest has the right digests and whose chunk has other bits of `q`."""
    record = await world.publisher.anchor(version)
    state = {n: v.copy() for n, v in world.publisher.states[version].items()}
    state["q"][5] ^= 1
    items = [item(m, identity(state[m.name].size), i, None, state[m.name]) for i, m in enumerate(METAS)]
    coded = encode(ChunkHeader(run="r", version=version, epoch=1, writer=0, seq=0, base=None), items)
    ref = record.chunks[0].model_copy(
        update={"sha256": sha256_hex(coded.data), "size_bytes": len(coded.data), "raw_bytes": coded.raw_bytes}
    )
    ref = ref.model_copy(update={"key": ref.key.rsplit("-", 1)[0] + f"-{ref.sha256[:32]}.dtc"})
    await world.store.put(ref.key, coded.data)
    await world.store.put(keys.anchor_manifest("r", version), record_bytes(record.model_copy(update={"chunks": [ref]})))


async def test_what_would_take_too_much_of_the_disk_is_refused_before_anything_is_written(world: World) -> None:
    await world.versions(1)
    with pytest.raises(NoRoom, match="cache_bytes"):
        await world.read(0, [["q", "k"]], max_bytes=500)
    assert not (world.folder / "units").exists()


async def test_a_full_disk_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.versions(1)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoom, match="No space left"):
        await world.read(0, [["q", "k"]])
    assert list((world.folder / "units").iterdir()) == []


async def test_a_file_that_a_dead_daemon_left_is_replaced(world: World) -> None:
    await world.versions(1)
    (world.folder / "units").mkdir(mode=0o700)
    (world.folder / "units" / "0-1").write_bytes(b"torn")
    assert await world.read(0, [["q", "k"]]) == world.expected(0, ["q", "k"])
