"""Who may call: the token, the loopback rule, and the size of what is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel

from app import problems
from app.auth import BearerAuth
from app.bodies import BodyLimit, DrainUnread
from app.main import create_app
from app.settings import Settings
from tests.transports.http_server import serving

TOKEN = "correct-horse"


class Body(BaseModel):
    text: str


def small_app(token: str | None, max_bytes: int = 1000) -> FastAPI:
    app = FastAPI()
    problems.install(app)

    @app.get("/healthz")
    async def healthz() -> str:
        return "ok"

    @app.post("/parsed")
    async def parsed(body: Body) -> int:
        return len(body.text)

    @app.post("/raw")
    async def raw(request: Request) -> int:
        return len(await request.body())

    @app.put("/store/{key:path}")
    async def store(key: str, request: Request) -> int:
        return len(await request.body())

    app.add_middleware(BodyLimit, max_bytes=max_bytes)
    app.add_middleware(BearerAuth, token=token)
    app.add_middleware(problems.UnexpectedErrors)
    app.add_middleware(DrainUnread, max_bytes=10_000_000)
    return app


@pytest.fixture
def guarded() -> TestClient:
    return TestClient(small_app(TOKEN))


@pytest.fixture
def local() -> TestClient:
    return TestClient(small_app(None), base_url="http://127.0.0.1:7411")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong-horse",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN} x",
        "Bearer \xff\xfe",
    ],
)
def test_a_wrong_token_is_refused(guarded: TestClient, header: str | None) -> None:
    headers = [] if header is None else [(b"Authorization", header.encode("latin-1"))]
    response = guarded.post("/raw", headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["remedy"]
    assert TOKEN not in response.text


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN} "])
def test_the_right_token_is_let_in(guarded: TestClient, header: str) -> None:
    assert guarded.post("/raw", headers={"Authorization": header}).status_code == 200


def test_two_authorization_headers_are_refused(guarded: TestClient) -> None:
    twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer wrong-horse")]
    assert guarded.post("/raw", headers=twice).status_code == 401  # type: ignore[arg-type]


def test_only_liveness_is_open(guarded: TestClient) -> None:
    assert guarded.get("/healthz").status_code == 200
    for path in ("/healthz/", "/healthz/x", "//healthz", "/openapi.json", "/none", "/HEALTHZ"):
        assert guarded.get(path, follow_redirects=False).status_code == 401, path


def test_every_call_of_a_real_daemon_but_liveness_wants_the_token(tmp_path: Path) -> None:
    app = create_app(Settings.load(data_dir=tmp_path, roles="store", token=TOKEN))
    with TestClient(app) as client:
        paths = [p.replace("{key}", "k") for p in app.openapi()["paths"]]
        assert len(paths) >= 5
        for path in [*paths, "/openapi.json"]:
            status = client.get(path).status_code
            assert status == (200 if path == "/healthz" else 401), path
        assert client.put("/store/k", content=b"x").status_code == 401
        assert client.put("/store/k", content=b"x", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 201


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7411", "localhost:7411", "[::1]:7411", "trainer0", "a.localhost", "10.1.2.3"]
)
def test_without_a_token_local_callers_are_let_in(local: TestClient, host: str) -> None:
    assert local.post("/raw", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example.", "[bad"])
def test_without_a_token_a_name_that_dns_could_rebind_is_refused(local: TestClient, host: str) -> None:
    response = local.post("/raw", headers={"Host": host})
    assert response.status_code == 403
    assert response.json()["remedy"]


def test_without_a_token_a_web_page_of_another_origin_is_refused(local: TestClient) -> None:
    assert local.post("/raw", headers={"Origin": "http://evil.example"}).status_code == 403
    assert local.post("/raw", headers={"Origin": "null"}).status_code == 403
    assert local.post("/raw", headers={"Origin": "http://127.0.0.1:7411"}).status_code == 200


# --- sizes ----------------------------------------------------------------------------------------------------------


async def pieces(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 100):
        yield b"x" * 100


def test_a_body_up_to_the_limit_passes(local: TestClient) -> None:
    assert local.post("/raw", content=b"x" * 1000).json() == 1000


def test_a_declared_length_above_the_limit_is_refused_unread(local: TestClient) -> None:
    for path in ("/raw", "/parsed", "/none"):
        response = local.post(path, content=b"x" * 1001)
        assert response.status_code == 413
        assert response.json()["type"] == "urn:dte:problem:body-too-large"


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/raw", "/parsed"])
async def test_a_body_of_unknown_length_is_cut_at_the_limit(path: str) -> None:
    transport = httpx.ASGITransport(small_app(None))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        headers = {"Content-Type": "application/json"}
        response = await client.post(path, content=pieces(1100), headers=headers)
        assert response.status_code == 413
        assert response.headers["content-type"] == "application/problem+json"
        declared = await client.post(path, content=b"x" * 1100, headers=headers)
        assert response.json() == declared.json(), "the same problem, however it was noticed"
        assert response.json()["type"] == "urn:dte:problem:body-too-large"
        assert (await client.post("/raw", content=pieces(1000))).json() == 1000


@pytest.mark.parametrize("length", ["x", "-1", "1e3", "9" * 30])
def test_a_length_that_is_no_number_is_refused(local: TestClient, length: str) -> None:
    assert local.post("/raw", headers={"Content-Length": length}).status_code == 413


def test_the_store_has_its_own_limit(local: TestClient) -> None:
    assert local.put("/store/k", content=b"x" * 5000).json() == 5000


# --- refusals reach their sender ------------------------------------------------------------------------------------


def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    with serving(small_app(TOKEN)) as url, httpx.Client(base_url=url) as client:
        for _ in range(10):
            assert client.put("/store/k", content=b"x" * 8_000_000).status_code == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert client.post("/raw", content=b"x" * 8_000_000, headers=headers).status_code == 413


@pytest.mark.anyio
async def test_only_so_much_is_read_for_the_sake_of_a_refusal() -> None:
    read = 0

    async def receive() -> dict[str, object]:
        nonlocal read
        read += 1_000_000
        return {"type": "http.request", "body": b"x" * 1_000_000, "more_body": True}

    sent: list[dict[str, object]] = []

    async def send(message: MutableMapping[str, object]) -> None:
        sent.append(dict(message))

    headers = [(b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "PUT", "path": "/store/k", "headers": headers, "query_string": b""}
    await small_app(TOKEN)(scope, receive, send)
    assert read == 10_000_000
    assert sent[0]["status"] == 401
    assert (b"connection", b"close") in sent[0]["headers"]  # type: ignore[operator]
