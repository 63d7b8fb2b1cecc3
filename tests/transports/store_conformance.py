"""What any `ChunkStore` owes, as a class of tests: subclass it, give it a `store` fixture, and run it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engine.errors import DteError, InvalidInput
from transports.errors import ObjectNotFound, ObjectTooLarge, StoreError
from transports.store.base import ChunkStore

BAD_KEYS = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../x",
    "a/../b",
    "a/./b",
    "a//b",
    "a/",
    ".hidden",
    "a/.tmp/x",
    ".tmp/x",
    "-rf",
    "a b",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\n",
    "a%2fb",
    "%2e%2e/x",
    "a?b",
    "a#b",
    "ü",
    "a/\u2024\u2024/b",
    "x" * 256,
    "/".join(["x" * 200] * 6),
]


async def read_all(store: ChunkStore, key: str, **range_: int) -> bytes:
    return b"".join([piece async for piece in store.stream(key, **range_)])


async def keys_of(store: ChunkStore, prefix: str) -> list[str]:
    return [key async for key in store.list(prefix)]


class StoreConformance:
    """The contract of `transports.store.base`, and nothing an implementation may choose."""

    async def test_what_was_put_is_read_back(self, store: ChunkStore) -> None:
        await store.put("runs/r/a.json", b"hello")
        assert await store.get("runs/r/a.json", max_bytes=5) == b"hello"
        info = await store.head("runs/r/a.json")
        assert info is not None
        assert info.size == 5

    async def test_an_empty_object_is_an_object(self, store: ChunkStore) -> None:
        assert await store.put_if_absent("empty", b"")
        assert not await store.put_if_absent("empty", b"x")
        assert await store.get("empty", max_bytes=0) == b""
        assert await read_all(store, "empty") == b""
        info = await store.head("empty")
        assert info is not None
        assert info.size == 0

    async def test_a_missing_object_is_said_to_be_missing(self, store: ChunkStore) -> None:
        assert await store.head("no/such") is None
        assert await store.delete("no/such") is False
        assert await keys_of(store, "no/") == []
        with pytest.raises(ObjectNotFound):
            await store.get("no/such", max_bytes=10)
        for range_ in ({}, {"start": 3}, {"length": 0}):
            with pytest.raises(ObjectNotFound):
                await read_all(store, "no/such", **range_)

    async def test_get_refuses_more_than_allowed(self, store: ChunkStore) -> None:
        await store.put("big", b"x" * 1001)
        with pytest.raises(ObjectTooLarge):
            await store.get("big", max_bytes=1000)
        assert len(await store.get("big", max_bytes=1001)) == 1001

    async def test_put_replaces_and_the_tag_changes(self, store: ChunkStore) -> None:
        await store.put("k", b"one")
        before = await store.head("k")
        await store.put("k", b"two")
        after = await store.head("k")
        assert await store.get("k", max_bytes=9) == b"two"
        assert before is not None
        assert after is not None
        assert before.etag != after.etag

    async def test_put_if_absent_never_replaces(self, store: ChunkStore) -> None:
        assert await store.put_if_absent("k", b"first") is True
        assert await store.put_if_absent("k", b"other") is False
        assert await store.put_if_absent("k", b"first") is False
        assert await store.get("k", max_bytes=9) == b"first"

    async def test_twelve_simultaneous_creates_have_one_winner(self, store: ChunkStore) -> None:
        for round_ in range(5):
            key = f"race/{round_}/decision.json"
            bodies = [b"%d" % i * 3000 for i in range(12)]
            won = await asyncio.gather(*(store.put_if_absent(key, body) for body in bodies))
            assert sum(won) == 1
            assert await store.get(key, max_bytes=10**6) == bodies[won.index(True)]

    async def test_twelve_creates_of_equal_bytes_have_one_winner(self, store: ChunkStore) -> None:
        assert sum(await asyncio.gather(*(store.put_if_absent("same", b"x") for _ in range(12)))) == 1

    async def test_readers_see_only_whole_objects_while_it_is_replaced(self, store: ChunkStore) -> None:
        await store.put("latest", b"\0" * 100_000)
        done = False

        async def write() -> None:
            nonlocal done
            for i in range(1, 25):
                await store.put("latest", bytes([i]) * (100_000 + 997 * i))
            done = True

        async def read() -> int:
            seen = 0
            while not done:
                data = await store.get("latest", max_bytes=1 << 20)
                assert data == data[:1] * (100_000 + 997 * data[0])
                seen += 1
            return seen

        _, first, second = await asyncio.gather(write(), read(), read())
        assert first + second > 0

    async def test_ranges(self, store: ChunkStore) -> None:
        data = random.Random(1).randbytes(5000)
        await store.put("k", data)
        for start, length in [(0, None), (0, 1), (10, 20), (4999, 1), (4990, 100), (0, 5000), (1, None), (7, 0)]:
            expected = data[start : None if length is None else start + length]
            range_ = {"start": start} if length is None else {"start": start, "length": length}
            assert await read_all(store, "k", **range_) == expected
        assert await read_all(store, "k", start=5000) == b""
        assert await read_all(store, "k", start=6000, length=5) == b""
        for range_ in ({"start": -1}, {"length": -1}):
            with pytest.raises(InvalidInput):
                await read_all(store, "k", **range_)

    async def test_a_large_object_streams_from_a_file(self, store: ChunkStore, tmp_path: Path) -> None:
        data = random.Random(2).randbytes((5 << 20) + 123)
        source = tmp_path / "source.bin"
        source.write_bytes(data)
        assert await store.put_if_absent("big", source)
        assert not await store.put_if_absent("big", source)
        pieces = [piece async for piece in store.stream("big")]
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) <= 1 << 20
        await store.put("copy", source)
        source.write_bytes(b"changed afterwards")
        assert await read_all(store, "copy", start=5 << 20) == data[5 << 20 :]

    async def test_a_file_that_cannot_be_read_is_the_callers_error(self, store: ChunkStore, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput):
            await store.put("k", tmp_path / "missing")
        assert await store.head("k") is None

    async def test_listing_is_ordered_by_key_and_bounded_by_prefix(self, store: ChunkStore) -> None:
        # '-' and '.' sort before '/', digits after: the order of keys is not that of directories.
        keys = ["a-b", "a.b", "a/10", "a/9", "a/b-c/d", "a/b/c", "a/b0", "a0/x", "ab", "b/z"]
        for key in random.Random(3).sample(keys, len(keys)):
            await store.put(key, b"")
        assert await keys_of(store, "a/") == sorted(k for k in keys if k.startswith("a/"))
        assert await keys_of(store, "a/b/") == ["a/b/c"]
        assert await keys_of(store, "") == sorted(keys)
        assert await keys_of(store, "ab/") == []
        for bad in ("a", "../", "/", "a//", ".tmp/"):
            with pytest.raises(InvalidInput):
                await keys_of(store, bad)

    async def test_a_listing_longer_than_a_page_is_complete(self, store: ChunkStore) -> None:
        keys = [f"n/{i % 7}/{i}" for i in range(530)]
        for i in range(0, len(keys), 40):
            await asyncio.gather(*(store.put(k, b"") for k in keys[i : i + 40]))
        assert await keys_of(store, "n/") == sorted(keys)

    async def test_deleting_removes_once_and_leaves_siblings(self, store: ChunkStore) -> None:
        await store.put("d/e/one", b"1")
        await store.put("d/two", b"2")
        assert await store.delete("d/e/one") is True
        assert await store.delete("d/e/one") is False
        assert await store.head("d/e/one") is None
        assert await keys_of(store, "d/") == ["d/two"]
        assert await store.put_if_absent("d/e/one", b"again")

    async def test_an_open_read_survives_deletion_or_is_cut_never_mixed(self, store: ChunkStore) -> None:
        data = b"a" * (3 << 20)
        await store.put("k", data)
        stream = store.stream("k")
        got = await anext(stream)
        await store.put("k", b"b" * (3 << 20))
        try:
            async for piece in stream:
                got += piece
        except StoreError:
            return
        assert got == data

    async def test_creates_and_deletes_in_one_directory_do_not_disturb_each_other(self, store: ChunkStore) -> None:
        async def churn(name: str) -> None:
            for _ in range(30):
                assert await store.put_if_absent(f"p/q/{name}", name.encode())
                assert await store.get(f"p/q/{name}", max_bytes=9) == name.encode()
                assert await store.delete(f"p/q/{name}")

        await asyncio.gather(*(churn(f"n{i}") for i in range(4)))
        assert await keys_of(store, "p/") == []

    async def test_an_object_cannot_be_a_directory_too(self, store: ChunkStore) -> None:
        await store.put("a/b", b"x")
        for attempt in (store.put("a", b"y"), store.put_if_absent("a", b"y"), store.put("a/b/c", b"y")):
            with pytest.raises(StoreError):
                await attempt
        assert await store.head("a") is None
        assert await store.head("a/b/c") is None
        assert await store.delete("a") is False
        assert await store.delete("a/b/c") is False
        assert await keys_of(store, "a/b/") == []
        assert await keys_of(store, "") == ["a/b"]

    @pytest.mark.parametrize("key", BAD_KEYS)
    async def test_bad_keys_are_refused_by_every_verb(self, store: ChunkStore, key: str) -> None:
        for attempt in (
            store.put(key, b"x"),
            store.put_if_absent(key, b"x"),
            store.get(key, max_bytes=1),
            store.head(key),
            store.delete(key),
            read_all(store, key),
        ):
            with pytest.raises(InvalidInput):
                await attempt
        assert await keys_of(store, "") == []

    async def test_a_cancelled_put_leaves_all_or_nothing(self, store: ChunkStore) -> None:
        data = b"z" * (2 << 20)
        for i in range(8):
            task = asyncio.ensure_future(store.put(f"c/{i}", data))
            for _ in range(i * 3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for key in await keys_of(store, "c/"):
            assert await store.get(key, max_bytes=len(data)) == data

    async def test_every_error_is_one_of_ours(self, store: ChunkStore) -> None:
        with pytest.raises(DteError) as caught:
            await store.get("missing", max_bytes=1)
        assert "missing" in caught.value.message
        assert caught.value.remedy
