"""`download` and `open_store`: an object arrives whole, verified and at once, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.errors import InvalidInput
from tests.transports.http_server import CuttingProxy, serving, store_app
from transports.errors import ObjectCorrupt, ObjectNotFound, StoreError, StoreUnavailable
from transports.store.base import ChunkStore
from transports.store.download import download
from transports.store.http import HttpStore
from transports.store.local import LocalStore
from transports.store.open import open_store
from transports.store.retry import Surroundings

pytestmark = pytest.mark.anyio

DATA = random.Random(7).randbytes((3 << 20) + 17)
SHA = hashlib.sha256(DATA).hexdigest()


class Flaky(LocalStore):
    """Streams from memory what the test wants, and counts."""

    def __init__(self, root: Path, versions: list[bytes], *, fail_after: int | None = None) -> None:
        super().__init__(root)
        self.versions = versions
        self.fail_after = fail_after
        self.starts: list[int] = []

    async def stream(self, key: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        data = self.versions[min(len(self.starts), len(self.versions) - 1)]
        self.starts.append(start)
        stop = len(data) if length is None else min(len(data), start + length)
        sent = 0
        for at in range(start, stop, 100_000):
            if self.fail_after is not None and sent >= self.fail_after:
                raise StoreUnavailable("the network is gone.")
            piece = data[at : min(stop, at + 100_000)]
            sent += len(piece)
            yield piece


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


async def fetch(store: ChunkStore, cache: Path, **kwargs: float) -> Path:
    path = cache / "chunk.dtc"
    await download(store, "k", path, len(DATA), SHA, **kwargs)  # type: ignore[arg-type]
    return path


def content(path: Path) -> bytes:
    return path.read_bytes()


async def test_an_object_arrives_alone_in_the_directory(tmp_path: Path, cache: Path) -> None:
    store = LocalStore(tmp_path / "store")
    await store.put("k", DATA)
    assert content(await fetch(store, cache)) == DATA
    assert os.listdir(cache) == ["chunk.dtc"]


async def test_an_empty_object_arrives(tmp_path: Path, cache: Path) -> None:
    await download(LocalStore(tmp_path), "k", cache / "empty", 0, hashlib.sha256().hexdigest())
    assert content(cache / "empty") == b""


async def test_what_is_there_is_not_fetched_again(tmp_path: Path, cache: Path) -> None:
    store = Flaky(tmp_path, [DATA])
    await fetch(store, cache)
    await fetch(store, cache)
    assert store.starts == [0]


@pytest.mark.parametrize("wrong", [b"x" * len(DATA), DATA[:-1], DATA + b"x", b""])
async def test_a_wrong_file_under_the_name_is_replaced(tmp_path: Path, cache: Path, wrong: bytes) -> None:
    (cache / "chunk.dtc").write_bytes(wrong)
    assert content(await fetch(Flaky(tmp_path, [DATA]), cache)) == DATA


async def test_an_interrupted_download_goes_on_in_the_next_call(tmp_path: Path, cache: Path) -> None:
    store = Flaky(tmp_path, [DATA], fail_after=1_500_000)
    with pytest.raises(StoreUnavailable):
        await fetch(store, cache)
    assert not content_exists(cache)
    with pytest.raises(StoreUnavailable):
        await fetch(store, cache)
    assert content(await fetch(store, cache)) == DATA
    assert store.starts == [0, 1_500_000, 3_000_000]
    assert os.listdir(cache) == ["chunk.dtc"]


def content_exists(cache: Path) -> bool:
    return (cache / "chunk.dtc").exists()


async def test_damaged_bytes_are_thrown_away_and_fetched_again(tmp_path: Path, cache: Path) -> None:
    damaged = DATA[:1000] + b"!" + DATA[1001:]
    store = Flaky(tmp_path, [damaged, DATA[:-5], DATA])
    assert content(await fetch(store, cache)) == DATA
    assert store.starts == [0, 0, 0]


async def test_a_damaged_object_is_given_up_and_nothing_is_left(tmp_path: Path, cache: Path) -> None:
    store = Flaky(tmp_path, [DATA[:-1] + bytes([DATA[-1] ^ 1])])
    with pytest.raises(ObjectCorrupt):
        await fetch(store, cache)
    assert store.starts == [0, 0, 0]
    assert os.listdir(cache) == []


async def test_a_damaged_part_of_an_earlier_life_does_not_poison_the_file(tmp_path: Path, cache: Path) -> None:
    store = Flaky(tmp_path, [DATA], fail_after=1_000_000)
    with pytest.raises(StoreUnavailable):
        await fetch(store, cache)
    (part,) = cache.iterdir()  # noqa: ASYNC240
    part.write_bytes(b"?" * 1_000_000)
    store.fail_after = None
    assert content(await fetch(store, cache)) == DATA
    assert store.starts == [0, 1_000_000, 0]


async def test_a_part_longer_than_the_object_is_started_over(tmp_path: Path, cache: Path) -> None:
    (cache / f".chunk.dtc.{SHA[:16]}.part").write_bytes(b"?" * (len(DATA) + 1))
    store = Flaky(tmp_path, [DATA])
    assert content(await fetch(store, cache)) == DATA
    assert store.starts == [0]


async def test_a_missing_object_is_said_at_once(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ObjectNotFound):
        await fetch(LocalStore(tmp_path / "store"), cache)
    assert not content_exists(cache)


async def test_simultaneous_downloads_of_one_path_are_safe(tmp_path: Path, cache: Path) -> None:
    store = LocalStore(tmp_path / "store")
    await store.put("k", DATA)
    await asyncio.gather(*(fetch(store, cache) for _ in range(5)))
    assert content(cache / "chunk.dtc") == DATA
    assert os.listdir(cache) == ["chunk.dtc"]


async def test_the_deadline_ends_a_download_and_keeps_what_came(tmp_path: Path, cache: Path) -> None:
    class Stuck(Flaky):
        async def stream(self, key: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
            yield DATA[start : start + (1 << 20)]
            await asyncio.Event().wait()

    with pytest.raises(StoreUnavailable):
        await fetch(Stuck(tmp_path, []), cache, deadline_s=0.2)
    assert not content_exists(cache)
    store = Flaky(tmp_path, [DATA])
    assert content(await fetch(store, cache)) == DATA
    assert store.starts == [1 << 20]


async def test_no_directory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="data_dir"):
        await download(Flaky(tmp_path, [DATA]), "k", tmp_path / "no" / "file", len(DATA), SHA)


async def test_a_symlink_in_place_of_the_part_is_not_followed(tmp_path: Path, cache: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    (cache / f".chunk.dtc.{SHA[:16]}.part").symlink_to(victim)
    with pytest.raises(StoreError):
        await fetch(Flaky(tmp_path, [DATA]), cache)
    assert content(victim) == b"keep"


async def test_over_a_wire_that_is_cut_again_and_again(tmp_path: Path, cache: Path) -> None:
    async def no_wait(_: float) -> None:
        await asyncio.sleep(0)

    await LocalStore(tmp_path / "store").put("k", DATA)
    with serving(store_app(tmp_path / "store")) as url:
        proxy = CuttingProxy(int(url.rsplit(":", 1)[1]), after=600_000)
        async with proxy as cut, HttpStore(cut + "/store", around=Surroundings(sleep=no_wait)) as store:
            assert content(await fetch(store, cache)) == DATA
    assert proxy.connections >= 5


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("/some/dir", LocalStore),
        ("some/dir", LocalStore),
        ("file:///some/dir", LocalStore),
        ("file:///with%20space", LocalStore),
        ("http://h:1/store", HttpStore),
        ("https://h/deep/store/", HttpStore),
    ],
)
def test_addresses_of_stores(url: str, kind: type[ChunkStore]) -> None:
    store = open_store(url, token="t" * 8)
    assert type(store) is kind
    if "space" in url:
        assert isinstance(store, LocalStore)
        assert store.root == Path("/with space")


@pytest.mark.parametrize("url", ["", "s3://bucket/x", "file://host/x", "file:relative://", "http://", "://x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InvalidInput):
        open_store(url)
