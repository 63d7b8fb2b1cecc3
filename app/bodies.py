"""What is sent to the daemon: how much of it is taken, and how a refusal still reaches its sender.

Invariant: no call but a PUT to the store (which streams to disk) can make the daemon hold more than `max_bytes`, and an
error answer is sent only after the request's body was read, as far as that is bounded.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.problems import HttpProblem, PassedProblem, response

STORE_PREFIX = "/store"
MAX_DRAIN_BYTES = 64 << 20
MAX_DRAIN_S = 10.0


class DrainUnread:
    """Reads what is left of a request's body before an error answer goes out.

    A server that answers early and closes makes the sender's kernel throw the answer away (a reset), so that a client
    with a wrong token would see a broken connection, and try again, instead of a 401. The outermost middleware.
    """

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_DRAIN_BYTES, max_s: float = MAX_DRAIN_S) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._max_s = max_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        complete = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

        async def observed() -> Message:
            nonlocal complete
            message = await receive()
            complete = complete or message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def drain() -> None:
            left = self._max_bytes
            try:
                async with asyncio.timeout(self._max_s):
                    while not complete and left > 0:
                        left -= len((await observed()).get("body", b""))
            except TimeoutError:
                return

        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and not complete:
                await drain()
                if not complete:
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self.app(scope, observed, answering)


class BodyLimit:
    """Answers 413 to a body longer than `max_bytes`, by its declared length or while it arrives.

    The store is exempt: it streams to disk and has a limit of its own.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path == STORE_PREFIX or path.startswith(STORE_PREFIX + "/"):
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if not (declared.isascii() and declared.isdigit()) or len(declared) > 19 or int(declared) > self._max:
            await response(self._problem())(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise PassedProblem(self._problem())
            return message

        await self.app(scope, limited, send)

    def _problem(self) -> HttpProblem:
        return HttpProblem(
            413,
            "body-too-large",
            f"The body is longer than {self._max} bytes.",
            remedy="Send less, or raise max_body_bytes (DTE_MAX_BODY_BYTES).",
        )
