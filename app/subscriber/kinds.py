"""The kinds of receivers: what a registration of each must say, and how its engine is reached.

One invariant: what cannot work is refused at registration, with the reason, whenever it can be known then.
"""

from __future__ import annotations

import os.path
from urllib.parse import urlsplit

import httpx

from app.subscriber.engine import Engine
from app.subscriber.sglang import SglangEngine, options_of
from app.subscriber.sglang_server import SglangServer
from app.subscriber.units import UnitFiles
from clients.protocol import ReceiverRegistration
from clients.rollout.protocol import ReceiverGone
from engine.errors import InvalidInput

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def check_registration(registration: ReceiverRegistration) -> None:
    """InvalidInput unless this daemon can drive such a receiver."""
    if registration.kind == "sglang":
        _place_of_server(registration.url or "")
        if registration.sockets:
            raise InvalidInput("a receiver of kind 'sglang' has no `sockets`: its server tells them.")
        options_of(registration)
        return
    if registration.url is not None or registration.options:
        raise InvalidInput("a receiver of kind 'torch' has `sockets`, no `url` and no `options`.")
    if not 1 <= len(registration.sockets) <= 1024:
        raise InvalidInput("a receiver has between 1 and 1024 sockets, one per rank.")
    for path in registration.sockets:
        if not path.startswith("/") or "\0" in path or len(path) > 107:
            raise InvalidInput(f"not an absolute socket path: {path[:80]!r}.")


def places(registration: ReceiverRegistration) -> frozenset[str]:
    """Where the receiver is: two registrations with a place in common are of one and the same. InvalidInput if the
    registration is none."""
    if registration.kind == "sglang":
        return frozenset({_place_of_server(registration.url or "")})
    return frozenset(os.path.normpath(path) for path in registration.sockets)


def _place_of_server(url: str) -> str:
    """The server's address in one spelling; InvalidInput if it is not the address of one."""
    remedy = "Give it as http://HOST:PORT, such as http://127.0.0.1:30000."
    if not url.startswith(("http://", "https://")):
        raise InvalidInput("a receiver of kind 'sglang' needs the `url` of its server.", remedy=remedy)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        httpx.URL(url)
        if not host:
            raise ValueError("it names no host")
        if parts.query or parts.fragment:
            raise ValueError("it has a query or a fragment")
    except (ValueError, httpx.InvalidURL) as error:
        raise InvalidInput(f"the `url` {url[:200]!r} is no server's address: {error}.", remedy=remedy) from None
    host = "localhost" if host in _LOOPBACK else host
    port = port if port is not None else {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


async def check_reachable(registration: ReceiverRegistration) -> None:
    """InvalidInput if the engine answers and is one that cannot be driven. One that does not answer may come later."""
    if registration.kind != "sglang":
        return
    server = SglangServer(registration.url or "", options_of(registration))
    try:
        await server.discover()
    except ReceiverGone:
        pass
    finally:
        await server.aclose()


async def connect(registration: ReceiverRegistration, *, owner: str, fence: int, files: UnitFiles) -> Engine:
    """The engine behind a registration, owned. Errors are those of `Engine.connect`."""
    if registration.kind == "sglang":
        return await SglangEngine.reach(registration, owner=owner, fence=fence, files=files)
    return await Engine.connect(registration.run, registration.sockets, owner=owner, fence=fence)
