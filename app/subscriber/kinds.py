"""The kinds of receivers: what a registration of each must say, and how its engine is reached.

One invariant: what cannot work is refused at registration, with the reason, whenever it can be known then.
"""

from __future__ import annotations

from app.subscriber.engine import Engine
from app.subscriber.sglang import SglangEngine, options_of
from app.subscriber.sglang_server import SglangServer
from app.subscriber.units import UnitFiles
from clients.protocol import ReceiverRegistration
from clients.rollout.protocol import ReceiverGone
from engine.errors import InvalidInput


def check_registration(registration: ReceiverRegistration) -> None:
    """InvalidInput unless this daemon can drive such a receiver."""
    if registration.kind == "sglang":
        if not registration.url or not registration.url.startswith(("http://", "https://")):
            raise InvalidInput("a receiver of kind 'sglang' needs the `url` of its server.")
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
