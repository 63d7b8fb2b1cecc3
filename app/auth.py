"""Who may call: pure ASGI middleware in front of every route.

Invariant: with a token set, nothing but `/healthz` answers a request that lacks it. Without one (loopback only), a web
page in a browser on this machine still cannot reach the daemon, not even by DNS rebinding.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.problems import HttpProblem, response

OPEN_PATHS = frozenset({"/healthz"})


class BearerAuth:
    """Requires the bearer token, compared in constant time; without a token, requires a local caller."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            refusal = self._refuse_token(headers) if self._token is not None else _refuse_foreign(headers)
            if refusal is not None:
                await response(refusal)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refuse_token(self, headers: Headers) -> HttpProblem | None:
        assert self._token is not None
        given = headers.getlist("authorization")
        scheme, _, token = (given[0] if len(given) == 1 else "").partition(" ")
        right = hmac.compare_digest(token.strip().encode("latin-1", "replace"), self._token)
        if right and scheme.lower() == "bearer":
            return None
        return HttpProblem(
            401,
            "unauthorized",
            "The bearer token is wrong." if given else "This daemon wants a bearer token.",
            remedy="Send `Authorization: Bearer <token>` with the daemon's token (DTE_TOKEN).",
            headers={"WWW-Authenticate": 'Bearer realm="dte"'},
        )


def _refuse_foreign(headers: Headers) -> HttpProblem | None:
    """Without a token every local process is trusted, but no web page is: names that DNS can rebind, and requests
    that a browser says come from another origin, are refused."""
    host = headers.get("host", "")
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        what = "the request comes from a web page of another origin"
    elif _rebindable(host):
        what = f"the Host header {host[:100]!r} is not a local name"
    else:
        return None
    return HttpProblem(
        403,
        "foreign-origin",
        f"Refused: {what}.",
        remedy="Call the daemon by its loopback address, or set DTE_TOKEN and send it.",
    )


def _rebindable(host: str) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." in name and not name.endswith(".localhost")
    return False
