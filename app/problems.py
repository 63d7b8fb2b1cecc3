"""Every error of the HTTP API is an RFC 9457 problem document that says what is wrong and what to do.

Invariant: no traceback, secret or request body reaches the client; an error nobody foresaw is logged here and answered
with a bare 500. One table maps error classes to statuses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clients.protocol import Problem
from engine.errors import CodecError, DteError, InvalidInput, ProofError, StateConflict
from transports.errors import (
    KeyConflict,
    ObjectCorrupt,
    ObjectNotFound,
    ObjectTooLarge,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreUnavailable,
)

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_REPORTED_ERRORS = 20

STATUS: dict[type[DteError], HTTPStatus] = {
    DteError: HTTPStatus.INTERNAL_SERVER_ERROR,
    InvalidInput: HTTPStatus.UNPROCESSABLE_ENTITY,
    CodecError: HTTPStatus.UNPROCESSABLE_ENTITY,
    ProofError: HTTPStatus.CONFLICT,
    StateConflict: HTTPStatus.CONFLICT,
    # A store's own refusal of the daemon's credentials is no fault of this request's: 502, not 403.
    StoreError: HTTPStatus.BAD_GATEWAY,
    StoreForbidden: HTTPStatus.BAD_GATEWAY,
    StoreUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    StoreFull: HTTPStatus.INSUFFICIENT_STORAGE,
    KeyConflict: HTTPStatus.CONFLICT,
    ObjectNotFound: HTTPStatus.NOT_FOUND,
    ObjectTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    ObjectCorrupt: HTTPStatus.UNPROCESSABLE_ENTITY,
}

STATUS_OF_CODE: dict[str, HTTPStatus] = {
    "device-memory": HTTPStatus.UNPROCESSABLE_ENTITY,
    "revoked": HTTPStatus.CONFLICT,
    "hold-timeout": HTTPStatus.CONFLICT,
    "no-room": HTTPStatus.INSUFFICIENT_STORAGE,
    "shared-memory": HTTPStatus.UNPROCESSABLE_ENTITY,
    "shared-memory-full": HTTPStatus.INSUFFICIENT_STORAGE,
    "shared-memory-invalid": HTTPStatus.UNPROCESSABLE_ENTITY,
    "spool-full": HTTPStatus.INSUFFICIENT_STORAGE,
    "worker-died": HTTPStatus.SERVICE_UNAVAILABLE,
}
"""The same for classes of modules that not every daemon loads (they pull in torch), by their code."""

_REMEDY: dict[int, str] = {
    401: "Send `Authorization: Bearer <token>` with the daemon's token (DTE_TOKEN).",
    404: "Check the path; GET /openapi.json lists all calls.",
    405: "See the Allow header for the methods this path takes.",
}


class HttpProblem(DteError):
    """An error whose status no error class implies; for conditions that exist only in HTTP."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        remedy: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class PassedProblem(HTTPException):
    """A problem found while the framework parses a body: it lets this class through, and makes a 400 of any other."""

    def __init__(self, problem: HttpProblem) -> None:
        super().__init__(problem.status, problem.message)
        self.problem = problem


def problem_responses(descriptions: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for statuses answered with a problem document."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": text, "content": content} for status, text in descriptions.items()}


def status_of(error: DteError) -> int:
    """The HTTP status of an error: its own, or that of its nearest class in STATUS."""
    if isinstance(error, HttpProblem):
        return error.status
    return status_of_class(type(error))


def status_of_class(kind: type[DteError]) -> int:
    """The HTTP status of an error class: that of its own code, or of its nearest class in STATUS."""
    known = STATUS_OF_CODE.get(kind.code)
    return int(known if known is not None else next(STATUS[c] for c in kind.__mro__ if c in STATUS))


def problem(error: DteError) -> Problem:
    """The problem document of an error."""
    status = status_of(error)
    return Problem(
        type=f"urn:dte:problem:{error.code}",
        title=error.code.replace("-", " ").capitalize(),
        status=status,
        detail=error.message,
        remedy=error.remedy,
    )


def response(error: DteError) -> JSONResponse:
    """The problem document of an error as a response."""
    headers = dict(error.headers) if isinstance(error, HttpProblem) else {}
    status = status_of(error)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.setdefault("Retry-After", "1")
    # "Not now" of the daemon's own is a state that whoever probes hears as often as it asks; its changes are logged.
    not_now = isinstance(error, HttpProblem) and status == HTTPStatus.SERVICE_UNAVAILABLE
    if status >= 500 and not not_now:
        log.warning("answered %d: %s", status, error)
    return _render(problem(error), headers)


def _render(document: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(
        document.model_dump(mode="json"), document.status, headers=dict(headers or {}), media_type=MEDIA_TYPE
    )


async def _on_dte_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DteError)
    return response(error)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, PassedProblem):
        return response(error.problem)
    phrase = HTTPStatus(error.status_code).phrase
    detail = error.detail if isinstance(error.detail, str) and error.detail != phrase else ""
    return _render(
        Problem(
            type=f"urn:dte:problem:{phrase.lower().replace(' ', '-')}",
            title=phrase,
            status=error.status_code,
            detail=detail or f"{request.method} {request.url.path[:200]}: {phrase.lower()}.",
            remedy=_REMEDY.get(error.status_code, ""),
        ),
        error.headers,
    )


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    errors: list[dict[str, Any]] = [
        {"where": ".".join(str(p) for p in e["loc"])[:200], "message": str(e["msg"])[:200]}
        for e in found[:MAX_REPORTED_ERRORS]
    ]
    more = len(found) - len(errors)
    detail = "; ".join(f"{e['where']}: {e['message']}" for e in errors[:3])
    return _render(
        Problem(
            type="urn:dte:problem:invalid-request",
            title="Invalid request",
            status=422,
            detail=detail + (f"; and {len(found) - 3} more." if len(found) > 3 else "."),
            remedy="Correct the named fields; GET /openapi.json gives their types.",
            **{"errors": errors, **({"more_errors": more} if more else {})},
        )
    )


class UnexpectedErrors:
    """Middleware around all that may fail: an error nobody foresaw is logged, and answered without saying what it was.

    Once a response has started, the error goes on, so that the server cuts the connection and the client sees that
    the body is not whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def observed(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, observed)
        except Exception:
            if started:
                raise
            log.exception("unexpected error in %s %s", scope["method"], scope["path"])
            document = Problem(
                type="urn:dte:problem:internal",
                title="Internal error",
                status=500,
                detail="An unexpected error; the daemon's log has the details.",
                remedy="Report it with the log.",
            )
            await _render(document)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Make `app` answer all errors as problem documents (UnexpectedErrors is added with the other middleware)."""
    app.add_exception_handler(DteError, _on_dte_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
