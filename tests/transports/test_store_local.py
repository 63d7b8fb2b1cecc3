"""`LocalStore`: the contract, and what only a directory can get wrong."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.transports.store_conformance import StoreConformance, keys_of, read_all
from transports.errors import KeyConflict, ObjectNotFound, StoreError, StoreFull
from transports.store._files import Temp
from transports.store._paths import Directories
from transports.store.local import TMP, LocalStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(root)


class TestConformance(StoreConformance):
    pass


class FullDisk(LocalStore):
    """A store whose temporary files lie on a device that is always full."""

    def create_temp(self, key: str) -> Temp:
        temp = super().create_temp(key)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, temp.fd)
        os.close(full)
        return temp


async def test_a_full_disk_is_said_and_leaves_nothing(root: Path, tmp_path: Path) -> None:
    store = FullDisk(root)
    source = tmp_path / "file"
    source.write_bytes(b"x" * 100)
    for data in (b"x", source):
        with pytest.raises(StoreFull) as caught:
            await store.put("k", data)
        assert caught.value.remedy
        with pytest.raises(StoreFull):
            await store.put_if_absent("k", data)
    assert os.listdir(root / TMP) == []
    assert await keys_of(store, "") == []


def test_making_the_store_touches_nothing(root: Path) -> None:
    LocalStore(root)
    assert not root.exists()


async def test_the_tree_has_only_objects_and_the_hidden_directory(store: LocalStore, root: Path) -> None:
    await store.put("a/b/c", b"x")
    assert sorted(os.listdir(root)) == [TMP, "a"]
    assert os.listdir(root / TMP) == []
    await store.delete("a/b/c")
    assert os.listdir(root) == [TMP]


def run_and_kill(root: Path, code: str) -> None:
    """Run `code` with a store in a process that kills itself as its last act."""
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom transports.store.local import LocalStore\n"
        f"store = LocalStore(Path(sys.argv[1]))\n{code}\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr


async def test_a_writer_killed_in_the_middle_shows_nothing_and_is_cleaned_up(store: LocalStore, root: Path) -> None:
    run_and_kill(root, "t = store.create_temp('a/b')\nt.write([b'half'])")
    assert await keys_of(store, "") == []
    assert await store.head("a/b") is None
    assert len(os.listdir(root / TMP)) == 1, "the crash leaves a temporary file"
    await LocalStore(root).prepare()
    assert len(os.listdir(root / TMP)) == 1, "a fresh one may belong to a writer that has not locked it yet"
    await LocalStore(root, stale_after_s=0).prepare()
    assert os.listdir(root / TMP) == []
    assert await store.put_if_absent("a/b", b"whole")


async def test_an_object_whose_writer_was_killed_right_after_publishing_is_whole(store: LocalStore, root: Path) -> None:
    run_and_kill(root, "t = store.create_temp('a/b')\nt.write([b'whole'])\nassert store.publish(t, 'a/b', True)")
    assert await store.get("a/b", max_bytes=9) == b"whole"
    await LocalStore(root, stale_after_s=0).prepare()
    assert os.listdir(root / TMP) == []
    assert await store.get("a/b", max_bytes=9) == b"whole"


async def test_cleaning_spares_the_file_of_a_live_writer(store: LocalStore, root: Path) -> None:
    async with store.upload("k") as upload:
        await upload.write([b"slow"])
        (name,) = os.listdir(root / TMP)
        os.utime(root / TMP / name, (0, 0))
        await LocalStore(root, stale_after_s=0).prepare()
        assert await upload.commit(if_absent=True)
    assert await store.get("k", max_bytes=9) == b"slow"


async def test_cleaning_removes_no_symlink_target_and_no_directory(root: Path, tmp_path: Path) -> None:
    (root / TMP / "dir").mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    os.utime(victim, (0, 0))
    (root / TMP / "link").symlink_to(victim)
    await LocalStore(root, stale_after_s=0).prepare()
    assert victim.read_bytes() == b"keep"
    assert (root / TMP / "dir").is_dir()


async def test_an_upload_not_committed_leaves_nothing(store: LocalStore, root: Path) -> None:
    async with store.upload("k") as upload:
        await upload.write([b"x"])
    assert os.listdir(root / TMP) == []
    assert await store.head("k") is None


async def test_symlinks_are_never_followed(store: LocalStore, root: Path, tmp_path: Path) -> None:
    await store.put("a/real", b"inside")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(outside)
    (root / "a" / "file").symlink_to(outside / "secret")
    for key in ("link/secret", "a/file"):
        assert await store.head(key) is None
        with pytest.raises(ObjectNotFound):
            await store.get(key, max_bytes=100)
    with pytest.raises(StoreError):
        await store.put("link/new", b"x")
    with pytest.raises(KeyConflict):
        await store.put_if_absent("a/file", b"x")
    assert await store.delete("link/secret") is False
    assert await keys_of(store, "") == ["a/real"]
    assert await keys_of(store, "link/") == []
    await store.put("a/file", b"replaces the link, not its target")
    assert (outside / "secret").read_bytes() == b"secret"
    assert os.listdir(outside) == ["secret"]


async def test_special_files_are_no_objects_and_block_nobody(store: LocalStore, root: Path) -> None:
    await store.prepare()
    os.mkfifo(root / "fifo")
    assert await store.head("fifo") is None
    assert await keys_of(store, "") == []


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads are switched as often as possible, so that a check and an act that are not one step come apart."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class MeetingPoint(Directories):
    """Lets nobody have the directory `race` before twelve want it: what follows, they do at the same time."""

    barrier = threading.Barrier(12)

    def make(self, segments: Sequence[str]) -> int:
        fd = super().make(segments)
        if segments == ["race"]:
            self.barrier.wait(60)
        return fd


class Crowded(LocalStore):
    """A store whose writers meet right before the last step."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._dirs = MeetingPoint(self.root)


@pytest.mark.usefixtures("restless")
async def test_creates_that_meet_at_the_very_last_step_have_one_winner(root: Path) -> None:
    store = Crowded(root)
    with ThreadPoolExecutor(12) as pool:
        for round_ in range(30):
            key = f"race/{round_}"
            create = partial(store._put, key, if_absent=True)
            won = await asyncio.to_thread(lambda c=create: list(pool.map(lambda i: c(b"%d" % i), range(12))))
            assert sum(won) == 1
            assert await store.get(key, max_bytes=9) == b"%d" % won.index(True)


def race_of_processes(root: Path, processes: int, rounds: int) -> list[list[int]]:
    """Each process tries to create the same keys; per process the outcome of each round."""
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom transports.store.local import LocalStore\n"
        "store = LocalStore(Path(sys.argv[1]))\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        f"for i in range({rounds}):\n"
        "    print(int(asyncio.run(store.put_if_absent(f'race/{i}/d', sys.argv[2].encode() * 5000))))\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(root), str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for i in range(processes)
    ]
    for p in running:
        assert p.stdout is not None
        assert p.stdout.readline() == "ready\n"
    for p in running:
        assert p.stdin is not None
        p.stdin.write("go\n")
        p.stdin.flush()
    with ThreadPoolExecutor(processes) as pool:
        outputs = list(pool.map(lambda p: p.communicate(timeout=120)[0], running))
    return [[int(line) for line in out.split()] for out in outputs]


async def test_one_winner_across_processes(root: Path) -> None:
    won = await asyncio.to_thread(race_of_processes, root, 4, 40)
    assert [sum(column) for column in zip(*won, strict=True)] == [1] * 40
    for i in range(40):
        data = await LocalStore(root).get(f"race/{i}/d", max_bytes=10**5)
        winner = next(p for p in range(4) if won[p][i])
        assert data == b"%d" % winner * 5000


async def test_a_reader_sees_the_object_it_opened(store: LocalStore) -> None:
    await store.put("k", b"old")
    reader = await store.open("k")
    try:
        await store.put("k", b"newer")
        await store.delete("k")
        assert reader.info.size == 3
        assert await reader.read(0, 100) == b"old"
    finally:
        reader.close()
        reader.close()
    with pytest.raises(StoreError):
        await reader.read(0, 1)


async def test_a_cancelled_read_closes_its_file(store: LocalStore) -> None:
    await store.put("k", b"x" * (3 << 20))
    before = len(os.listdir("/proc/self/fd"))
    for turns in range(8):
        task = asyncio.ensure_future(read_all(store, "k"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()  # waits for the threads still at work
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_page_goes_on_after_any_key_also_one_that_is_gone(store: LocalStore) -> None:
    keys = ["a/1", "a/b/1", "a/b/2", "a/c", "b"]
    for key in keys:
        await store.put(key, b"")
    for after in ["", *keys, "a/b/15", "a/b", "zzz", "a/a"]:
        assert await store.page("", after=after, limit=2) == [k for k in keys if k > after][:2]


async def test_a_locked_temporary_file_is_locked_for_others(store: LocalStore, root: Path) -> None:
    async with store.upload("k"):
        (name,) = os.listdir(root / TMP)
        with (root / TMP / name).open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
