"""Every error becomes a problem document, and none says more than it should."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from app import problems
from app.degraded import Degraded
from app.metrics import Metrics
from app.publisher.rank_state import Revoked
from app.publisher.worker_handle import WorkerDied
from app.worker.protocol import SpoolFull
from engine import errors
from transports import errors as store_errors
from transports.memory.shm import SharedMemoryFull, SharedMemoryInvalid


class Body(BaseModel):
    numbers: list[int]


def app_raising(error: Exception) -> FastAPI:
    app = FastAPI()
    problems.install(app)

    @app.get("/fail")
    async def fail() -> None:
        raise error

    @app.post("/typed")
    async def typed(body: Body) -> int:
        return len(body.numbers)

    @app.get("/late")
    async def late() -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            yield b"some"
            raise error

        return StreamingResponse(body())

    app.add_middleware(problems.UnexpectedErrors)
    return app


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidInput("m", remedy="r"), 422, "invalid-input"),
        (errors.LayoutError("m", remedy="r"), 422, "layout"),
        (errors.UnsupportedOptimizer("m", remedy="r"), 422, "unsupported-optimizer"),
        (errors.CodecError("m", remedy="r"), 422, "corrupt-data"),
        (errors.ProofError("m", remedy="r"), 409, "proof-failed"),
        (errors.StateConflict("m", remedy="r"), 409, "state-conflict"),
        (store_errors.StoreError("m", remedy="r"), 502, "store"),
        (store_errors.StoreForbidden("m", remedy="r"), 502, "store-forbidden"),
        (store_errors.StoreUnavailable("m", remedy="r"), 503, "store-unavailable"),
        (store_errors.StoreFull("m", remedy="r"), 507, "store-full"),
        (store_errors.KeyConflict("m", remedy="r"), 409, "key-conflict"),
        (store_errors.ObjectNotFound("m", remedy="r"), 404, "object-not-found"),
        (store_errors.ObjectTooLarge("m", remedy="r"), 413, "object-too-large"),
        (store_errors.ObjectCorrupt("m", remedy="r"), 422, "object-corrupt"),
        (problems.HttpProblem(418, "teapot", "m", remedy="r"), 418, "teapot"),
        (errors.DteError("m", remedy="r"), 500, "error"),
        (SpoolFull("m", remedy="r"), 507, "spool-full"),
        (Revoked("m", remedy="r"), 409, "revoked"),
        (WorkerDied("m", remedy="r"), 503, "worker-died"),
        (SharedMemoryInvalid("m", remedy="r"), 422, "shared-memory-invalid"),
        (SharedMemoryFull("m", remedy="r"), 507, "shared-memory-full"),
    ],
)
def test_each_error_class_has_its_status_and_type(error: errors.DteError, status: int, code: str) -> None:
    response = TestClient(app_raising(error)).get("/fail")
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["type"] == f"urn:dte:problem:{code}"
    assert (document["status"], document["detail"], document["remedy"]) == (status, "m", "r")
    assert document["title"]
    assert ("retry-after" in response.headers) == (status == 503)


def test_states_asked_for_again_and_again_are_not_logged_each_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "app"):
        for _ in range(3):
            problems.response(problems.HttpProblem(503, "receiver-not-ready", "it is behind"))
        assert not caplog.records
        problems.response(store_errors.StoreUnavailable("the store is away"))
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_subclass_nobody_listed_has_its_parents_status() -> None:
    class Special(errors.LayoutError):
        code = "special"

    assert problems.status_of(Special("m")) == 422


@pytest.mark.parametrize(("method", "path", "status"), [("get", "/none", 404), ("delete", "/typed", 405)])
def test_the_frameworks_own_errors_are_problems_too(method: str, path: str, status: int) -> None:
    response = TestClient(app_raising(RuntimeError())).request(method, path)
    assert response.status_code == status
    document = response.json()
    assert document["status"] == status
    assert document["remedy"]
    if status == 405:
        assert response.headers["allow"] == "POST"


def test_an_http_exception_keeps_its_detail_and_headers() -> None:
    error = HTTPException(429, "slow down", {"Retry-After": "3"})
    response = TestClient(app_raising(error)).get("/fail")
    assert response.json()["detail"] == "slow down"
    assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"numbers": "secret-value"}', b"\xff", b'{"numbers": [1,'])
def test_a_body_that_does_not_fit_is_explained_without_repeating_it(body: bytes) -> None:
    response = TestClient(app_raising(RuntimeError())).post(
        "/typed", content=body, headers={"Content-Type": "application/json"}
    )
    assert 400 <= response.status_code < 500
    document = response.json()
    assert document["type"].startswith("urn:dte:problem:")
    assert document["detail"]
    assert "secret-value" not in response.text


def test_of_many_wrong_fields_some_are_named_and_the_rest_counted() -> None:
    response = TestClient(app_raising(RuntimeError())).post("/typed", json={"numbers": ["x"] * 500})
    document = response.json()
    assert len(document["errors"]) == 20
    assert document["more_errors"] == 480
    assert document["errors"][0]["where"] == "body.numbers.0"


def test_an_unforeseen_error_is_logged_here_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = TestClient(app_raising(RuntimeError("the-secret"))).get("/fail")
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert "the-secret" not in response.text
    assert "Traceback" not in response.text
    assert "the-secret" in caplog.text


def test_an_error_in_the_middle_of_a_body_breaks_the_connection() -> None:
    with pytest.raises(RuntimeError):
        TestClient(app_raising(RuntimeError("late"))).get("/late")


def test_degraded_modes_are_logged_counted_and_measured(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    degraded = Degraded(metrics)
    with caplog.at_level(logging.WARNING):
        degraded.count("dense-tiles", 3, "formula mismatch")
        degraded.count("dense-tiles")
        degraded.count("nothing", 0)
    assert degraded.snapshot() == {"dense-tiles": 4}
    assert caplog.text.count("degraded: dense-tiles") == 2
    assert "formula mismatch" in caplog.text
    assert b'dte_degraded_total{name="dense-tiles"} 4.0' in metrics.render()
