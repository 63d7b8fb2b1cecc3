"""How the operations of a receiver rank are named on the wire, and what their failures look like there.

Invariant: the table is all a transport (socket server, engine plugin) needs to serve a `ReceiverCore`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clients.protocol import Model
from clients.rollout import p2p_protocol as groups
from clients.rollout import protocol as p
from clients.rollout.core import ReceiverCore
from engine.errors import DteError

Operations = dict[str, tuple[type[Model], Callable[..., Model], bool]]


def operations(core: ReceiverCore) -> Operations:
    """Operation name → (body, function, only for the owner)."""
    return {
        "describe": (p.Empty, core.describe, False),
        "status": (p.Empty, core.status, False),
        "audit": (p.Audit, core.audit, False),
        "adopt": (p.Adopt, core.adopt, True),
        "prepare": (p.Prepare, core.prepare, True),
        "commit": (p.Commit, core.commit, True),
        "finalize": (p.Finalize, core.finalize, True),
        "rollback": (p.Empty, core.rollback, True),
        "abort": (p.Empty, core.abort, True),
        "resync": (p.Resync, core.resync, True),
        # These name their owner instead: a daemon asks on a connection of their own, because they take long.
        "connect": (groups.Connect, core.group.connect, False),
        "receive": (groups.Receive, core.group.receive, False),
        "leave": (groups.Leave, core.group.leave, False),
    }


def error_body(error: Exception) -> p.ErrorBody:
    """What an operation's failure looks like to the daemon."""
    if isinstance(error, DteError):
        tensors: Sequence[str] = getattr(error, "tensors", ())
        detail: dict[str, Any] = {"tensors": list(tensors)[:100]} if tensors else {}
        member = getattr(error, "member", None)
        if member is not None:
            detail["member"] = member  # of a P2P group: who is to blame
        return p.ErrorBody(code=error.code, message=error.message, remedy=error.remedy, detail=detail)
    return p.ErrorBody(code="receiver-error", message=f"{type(error).__name__}: {error}")
