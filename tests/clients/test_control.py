"""The control clients: one vocabulary for both twins, waits that end, problems as exceptions, no torch."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients import ShadowedModule, check_siblings
from clients.control import AsyncControlClient, ControlClient
from clients.errors import (
    ApiError,
    Conflict,
    DaemonUnavailable,
    InvalidRequest,
    NotAllowed,
    NotFound,
    WaitTimeout,
    error_for,
)
from clients.http import Options
from clients.protocol import Problem, ReceiverInfo, ReceiverState, VersionInfo
from engine.errors import DteError

pytestmark = pytest.mark.anyio

Answer = Callable[[httpx.Request], httpx.Response]
FAST = Options(backoff_s=0.0)


def version_info(number: int) -> dict[str, Any]:
    return VersionInfo(
        run="r", version=number, epoch=1, step=number, base=number - 1 if number else None, rewound=False, anchor=False,
        elements=10, changed=1, changed_fraction=0.1, dense_tiles=0, bytes=20, bits_per_entry=12.0, created_ms=0,
        writers=1, decision_sha256="0" * 64,
    ).model_dump(mode="json")  # fmt: skip


def receiver(name: str, installed: int | None, *, ready: bool = True) -> dict[str, Any]:
    return ReceiverInfo(
        name=name, kind="torch", run="r", ranks=1, state=ReceiverState.IN_SYNC, ready=ready, installed=installed,
        installed_step=None, lag=None, proof="proven", last_error="" if ready else "no intact chain",
    ).model_dump(mode="json")  # fmt: skip


class Twins:
    """Asks both clients the same and checks that they answer the same."""

    def __init__(self, make_answer: Callable[[], Answer], **options: Any) -> None:
        options = {"options": FAST, "run": "r"} | options
        self._sync = ControlClient("http://d", transport=httpx.MockTransport(make_answer()), **options)
        self._async = AsyncControlClient("http://d", transport=httpx.MockTransport(make_answer()), **options)

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        outcomes: list[Any] = []
        try:
            outcomes.append(getattr(self._sync, method)(*args, **kwargs))
        except DteError as e:
            outcomes.append(e)
        try:
            outcomes.append(await getattr(self._async, method)(*args, **kwargs))
        except DteError as e:
            outcomes.append(e)
        first, second = outcomes
        if isinstance(first, DteError):
            assert type(first) is type(second)
            assert str(first) == str(second)
            raise first
        assert first == second
        return first


def test_the_twins_have_the_same_methods() -> None:
    def shape(kind: type) -> dict[str, list[str]]:
        names = {n for n, f in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")}
        return {n.replace("aclose", "close"): list(inspect.signature(getattr(kind, n)).parameters) for n in names}

    assert shape(ControlClient) == shape(AsyncControlClient)


def test_importing_the_control_client_imports_no_torch() -> None:
    code = "import sys, clients.control; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'fastapi')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


async def test_versions_one_version_and_the_latest() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.params["run"] == "r"
        path = request.url.path
        if path == "/versions":
            body: dict[str, Any] = {"run": "r", "head": 3, "next": 4, "epoch": 1, "versions": [version_info(3)]}
            return httpx.Response(200, json=body)
        if path == "/versions/latest":
            return httpx.Response(200, json=version_info(3))
        return httpx.Response(200, json=version_info(int(path.rsplit("/", 1)[1])))

    twins = Twins(lambda: answer)
    assert (await twins.ask("versions")).head == 3
    assert (await twins.ask("version", 2)).version == 2
    assert (await twins.ask("latest")).version == 3


async def test_nothing_newer_is_none() -> None:
    assert await Twins(lambda: lambda _: httpx.Response(204)).ask("latest", after=3, wait_s=1.0) is None


async def test_waiting_for_a_version_polls_on_from_where_it_stands() -> None:
    def make() -> Answer:
        answers = [httpx.Response(204), httpx.Response(200, json=version_info(6))]

        def answer(request: httpx.Request) -> httpx.Response:
            assert request.url.params["after"] == "4"
            assert 0 < float(request.url.params["wait"]) <= 20
            return answers.pop(0)

        return answer

    # Number 5 may have been spent on an abort: a newer one answers the question too.
    assert (await Twins(make).ask("wait_for_version", 5, 30.0)).version == 6


async def test_waiting_for_the_first_version_needs_no_after() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert "after" not in request.url.params
        return httpx.Response(200, json=version_info(0))

    assert (await Twins(lambda: answer).ask("wait_for_version", 0, 30.0)).version == 0


async def test_waits_end_with_a_remedy() -> None:
    with pytest.raises(WaitTimeout, match=r"version 5 was not committed.*degraded"):
        await Twins(lambda: lambda _: httpx.Response(204)).ask("wait_for_version", 5, 0.0)
    late = [receiver("a", 5), receiver("b", 4), receiver("c", None, ready=False)]
    with pytest.raises(WaitTimeout, match=r"b: in-sync, installed 4; c: in-sync, installed None, no intact chain"):
        await Twins(lambda: lambda _: httpx.Response(200, json=late)).ask("wait_for_receivers", 5, 0.0)
    with pytest.raises(WaitTimeout, match="0 of 1 receivers"):
        await Twins(lambda: lambda _: httpx.Response(200, json=[])).ask("wait_for_receivers", 5, 0.0)


async def test_waiting_for_receivers_needs_all_of_them_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.control.RECEIVER_POLL_S", 0.0)

    def make() -> Answer:
        answers = [
            [receiver("a", 5)],
            [receiver("a", 5), receiver("b", 4)],
            [receiver("a", 6), receiver("b", 5, ready=False)],
            [receiver("a", 6), receiver("b", 5)],
        ]
        return lambda _: httpx.Response(200, json=answers.pop(0))

    found = await Twins(make).ask("wait_for_receivers", 5, 30.0, count=2)
    assert [r.installed for r in found] == [6, 5]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, InvalidRequest), (413, InvalidRequest), (422, InvalidRequest), (401, NotAllowed), (403, NotAllowed),
     (404, NotFound), (409, Conflict), (500, ApiError), (507, ApiError)],
)  # fmt: skip
async def test_problems_become_exceptions_with_detail_and_remedy(status: int, kind: type[ApiError]) -> None:
    body = {"type": "urn:dte:problem:what", "title": "What", "status": status, "detail": "why", "remedy": "Do this."}
    with pytest.raises(kind, match=r"What: why Do this\.") as caught:
        await Twins(lambda: lambda _: httpx.Response(status, json=body)).ask("versions")
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.problem_code) == (status, "what")


async def test_answers_of_something_else_are_said_to_be_that() -> None:
    with pytest.raises(ApiError, match=r"HTTP 418.*not a dte daemon"):
        await Twins(lambda: lambda _: httpx.Response(418, text="<html>teapot</html>")).ask("versions")
    with pytest.raises(ApiError, match="not understood"):
        await Twins(lambda: lambda _: httpx.Response(200, text="<html>hello</html>")).ask("versions")


def test_a_wrong_status_inside_a_document_does_not_fool_the_client() -> None:
    assert type(error_for(Problem(title="x", status=404))) is NotFound


async def test_lost_connections_and_busy_daemons_are_asked_again() -> None:
    def make() -> Answer:
        tries: list[int] = []

        def answer(request: httpx.Request) -> httpx.Response:
            tries.append(1)
            if len(tries) == 1:
                raise httpx.ConnectError("refused", request=request)
            if len(tries) == 2:
                return httpx.Response(503, headers={"Retry-After": "0"})
            return httpx.Response(200, json=version_info(1))

        return answer

    assert (await Twins(make).ask("version", 1)).version == 1


async def test_a_daemon_that_is_not_there_is_named() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(DaemonUnavailable, match=r"no answer from the daemon at http://d: refused\. Start it"):
        await Twins(lambda: answer).ask("versions")


async def test_the_token_is_sent_and_compression_is_not_asked_for() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.headers["Accept-Encoding"] == "identity"
        return httpx.Response(200, json=version_info(1))

    await Twins(lambda: answer, token="secret").ask("version", 1)


STREAM = (
    "retry: 1000\n\n: still here\n\n"
    f"id: 7\nevent: a\ndata: {json.dumps({'id': 7, 'kind': 'a', 'at_ms': 1})}\n\n"
    f"id: 8\nevent: b\ndata: {json.dumps({'id': 8, 'kind': 'b', 'at_ms': 2, 'run': 'r', 'data': {'version': 3}})}\n\n"
)


async def test_events_are_parsed_and_resumed() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Last-Event-ID"] == "6"
        return httpx.Response(200, text=STREAM)

    transport = httpx.MockTransport(answer)
    with ControlClient("http://d", run="r", transport=transport) as control:
        events = list(control.events(after=6))
    async with AsyncControlClient("http://d", run="r", transport=transport) as twin:
        assert [e async for e in twin.events(after=6)] == events
    assert [(e.id, e.kind, e.data) for e in events] == [(7, "a", {}), (8, "b", {"version": 3})]


async def test_a_refused_event_stream_is_an_exception() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(401, json={"title": "No", "status": 401}))
    with ControlClient("http://d", transport=transport) as control, pytest.raises(NotAllowed):
        next(iter(control.events()))
    async with AsyncControlClient("http://d", transport=transport) as twin:
        with pytest.raises(NotAllowed):
            await anext(twin.events())


# --- foreign modules --------------------------------------------------------------------------------------------------


def test_a_foreign_engine_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("raise SystemExit('the foreign module was imported')\n")
    code = "import sys; sys.path.insert(0, sys.argv[1])\nimport clients.control"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "ShadowedModule" in done.stderr
    assert str(tmp_path / "engine.py") in done.stderr
    assert "Rename the foreign one" in done.stderr


def test_an_already_imported_foreign_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transports", sys.modules["json"])
    with pytest.raises(ShadowedModule, match=r"import transports leads to .*json"):
        check_siblings()


def test_a_missing_sibling_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShadowedModule, match="was not found"):
        check_siblings(tmp_path, names=("no_such_package_of_ours",))
