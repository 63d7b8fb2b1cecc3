"""HTTP plumbing shared by all clients: one description of a call, sent by a synchronous or an asynchronous twin.

One invariant: whatever goes wrong surfaces as a `clients.errors` exception, within the deadline, and only calls that
may be repeated are repeated. Imports no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from clients.errors import ApiError, DaemonUnavailable, error_for
from clients.protocol import Problem
from transports.tls import verification

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_RETRY_STATUS: Final = frozenset({429, 502, 503, 504})
_MAX_PAUSE_S: Final = 5.0
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class Options:
    """Deadlines and retries. All times in seconds; `attempts` counts the first try too."""

    connect_s: float = 2.0
    answer_s: float = 10.0
    attempts: int = 3
    backoff_s: float = 0.1

    def timeout(self, wait_s: float = 0.0) -> httpx.Timeout:
        """Deadlines of one try of a call that the daemon may answer `wait_s` late on purpose (a long poll)."""
        return httpx.Timeout(self.answer_s + wait_s, connect=self.connect_s)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request and how to read its answer. `repeatable` calls are sent again after a lost connection."""

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    params: Mapping[str, str | int | float] = field(default_factory=dict)
    body: BaseModel | None = None
    wait_s: float = 0.0
    repeatable: bool = True

    def request(self, client: httpx.Client | httpx.AsyncClient, options: Options) -> httpx.Request:
        """The httpx request for one try."""
        content = None if self.body is None else self.body.model_dump_json().encode()
        headers = {} if content is None else {"Content-Type": "application/json"}
        return client.build_request(
            self.method,
            self.path,
            params=dict(self.params),
            content=content,
            headers=headers,
            timeout=options.timeout(self.wait_s),
        )


def one(model: type[M]) -> Callable[[httpx.Response], M]:
    """A parser for an answer that is one JSON object."""

    def parse(response: httpx.Response) -> M:
        return model.model_validate_json(response.content)

    return parse


def one_or_none(model: type[M]) -> Callable[[httpx.Response], M | None]:
    """A parser for one JSON object, or None for an empty or `null` answer."""

    def parse(response: httpx.Response) -> M | None:
        if response.status_code == 204 or response.content.strip() in (b"", b"null"):
            return None
        return model.model_validate_json(response.content)

    return parse


def nothing(response: httpx.Response) -> None:
    """A parser for an answer without content."""


def read_answer(response: httpx.Response, parse: Callable[[httpx.Response], T]) -> T:
    """The parsed answer, or the exception that a failed one stands for."""
    if response.is_success:
        try:
            return parse(response)
        except (ValidationError, ValueError) as e:
            raise ApiError(
                Problem(
                    title="The daemon's answer is not understood",
                    status=response.status_code,
                    detail=f"{response.request.method} {response.request.url.path}: {str(e)[:300]}",
                    remedy="Use a client and a daemon of the same version; check that the address is a dte daemon's.",
                )
            ) from None
    raise error_for(read_problem(response))


def read_problem(response: httpx.Response) -> Problem:
    """The problem document of a failed answer, or one made up from its status when it carries none."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return Problem(
            title=f"HTTP {response.status_code} {response.reason_phrase}".strip(),
            status=response.status_code,
            detail=response.text[:300],
            remedy="The answer came from something that is not a dte daemon; check the address and proxies."
            if response.status_code < 500
            else "Look into the daemon's log.",
        )
    return problem.model_copy(update={"status": response.status_code})


def unavailable(base_url: str, error: Exception) -> DaemonUnavailable:
    """The exception for a daemon that did not answer."""
    return DaemonUnavailable(
        f"no answer from the daemon at {base_url}: {error or type(error).__name__}.",
        remedy="Start it (dte serve), or check the address, port and network.",
    )


def pause_s(response: httpx.Response | None, attempt: int, options: Options) -> float:
    """How long to wait after try number `attempt` (from 0): the server's Retry-After if it gave one, else backoff."""
    asked = response.headers.get("Retry-After", "") if response is not None else ""
    if asked.isdigit():
        return min(float(asked), _MAX_PAUSE_S)
    return min(options.backoff_s * 2.0**attempt, _MAX_PAUSE_S)


def _retryable(response: httpx.Response, call: Call[Any]) -> bool:
    return call.repeatable and response.status_code in _RETRY_STATUS


def client_settings(base_url: str, token: str | None) -> dict[str, Any]:
    """Keyword arguments for both httpx clients. A proxy set for the internet is not used for the own machine."""
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    host = urlsplit(base_url).hostname or ""
    proxies = host not in _LOOPBACK
    return {
        "base_url": base_url.rstrip("/"),
        "headers": headers,
        "trust_env": proxies,
        "verify": verification(base_url, proxies=proxies),
    }


class Sender:
    """Sends calls synchronously. Close it, or use it as a context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        options: Options | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url
        self.options = options or Options()
        self.client = httpx.Client(transport=transport, **client_settings(base_url, token))

    def send(self, call: Call[T]) -> T:
        """Send `call`; DaemonUnavailable when every try was lost, ApiError for a problem document."""
        last = self.options.attempts - 1 if call.repeatable else 0
        for attempt in range(last + 1):
            response: httpx.Response | None = None
            try:
                response = self.client.send(call.request(self.client, self.options))
                if attempt == last or not _retryable(response, call):
                    return read_answer(response, call.parse)
            except httpx.TransportError as e:
                if attempt == last:
                    raise unavailable(self.base_url, e) from e
            time.sleep(pause_s(response, attempt, self.options))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


class AsyncSender:
    """`Sender` for asyncio."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        options: Options | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url
        self.options = options or Options()
        self.client = httpx.AsyncClient(transport=transport, **client_settings(base_url, token))

    async def send(self, call: Call[T]) -> T:
        """As `Sender.send`."""
        last = self.options.attempts - 1 if call.repeatable else 0
        for attempt in range(last + 1):
            response: httpx.Response | None = None
            try:
                response = await self.client.send(call.request(self.client, self.options))
                if attempt == last or not _retryable(response, call):
                    return read_answer(response, call.parse)
            except httpx.TransportError as e:
                if attempt == last:
                    raise unavailable(self.base_url, e) from e
            await asyncio.sleep(pause_s(response, attempt, self.options))
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        """Close the connections."""
        await self.client.aclose()
