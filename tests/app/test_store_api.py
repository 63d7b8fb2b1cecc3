"""`/store` over HTTP: what a client may rely on, and what a hostile one cannot do."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.transports.http_server import serving, store_app
from tests.transports.test_store_local import FullDisk
from transports.store.local import TMP, LocalStore

DATA = bytes(range(256)) * 40
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def client(root: Path) -> Iterator[httpx.Client]:
    with serving(store_app(root, max_object_bytes=2_000_000)) as url, httpx.Client(base_url=url) as client:
        assert client.put("/store/a/b", content=DATA).status_code == 201
        yield client


def problem(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["type"] == f"urn:dte:problem:{code}"
    assert response.json()["detail"]


def nothing_kept(root: Path, *keys: str) -> None:
    assert not [k for k in keys if (root / k).exists()]
    assert os.listdir(root / TMP) == []


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_whole_object(client: httpx.Client) -> None:
    response = client.get("/store/a/b", headers={"Accept-Encoding": "gzip, br"})
    assert response.status_code == 200
    assert response.content == DATA
    assert response.headers["content-length"] == str(len(DATA))
    assert response.headers["accept-ranges"] == "bytes"
    assert response.headers["content-type"] == "application/octet-stream"
    assert "content-encoding" not in response.headers
    assert "transfer-encoding" not in response.headers


@pytest.mark.parametrize(
    ("header", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-9", 5, 10),
        ("bytes=10000-", 10000, len(DATA)),
        ("bytes=-7", len(DATA) - 7, len(DATA)),
        ("bytes=-999999", 0, len(DATA)),
        ("bytes=5-999999999", 5, len(DATA)),
        ("bytes=0-", 0, len(DATA)),
    ],
)
def test_a_range(client: httpx.Client, header: str, start: int, stop: int) -> None:
    response = client.get("/store/a/b", headers={"Range": header})
    assert response.status_code == 206
    assert response.content == DATA[start:stop]
    assert response.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"
    assert response.headers["content-length"] == str(stop - start)


@pytest.mark.parametrize(
    "header", ["bytes=", "bytes=-", "bytes=9-5", "bytes=a-b", "lines=0-1", "bytes=0-1,3-4", "bytes=0-1-2", "bytes=+1-2"]
)
def test_what_is_no_single_range_gives_the_whole(client: httpx.Client, header: str) -> None:
    response = client.get("/store/a/b", headers={"Range": header})
    assert response.status_code == 200
    assert response.content == DATA


@pytest.mark.parametrize("header", [f"bytes={len(DATA)}-", "bytes=999999999-", "bytes=-0", "bytes=99999999-999999999"])
def test_a_range_outside_is_416_with_the_length(client: httpx.Client, header: str) -> None:
    response = client.get("/store/a/b", headers={"Range": header})
    problem(response, 416, "range-not-satisfiable")
    assert response.headers["content-range"] == f"bytes */{len(DATA)}"


def test_if_range_gives_the_range_of_the_same_object_only(client: httpx.Client) -> None:
    etag = client.head("/store/a/b").headers["etag"]
    headers = {"Range": "bytes=0-3", "If-Range": etag}
    assert client.get("/store/a/b", headers=headers).content == DATA[:4]
    client.put("/store/a/b", content=b"other bytes")
    response = client.get("/store/a/b", headers=headers)
    assert (response.status_code, response.content) == (200, b"other bytes")


def test_if_none_match_saves_the_body(client: httpx.Client) -> None:
    etag = client.head("/store/a/b").headers["etag"]
    for value in (etag, f'"x", {etag}', "*"):
        response = client.get("/store/a/b", headers={"If-None-Match": value})
        assert (response.status_code, response.content) == (304, b"")
    assert client.get("/store/a/b", headers={"If-None-Match": '"x"'}).status_code == 200


def test_head_says_length_and_tag_and_on_request_the_hash(client: httpx.Client) -> None:
    response = client.head("/store/a/b")
    assert response.headers["content-length"] == str(len(DATA))
    assert response.headers["etag"].startswith('"')
    assert "x-checksum-sha256" not in response.headers
    response = client.head("/store/a/b", headers={"X-Want-Checksum": "sha256"})
    assert response.headers["x-checksum-sha256"] == SHA
    assert client.head("/store/none").status_code == 404


def test_a_missing_object(client: httpx.Client) -> None:
    problem(client.get("/store/none"), 404, "object-not-found")
    problem(client.get("/store/a"), 404, "object-not-found")
    problem(client.delete("/store/none"), 404, "object-not-found")


# --- writing --------------------------------------------------------------------------------------------------------


def test_create_only(client: httpx.Client) -> None:
    assert client.put("/store/c", content=b"1", headers={"If-None-Match": "*"}).status_code == 201
    problem(client.put("/store/c", content=b"2", headers={"If-None-Match": "*"}), 412, "object-exists")
    assert client.get("/store/c").content == b"1"
    assert client.put("/store/c", content=b"3").status_code == 201
    assert client.get("/store/c").content == b"3"


def test_the_hash_is_verified(client: httpx.Client, root: Path) -> None:
    problem(client.put("/store/w", content=DATA, headers={"X-Checksum-SHA256": "0" * 64}), 422, "object-corrupt")
    for bad in ("xyz", "", "0" * 63):
        problem(client.put("/store/w", content=DATA, headers={"X-Checksum-SHA256": bad}), 400, "bad-checksum")
    nothing_kept(root, "w")
    assert client.put("/store/w", content=DATA, headers={"X-Checksum-SHA256": SHA.upper()}).status_code == 201
    problem(client.put("/store/a/b", content=b"x", headers={"X-Checksum-SHA256": SHA}), 422, "object-corrupt")
    assert client.get("/store/a/b").content == DATA, "a refused overwrite changes nothing"


def test_too_long_an_object_is_refused_by_its_declared_and_by_its_real_length(client: httpx.Client, root: Path) -> None:
    problem(client.put("/store/l", content=b"x" * 2_000_001), 413, "object-too-large")

    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 100_000

    response = client.put("/store/l", content=endless())
    problem(response, 413, "object-too-large")
    nothing_kept(root, "l")
    assert client.put("/store/l", content=b"x" * 2_000_000).status_code == 201


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"If-Match": '"x"'}, 501, "unsupported-condition"),
        ({"If-None-Match": '"x"'}, 501, "unsupported-condition"),
        ({"If-Unmodified-Since": "Thu, 01 Jan 1970 00:00:00 GMT"}, 501, "unsupported-condition"),
        ({"Content-Encoding": "gzip"}, 415, "content-encoding"),
        ({"Content-Range": "bytes 0-1/2"}, 400, "partial-put"),
    ],
)
def test_what_cannot_be_honoured_is_refused_not_ignored(
    client: httpx.Client, root: Path, headers: dict[str, str], status: int, code: str
) -> None:
    problem(client.put("/store/n", content=b"x", headers=headers), status, code)
    nothing_kept(root, "n")


def test_a_full_disk_is_507_and_nothing_is_kept(root: Path) -> None:
    with serving(store_app(FullDisk(root))) as url:
        problem(httpx.put(url + "/store/k", content=DATA), 507, "store-full")
    nothing_kept(root, "k")


def test_a_name_that_is_a_directory_is_a_conflict(client: httpx.Client) -> None:
    problem(client.put("/store/a", content=b"x"), 409, "key-conflict")
    problem(client.put("/store/a/b/c", content=b"x"), 409, "key-conflict")


def test_deleting(client: httpx.Client, root: Path) -> None:
    assert client.delete("/store/a/b").status_code == 204
    assert client.delete("/store/a/b").status_code == 404
    assert os.listdir(root) == [TMP]


@pytest.mark.parametrize("method", ["POST", "PATCH", "OPTIONS"])
def test_other_methods_are_405(client: httpx.Client, method: str) -> None:
    response = client.request(method, "/store/a/b")
    problem(response, 405, "method-not-allowed")
    assert response.headers["allow"]


# --- keys -----------------------------------------------------------------------------------------------------------

RAW_PATHS = [
    "/store/../secret",
    "/store/a/../../secret",
    "/store/..%2fsecret",
    "/store/%2e%2e/secret",
    "/store/%2e%2e%2fsecret",
    "/store/..%5csecret",
    "/store//etc/passwd",
    "/store/%2fetc%2fpasswd",
    "/store/.tmp/x",
    "/store/a/.hidden",
    "/store/a%00b",
    "/store/a%0ab",
    "/store/a%250ab",
    "/store/a%252e%252e",
    "/store/a/",
    "/store/",
    "/store/%ff%fe",
    "/store/%C3%BC",
    "/store/" + "x" * 256,
    "/store/" + "x/" * 600 + "x",
]


def raw(url: str, method: str, path: str) -> bytes:
    """One request with the path exactly as given, which no client library would send."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as s:
        body = b"evil" if method == "PUT" else b""
        s.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode())
        s.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = b""
        while data := s.recv(65536):
            answer += data
        return answer


@pytest.mark.parametrize("path", RAW_PATHS)
def test_no_spelling_of_a_path_leaves_the_store(client: httpx.Client, root: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_bytes(b"top secret")
    url = str(client.base_url).rstrip("/")
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        answer = raw(url, method, path)
        status = int(answer.split(b" ", 2)[1])
        assert 400 <= status < 500 or (status == 307 and path == "/store/"), (method, path, answer)
        assert b"top secret" not in answer
    assert (tmp_path / "secret").read_bytes() == b"top secret"
    assert sorted(os.listdir(root)) == [TMP, "a"]
    nothing_kept(root)


# --- listing --------------------------------------------------------------------------------------------------------


def test_listing_in_pages(client: httpx.Client) -> None:
    for i in range(5):
        client.put(f"/store/p/{i}", content=b"")
    assert client.get("/store").json() == {"keys": ["a/b", *(f"p/{i}" for i in range(5))], "next": None}
    first = client.get("/store", params={"prefix": "p/", "limit": 2}).json()
    assert first == {"keys": ["p/0", "p/1"], "next": "p/1"}
    second = client.get("/store", params={"prefix": "p/", "limit": 3, "after": first["next"]}).json()
    assert second == {"keys": ["p/2", "p/3", "p/4"], "next": None}
    assert client.get("/store", params={"prefix": "none/"}).json() == {"keys": [], "next": None}


@pytest.mark.parametrize(
    "params",
    [
        {"prefix": "p"},
        {"prefix": "../"},
        {"prefix": "/"},
        {"prefix": ".tmp/"},
        {"limit": 0},
        {"limit": 1001},
        {"limit": "x"},
    ],
)
def test_a_wrong_listing_is_refused(client: httpx.Client, params: dict[str, str | int]) -> None:
    response = client.get("/store", params=params)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"


# --- while things happen --------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_client_that_goes_away_in_a_download_leaves_no_file_open(root: Path) -> None:
    store = LocalStore(root)
    await store.put("big", b"x" * (20 << 20))

    def abandon(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        for _ in range(10):
            with socket.create_connection((host, int(port))) as s:
                s.sendall(b"GET /store/big HTTP/1.1\r\nHost: x\r\n\r\n")
                s.recv(1000)

    def open_objects() -> int:
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(link) == str(root / "big") for link in links)

    with serving(store_app(root)) as url:
        await asyncio.to_thread(abandon, url)
    assert open_objects() == 0
