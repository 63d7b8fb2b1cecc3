"""When a receiver asks the trainer for a dense version, because nothing intact leads it to the newest one.

One invariant: what ended on this node for a reason of its own is asked about once only: else a receiver with a fault
would make every version dense.
"""

from __future__ import annotations

from app.degraded import Degraded
from app.subscriber.targets import Targets, is_unreadable
from engine.errors import CodecError, DteError, ProofError
from engine.records.models import CommitDecision


class DenseRequests:
    """Of the receiver `name`."""

    def __init__(self, targets: Targets, degraded: Degraded, name: str) -> None:
        self._targets = targets
        self._degraded = degraded
        self._name = name
        self._asked: int | None = None
        """The head at which a dense version was asked for last."""

    def helps(self, error: DteError, start: int | None) -> bool:
        """Whether a dense version leads on where a resync from `start` (None: one that could not be read) ended in
        `error`: objects are gone or damaged, or its chunks do not lead to its digests."""
        if is_unreadable(error):
            return True
        lies_or_breaks = error.code in ("chunk-damaged", "wrong-result", CodecError.code, ProofError.code)
        return lies_or_breaks and start is not None and (self._asked is None or start <= self._asked)

    async def ask(self, head: CommitDecision) -> None:
        """Counted as degraded by whoever of all receivers asks first."""
        if await self._targets.ask_for_dense(head):
            self._degraded.count("no-intact-chain", detail=f"receiver {self._name}, version {head.version}")
        self._asked = head.version
