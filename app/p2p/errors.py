"""How a member's part in a group ends before it is complete."""

from __future__ import annotations

from engine.errors import DteError, StateConflict


def lost_member(error: BaseException) -> int | None:
    """Number of the group's member that an error blames, if it is another one than who reports it."""
    found = getattr(error, "member", None)
    return found if isinstance(found, int) else None


class GroupOver(StateConflict):
    """The group has ended while something was going on in it."""

    code = "p2p-group-over"


class RankGone(DteError):
    """A member's process has ended, and its end of the group with it."""

    code = "p2p-rank-gone"


class WorkerSilent(DteError):
    """A worker does not answer what concerns its P2P group. Versions go on through the store."""

    code = "worker-silent"
