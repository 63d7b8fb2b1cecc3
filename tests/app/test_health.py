"""A daemon starts its roles in order, says when it is ready, and stops them in reverse, whatever happens."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

from app import problems
from app.api import events as events_api
from app.api import health
from app.chains import MAX_RUNS, Chains
from app.events import EventBus
from app.main import StartError, create_app, lifespan_of
from app.openapi import export
from app.roles.base import Node, Role
from app.settings import Settings
from engine.errors import InvalidInput, StateConflict
from transports.errors import StoreForbidden
from transports.store.local import TMP


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load(data_dir=tmp_path / "data", roles="store")


class Probe(Role):
    """A role that writes down what happens to it."""

    def __init__(self, node: Node, name: str, log: list[str], error: Exception | None = None) -> None:
        super().__init__(node)
        self.name = name
        self.log = log
        self.error = error
        self.reason: str | None = None

    async def start(self) -> None:
        self.log.append(f"start {self.name}")
        if self.error:
            raise self.error

    async def stop(self) -> None:
        self.log.append(f"stop {self.name}")
        if self.name == "clumsy":
            raise RuntimeError("cannot stop")

    def router(self) -> APIRouter | None:
        return None

    def unready(self) -> str | None:
        return self.reason


def app_of(node: Node, roles: list[Role]) -> FastAPI:
    app = FastAPI(lifespan=lifespan_of(node, roles))
    problems.install(app)
    app.include_router(health.router(node, roles))
    return app


@pytest.fixture
def node(settings: Settings) -> Node:
    node: Node = create_app(settings).state.node
    return node


def test_building_a_daemon_touches_nothing(settings: Settings) -> None:
    create_app(settings)
    assert not settings.data_dir.exists()


def test_a_daemon_with_the_store_role_uses_its_own_directory(settings: Settings) -> None:
    with TestClient(create_app(settings)) as client:
        assert client.put("/store/a/b", content=b"x").status_code == 201
        assert (settings.store_dir / "a" / "b").read_bytes() == b"x"
        assert client.get("/readyz").json() == {"ready": True, "roles": {"store": None}}


def test_a_remote_store_leaves_the_embedded_one_its_directory(settings: Settings, tmp_path: Path) -> None:
    app = create_app(settings.model_copy(update={"store": str(tmp_path / "elsewhere")}))
    with TestClient(app) as client:
        client.put("/store/k", content=b"x")
    assert (settings.store_dir / "k").exists()
    assert not (tmp_path / "elsewhere" / "k").exists()
    assert app.state.node.store.root == tmp_path / "elsewhere"


def test_roles_start_in_order_and_stop_in_reverse(node: Node) -> None:
    log: list[str] = []
    roles: list[Role] = [Probe(node, name, log) for name in ("a", "clumsy", "c")]
    with TestClient(app_of(node, roles)) as client:
        assert log == ["start a", "start clumsy", "start c"]
        assert client.get("/healthz").json() == {"status": "ok"}
    assert log[3:] == ["stop c", "stop clumsy", "stop a"]


def test_a_role_that_fails_to_start_stops_the_others_and_says_why(node: Node) -> None:
    log: list[str] = []
    error = StoreForbidden("no access", remedy="fix it")
    roles: list[Role] = [Probe(node, "a", log), Probe(node, "b", log, error), Probe(node, "c", log)]
    app = app_of(node, roles)
    with pytest.raises(StoreForbidden), TestClient(app):
        pass
    assert log == ["start a", "start b", "stop b", "stop a"]
    assert app.state.start_error is error


def test_readiness_names_the_role_and_its_reason(node: Node) -> None:
    roles = [Probe(node, "a", []), Probe(node, "b", [])]
    with TestClient(app_of(node, list(roles))) as client:
        assert client.get("/readyz").status_code == 200
        roles[1].reason = "worker 0 is down"
        response = client.get("/readyz")
        assert response.status_code == 503
        assert response.json() == {"ready": False, "roles": {"a": None, "b": "worker 0 is down"}}
        assert client.get("/healthz").status_code == 200


def test_only_a_change_of_readiness_is_logged(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    role = Probe(node, "a", [])
    with TestClient(app_of(node, [role])) as client, caplog.at_level(logging.INFO, "app.api.health"):
        for role.reason in (None, None, "worker 0 is down", "worker 0 is down", None):
            client.get("/readyz")
    assert [r.message for r in caplog.records if r.name == "app.api.health"] == [
        "role a is ready",
        "role a is not ready: worker 0 is down",
        "role a is ready",
    ]


def test_a_data_dir_has_one_daemon_a_role(settings: Settings) -> None:
    with TestClient(create_app(settings)):
        with pytest.raises(StartError, match="has the role store") as refused, TestClient(create_app(settings)):
            pass
        assert refused.value.remedy
        assert str(os.getpid()) in refused.value.message
        other = settings.model_copy(update={"roles": frozenset({"coordinator"})})
        with TestClient(create_app(other)) as client:
            assert client.get("/healthz").status_code == 200
    with TestClient(create_app(settings)) as client:
        assert client.get("/readyz").status_code == 200


def test_a_data_dir_that_cannot_be_used_is_a_clear_error(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    app = create_app(settings.model_copy(update={"data_dir": tmp_path / "file" / "data"}))
    with pytest.raises(StartError, match="cannot be used"), TestClient(app):
        pass


def test_metrics_name_routes_by_template_never_by_path(settings: Settings) -> None:
    with TestClient(create_app(settings)) as client:
        for i in range(3):
            client.put(f"/store/runs/secret-run/{i}", content=b"abc")
        client.get("/nothing/here")
        client.request("BREW", "/healthz")
        text = client.get("/metrics").text
    assert 'dte_http_requests_total{method="PUT",route="/store/{key:path}",status="201"} 3.0' in text
    assert 'dte_store_bytes_total{direction="in"} 9.0' in text
    assert 'method="other"' in text
    assert "secret-run" not in text
    assert "/nothing" not in text


def test_two_daemons_in_one_process_count_apart(settings: Settings, tmp_path: Path) -> None:
    first, second = create_app(settings), create_app(settings.model_copy(update={"data_dir": tmp_path / "other"}))
    first.state.node.degraded.count("x")
    assert second.state.node.degraded.snapshot() == {}
    assert 'name="x"' not in second.state.node.metrics.render().decode()


def test_the_openapi_document_is_the_same_every_time() -> None:
    document = export()
    assert document == export()
    paths = json.loads(document)["paths"]
    assert {"/healthz", "/readyz", "/metrics", "/events", "/store", "/store/{key}"} <= paths.keys()


# --- chains ---------------------------------------------------------------------------------------------------------


def test_a_run_has_one_chain_made_on_demand() -> None:
    made: list[str] = []

    def make(run: str) -> object:
        made.append(run)
        return object()

    chains = Chains(make)  # type: ignore[arg-type]
    assert chains.default_run() is None
    with pytest.raises(InvalidInput):
        chains.resolve(None)
    chain = chains.get("r")
    assert chains.get("r") is chain
    assert made == ["r"]
    assert chains.default_run() == "r"
    chains.get("s")
    assert chains.default_run() is None
    assert chains.runs() == ["r", "s"]
    assert Chains(make, "d").resolve(None) == "d"  # type: ignore[arg-type]
    assert chains.resolve("x") == "x"
    for bad in ("", "../x", "a/b", ".x", "x" * 200, "a\n"):
        with pytest.raises(InvalidInput):
            chains.get(bad)
    for i in range(MAX_RUNS - 2):
        chains.get(f"n{i}")
    with pytest.raises(StateConflict):
        chains.get("one-too-many")


# --- a real process -------------------------------------------------------------------------------------------------


@contextmanager
def daemon(tmp_path: Path, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    code = (
        "from app.main import serve\nfrom app.settings import Settings\n"
        "serve(Settings.load(), ready=lambda url: print(url, flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DTE_PORT": "0", "DTE_ROLES": "store", "DTE_DATA_DIR": str(tmp_path / "d"), **env},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def test_a_daemon_serves_streams_events_and_stops_on_a_signal_although_a_stream_is_open(tmp_path: Path) -> None:
    with daemon(tmp_path, DTE_SHUTDOWN_TIMEOUT_S="600") as (process, url), httpx.Client(base_url=url) as client:
        assert client.get("/readyz").status_code == 200
        with client.stream("GET", "/events", headers={"Last-Event-ID": "1"}, timeout=60) as stream:
            lines = stream.iter_lines()
            kinds = [next(line for line in lines if line.startswith("event: ")) for _ in range(2)]
            assert kinds == ["event: events-dropped", "event: daemon-started"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert not [line for line in lines if line.startswith("event: daemon-failed")]


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with daemon(tmp_path, DTE_PORT=port) as (process, line):
            assert line == ""
            assert process.wait(60) not in (0, None)


def test_a_killed_daemon_leaves_no_half_object_and_the_next_one_serves_what_was_stored(tmp_path: Path) -> None:
    with daemon(tmp_path) as (process, url):
        assert httpx.put(url + "/store/a", content=b"whole").status_code == 201
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as cut:
            cut.sendall(b"PUT /store/b HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 3_000_000)
            assert httpx.get(url + "/healthz").status_code == 200
            process.kill()
            process.wait()
    for name in os.listdir(tmp_path / "d" / "store" / TMP):
        os.utime(tmp_path / "d" / "store" / TMP / name, (0, 0))
    with daemon(tmp_path) as (_, url):
        assert httpx.get(url + "/store/a").content == b"whole"
        assert httpx.get(url + "/store/b").status_code == 404
        assert httpx.get(url + "/store").json() == {"keys": ["a"], "next": None}
        assert os.listdir(tmp_path / "d" / "store" / TMP) == []


def test_events_wants_a_number_to_resume_from() -> None:
    app = FastAPI()
    problems.install(app)
    bus = EventBus(first_id=1)
    bus.publish("tick")
    asyncio.run(asyncio.sleep(0))
    bus.close()
    app.include_router(events_api.router(bus))
    client = TestClient(app)
    assert "event: tick" in client.get("/events", headers={"Last-Event-ID": "0"}).text
    for bad in ("x", "-1", "9" * 40, "1.5"):
        response = client.get("/events", headers={"Last-Event-ID": bad})
        assert response.status_code == 422, bad
        assert response.json()["remedy"]
