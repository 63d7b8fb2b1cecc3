"""`HttpStore` against the real embedded server, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from engine.errors import DteError, InvalidInput
from tests.transports.http_server import CuttingProxy, serving, store_app
from tests.transports.store_conformance import StoreConformance, keys_of, read_all
from transports.errors import (
    ObjectCorrupt,
    ObjectNotFound,
    ObjectTooLarge,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreUnavailable,
)
from transports.store.http import HttpStore
from transports.store.local import TMP
from transports.store.retry import RetryPolicy, Surroundings

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "served"


@pytest.fixture
def server(root: Path) -> Iterator[str]:
    with serving(store_app(root)) as url:
        yield url


@pytest.fixture
async def store(server: str) -> AsyncIterator[HttpStore]:
    async with HttpStore(server + "/store", page_keys=100) as store:
        yield store


class TestConformance(StoreConformance):
    pass


@dataclass
class Time:
    """A clock that only moves when somebody sleeps; chance is always at its upper end."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def around(self) -> Surroundings:
        return Surroundings(clock=lambda: self.now, wall=lambda: self.now, sleep=self.sleep, random=lambda: 1.0)


Step = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


@dataclass
class Script:
    """A transport that answers from a list, and keeps the requests. The last answer repeats."""

    steps: list[Step]
    seen: list[httpx.Request] = field(default_factory=list)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.seen.append(request)
        step = self.steps[min(len(self.seen), len(self.steps)) - 1]
        if isinstance(step, Exception):
            raise step
        return fresh(step(request) if callable(step) else step)


def fresh(response: httpx.Response) -> httpx.Response:
    """The same answer as if it came from a connection: its body not read yet."""
    try:
        body: httpx.AsyncByteStream = Whole(response.content)
    except httpx.ResponseNotRead:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        body = response.stream
    return httpx.Response(response.status_code, headers=response.headers, stream=body)


class Whole(httpx.AsyncByteStream):
    """A body that is all there."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data


def scripted(*steps: Step, deadline_s: float = 60.0) -> tuple[HttpStore, Script, Time]:
    script, time = Script(list(steps)), Time()
    store = HttpStore(
        "http://store.test/store",
        "secret-token",
        policy=RetryPolicy(deadline_s=deadline_s, base_s=0.1, cap_s=5.0),
        transport=httpx.MockTransport(script),
        around=time.around(),
    )
    return store, script, time


class Broken(httpx.AsyncByteStream):
    """A body that breaks after its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data
        raise httpx.ReadError("connection reset")


def object_response(data: bytes, status: int = 200, **headers: str) -> httpx.Response:
    return httpx.Response(status, content=data, headers={k.replace("_", "-"): v for k, v in headers.items()})


# --- retries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
async def test_statuses_that_pass_are_tried_again(status: int) -> None:
    store, script, time = scripted(httpx.Response(status), httpx.Response(status), object_response(b"ok"))
    assert await store.get("k", max_bytes=9) == b"ok"
    assert len(script.seen) == 3
    assert time.slept == [0.1, 0.2]


async def test_connection_errors_are_tried_again() -> None:
    errors = [httpx.ConnectError("x"), httpx.ReadTimeout("x"), httpx.RemoteProtocolError("x"), httpx.WriteError("x")]
    store, script, _ = scripted(*errors, httpx.Response(201))
    await store.put("k", b"data")
    assert len(script.seen) == 5
    assert all(r.content == b"data" for r in script.seen[4:])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, StoreError),
        (401, StoreForbidden),
        (403, StoreForbidden),
        (301, StoreError),
        (413, ObjectTooLarge),
        (422, InvalidInput),
        (501, StoreError),
        (507, StoreFull),
    ],
)
async def test_statuses_that_stay_are_not_tried_again(status: int, kind: type[DteError]) -> None:
    store, script, time = scripted(httpx.Response(status, headers={"Location": "http://elsewhere.test/"}))
    with pytest.raises(kind):
        await store.put("k", b"x")
    assert len(script.seen) == 1
    assert time.slept == []


async def test_pauses_double_up_to_the_cap_and_end_at_the_deadline() -> None:
    store, script, time = scripted(httpx.Response(503), deadline_s=30.0)
    with pytest.raises(StoreUnavailable) as caught:
        await store.head("k")
    assert time.slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5])
    assert time.now <= 1030
    assert len(script.seen) == 11
    assert "HTTP 503" in caught.value.message


async def test_pauses_are_spread_by_chance() -> None:
    time = Time()
    chances = iter([0.5, 0.25, 0.0])
    around = Surroundings(time.around().clock, time.around().wall, time.sleep, lambda: next(chances))
    script = Script([httpx.Response(503)] * 3 + [httpx.Response(404)])
    store = HttpStore("http://s.test/store", transport=httpx.MockTransport(script), around=around)
    assert await store.head("k") is None
    assert time.slept == pytest.approx([0.05, 0.05, 0.0])


@pytest.mark.parametrize("value", ["7", "Thu, 01 Jan 1970 00:16:47 GMT"])
async def test_retry_after_in_seconds_and_as_a_date_is_obeyed(value: str) -> None:
    store, _, time = scripted(httpx.Response(429, headers={"Retry-After": value}), object_response(b"x"))
    await store.get("k", max_bytes=1)
    assert time.slept == pytest.approx([7.1])


async def test_a_retry_after_behind_the_deadline_ends_at_once() -> None:
    store, script, time = scripted(httpx.Response(503, headers={"Retry-After": "3600"}))
    with pytest.raises(StoreUnavailable):
        await store.head("k")
    assert time.slept == []
    assert len(script.seen) == 1


@pytest.mark.parametrize("value", ["soon", "-5", "", "99999999999999999999", "Thu, 99 Jan 2099", "1e9", "٣"])
async def test_a_strange_retry_after_breaks_nothing(value: str) -> None:
    store, _, _ = scripted(
        httpx.Response(503, headers=[(b"Retry-After", value.encode())]), object_response(b"x"), deadline_s=1e12
    )
    assert await store.get("k", max_bytes=1) == b"x"


# --- writing --------------------------------------------------------------------------------------------------------


async def test_every_put_carries_length_hash_token_and_no_encoding(tmp_path: Path) -> None:
    data = b"some bytes" * 10_000
    source = tmp_path / "f"
    source.write_bytes(data)
    store, script, _ = scripted(httpx.Response(201))
    await store.put("a/b", data)
    await store.put_if_absent("a/b", source)
    for request in script.seen:
        assert request.headers["x-checksum-sha256"] == hashlib.sha256(data).hexdigest()
        assert request.headers["content-length"] == str(len(data))
        assert "transfer-encoding" not in request.headers
        assert request.headers["authorization"] == "Bearer secret-token"
        assert request.headers["accept-encoding"] == "identity"
        assert request.content == data
        assert request.url == "http://store.test/store/a/b"
    assert "if-none-match" not in script.seen[0].headers
    assert script.seen[1].headers["if-none-match"] == "*"


def holds(data: bytes) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Length": "1", "X-Checksum-SHA256": hashlib.sha256(data).hexdigest()})


async def test_a_create_whose_answer_was_lost_finds_its_own_object() -> None:
    store, script, _ = scripted(httpx.ReadError("lost"), httpx.Response(412), holds(b"mine"))
    assert await store.put_if_absent("k", b"mine") is True
    assert [r.method for r in script.seen] == ["PUT", "PUT", "HEAD"]
    assert script.seen[2].headers["x-want-checksum"] == "sha256"


async def test_a_create_whose_answer_was_lost_finds_somebody_elses_object() -> None:
    store, _, _ = scripted(httpx.ReadError("lost"), httpx.Response(412), holds(b"theirs"))
    assert await store.put_if_absent("k", b"mine") is False


async def test_a_create_refused_at_the_first_try_asks_nothing_more() -> None:
    store, script, _ = scripted(httpx.Response(412))
    assert await store.put_if_absent("k", b"mine") is False
    assert len(script.seen) == 1


async def test_a_create_that_cannot_tell_the_winner_says_so() -> None:
    store, _, _ = scripted(
        httpx.ReadError("x"), httpx.Response(412), httpx.Response(200, headers={"Content-Length": "1"})
    )
    with pytest.raises(StoreError):
        await store.put_if_absent("k", b"mine")


async def test_a_412_to_a_plain_put_is_an_error() -> None:
    store, _, _ = scripted(httpx.Response(412))
    with pytest.raises(StoreError):
        await store.put("k", b"x")


async def test_bytes_damaged_on_the_way_are_sent_again_but_not_for_ever() -> None:
    damaged = httpx.Response(422, json={"type": "urn:dte:problem:object-corrupt", "detail": "hash"})
    store, script, _ = scripted(damaged, httpx.Response(201))
    await store.put("k", b"x")
    assert len(script.seen) == 2
    store, script, _ = scripted(damaged)
    with pytest.raises(ObjectCorrupt):
        await store.put("k", b"x")
    assert len(script.seen) == 3


async def test_a_delete_whose_answer_was_lost_counts_as_done() -> None:
    store, _, _ = scripted(httpx.ReadError("lost"), httpx.Response(404))
    assert await store.delete("k") is True
    store, _, _ = scripted(httpx.Response(404))
    assert await store.delete("k") is False


# --- reading --------------------------------------------------------------------------------------------------------


async def test_an_interrupted_read_goes_on_where_it_stopped() -> None:
    store, script, _ = scripted(
        httpx.Response(200, headers={"Content-Length": "10", "ETag": '"e"'}, stream=Broken(b"0123")),
        httpx.Response(206, headers={"Content-Length": "6", "Content-Range": "bytes 4-9/10"}, stream=Broken(b"45")),
        object_response(b"6789", 206, Content_Range="bytes 6-9/10"),
    )
    assert await store.get("k", max_bytes=10) == b"0123456789"
    assert [r.headers.get("range") for r in script.seen] == [None, "bytes=4-9", "bytes=6-9"]
    assert [r.headers.get("if-range") for r in script.seen] == [None, '"e"', '"e"']


async def test_a_range_that_breaks_goes_on_inside_the_range() -> None:
    first = httpx.Response(
        206, headers={"Content-Length": "4", "Content-Range": "bytes 2-5/10", "ETag": '"e"'}, stream=Broken(b"2")
    )
    store, script, _ = scripted(first, object_response(b"345", 206, Content_Range="bytes 3-5/10"))
    assert await read_all(store, "k", start=2, length=4) == b"2345"
    assert [r.headers["range"] for r in script.seen] == ["bytes=2-5", "bytes=3-5"]


async def test_a_read_is_never_mixed_from_two_objects() -> None:
    broken = httpx.Response(200, headers={"Content-Length": "10", "ETag": '"e"'}, stream=Broken(b"0123"))
    store, _, _ = scripted(broken, object_response(b"abcdefghij", ETag='"f"'))
    with pytest.raises(ObjectCorrupt):
        await store.get("k", max_bytes=10)


@pytest.mark.parametrize("etag", [{}, {"ETag": 'W/"e"'}])
async def test_a_read_without_a_strong_tag_is_not_resumed(etag: dict[str, str]) -> None:
    broken = httpx.Response(200, headers={"Content-Length": "10", **etag}, stream=Broken(b"0123"))
    store, script, _ = scripted(broken, object_response(b"456789", 206, Content_Range="bytes 4-9/10"))
    with pytest.raises(StoreUnavailable):
        await store.get("k", max_bytes=10)
    assert len(script.seen) == 1


async def test_a_body_that_ends_early_is_noticed() -> None:
    class Short(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"012"

    store, script, _ = scripted(
        httpx.Response(200, headers={"Content-Length": "5", "ETag": '"e"'}, stream=Short()),
        object_response(b"34", 206, Content_Range="bytes 3-4/5"),
    )
    assert await store.get("k", max_bytes=10) == b"01234"
    assert len(script.seen) == 2


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, headers={"Content-Encoding": "gzip", "Content-Length": "3"}, stream=Broken(b"abc")),
        httpx.Response(200, headers={"Transfer-Encoding": "chunked"}, stream=Broken(b"abc")),
        httpx.Response(206, headers={"Content-Length": "3", "Content-Range": "bytes 0-9/10"}, stream=Broken(b"abc")),
        httpx.Response(206, headers={"Content-Length": "3", "Content-Range": "bytes 5-7/10"}, stream=Broken(b"abc")),
        httpx.Response(206, headers={"Content-Length": "3"}, stream=Broken(b"abc")),
        httpx.Response(206, headers={"Content-Length": "3", "Content-Range": "bytes 0-2/2"}, stream=Broken(b"abc")),
    ],
)
async def test_answers_whose_lengths_cannot_be_trusted_are_refused(answer: httpx.Response) -> None:
    store, script, _ = scripted(answer)
    with pytest.raises(StoreError):
        await store.get("k", max_bytes=100)
    assert len(script.seen) == 1


async def test_a_store_without_ranges_is_refused_where_they_matter() -> None:
    store, _, _ = scripted(object_response(b"0123456789"))
    with pytest.raises(StoreError, match="ranges"):
        await read_all(store, "k", start=5)


async def test_too_large_an_object_is_refused_before_its_body() -> None:
    store, _, _ = scripted(httpx.Response(200, headers={"Content-Length": "1000000"}, stream=Broken(b"")))
    with pytest.raises(ObjectTooLarge):
        await store.get("k", max_bytes=10)


async def test_a_read_that_makes_progress_outlives_many_interruptions() -> None:
    data = b"0123456789" * 10

    def next_byte(request: httpx.Request) -> httpx.Response:
        first = int(request.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"Content-Length": str(100 - first), "ETag": '"e"'}
        if first:
            headers["Content-Range"] = f"bytes {first}-99/100"
        return httpx.Response(206 if first else 200, headers=headers, stream=Broken(data[first : first + 1]))

    store, script, time = scripted(next_byte)
    assert await store.get("k", max_bytes=100) == data
    assert len(script.seen) == 100
    assert max(time.slept) == pytest.approx(0.1)


async def test_a_slow_consumer_does_not_use_up_the_deadline() -> None:
    store, _, time = scripted(
        httpx.Response(200, headers={"Content-Length": "4", "ETag": '"e"'}, stream=Broken(b"01")),
        object_response(b"23", 206, Content_Range="bytes 2-3/4"),
        deadline_s=1.0,
    )
    got = b""
    async for piece in store.stream("k"):
        got += piece
        time.now += 100
    assert got == b"0123"


# --- listing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        {"keys": ["p/b", "p/a"], "next": None},
        {"keys": ["p/a", "p/a"], "next": None},
        {"keys": ["q/a"], "next": None},
        {"keys": ["p/../x"], "next": None},
        {"keys": ["p/a"], "next": "p/0"},
        {"keys": [], "next": "p/a"},
        {"keys": [1], "next": None},
        {"keys": "p/a"},
        [],
        "<html>",
    ],
)
async def test_a_listing_that_makes_no_sense_is_refused(page: object) -> None:
    store, script, _ = scripted(httpx.Response(200, json=page))
    with pytest.raises(StoreError):
        await keys_of(store, "p/")
    assert len(script.seen) == 1


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["ftp://h/store", "http://", "http:///store", "http://h/store?x=1", "http://u:p@h/store", "store", ""]
)
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        HttpStore(url)


async def test_the_environment_is_not_consulted(server: str, tmp_path: Path) -> None:
    # A proxy variable would make this fail: nothing listens there. (Only the child sees the variable.)
    code = (
        "import asyncio, sys\nfrom transports.store.http import HttpStore\n"
        "async def main():\n"
        "    async with HttpStore(sys.argv[1]) as s:\n"
        "        await s.put('k', b'x')\n"
        "asyncio.run(main())\n"
    )
    import sys

    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, server + "/store", env={**os.environ, "HTTP_PROXY": "http://127.0.0.1:9"}
    )
    assert await child.wait() == 0


# --- over a real wire -----------------------------------------------------------------------------------------------


async def test_a_body_survives_connections_that_are_cut_again_and_again(server: str) -> None:
    data = random.Random(5).randbytes(3 << 20)
    async with HttpStore(server + "/store") as direct:
        await direct.put("big", data)
    proxy = CuttingProxy(int(server.rsplit(":", 1)[1]), after=700_000)
    async with proxy as url, HttpStore(url + "/store", around=Time().around()) as store:
        assert await read_all(store, "big") == data
        assert proxy.connections >= 5
        assert await read_all(store, "big", start=1 << 20, length=1 << 20) == data[1 << 20 : 2 << 20]


async def test_a_dead_server_is_unavailable_and_a_live_one_is_found_again(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    async with HttpStore(f"http://127.0.0.1:{port}/store", around=Time().around()) as store:
        with pytest.raises(StoreUnavailable):
            await store.put("k", b"x")


async def test_a_put_cut_off_in_the_middle_is_never_visible(root: Path) -> None:
    def send_half(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as s:
            s.sendall(b"PUT /store/cut HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 2_500_000)

    with serving(store_app(root)) as url:
        await asyncio.to_thread(send_half, url)
        async with HttpStore(url + "/store") as store:
            assert await store.head("cut") is None
            assert await keys_of(store, "") == []
            assert await store.put_if_absent("cut", b"whole")
            assert await store.get("cut", max_bytes=9) == b"whole"
    assert os.listdir(root / TMP) == []


async def test_closing_a_stream_early_gives_its_connection_back(server: str) -> None:
    async with HttpStore(server + "/store", max_connections=1) as store:
        await store.put("big", b"x" * (4 << 20))
        for _ in range(5):
            stream = store.stream("big")
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
        with pytest.raises(ObjectNotFound):
            await store.get("none", max_bytes=1)
