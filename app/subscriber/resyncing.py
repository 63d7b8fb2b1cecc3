"""`Resyncer`: overwrites a receiver's weights from the newest starting point that is intact.

One invariant: from the first write to the proof the receiver counts as at no version; a failure that wrote nothing
leaves the version it had.
"""

from __future__ import annotations

import logging

from app.degraded import Degraded
from app.metrics import Metrics
from app.subscriber.dense import DenseRequests
from app.subscriber.engine import Engine
from app.subscriber.standing import Standing
from app.subscriber.targets import NoSource, Targets, chunk_refs
from app.subscriber.units import NoRoom
from clients.protocol import ReceiverState
from clients.rollout.protocol import ReceiverGone
from engine.errors import DteError
from engine.records.models import CommitDecision

log = logging.getLogger(__name__)


class Resyncer:
    """Of one receiver."""

    def __init__(self, standing: Standing, targets: Targets, metrics: Metrics, degraded: Degraded) -> None:
        self._standing = standing
        self._targets = targets
        self._metrics = metrics
        self._dense = DenseRequests(targets, degraded, standing.name)

    async def run(
        self, engine: Engine, head: CommitDecision, *, because: DteError | None = None, least: int = 0
    ) -> None:
        """Overwrite the weights from the newest starting point, `least` or later, that is intact; else NoSource."""
        reasons: list[str] = [because.message] if because else []
        unread: list[DteError] = []
        dense_helps = True
        standing = self._standing
        async for plan in self._targets.resync_plans(head, least, failures=unread):
            try:
                async with self._targets.local(plan) as bodies:
                    standing.become(ReceiverState.RESYNCING)
                    standing.forget()
                    ms = await engine.resync(bodies)
            except ReceiverGone:
                raise
            except DteError as error:
                await engine.refresh()
                if error.code == "chunk-damaged":
                    await self._targets.cache.discard(chunk_refs(plan))
                reasons.append(f"from version {plan[0].version}: {error.message}")
                dense_helps &= self._dense.helps(error, plan[0].version)
                log.warning("receiver %s: resync from version %d failed: %s", standing.name, plan[0].version, error)
                if not engine.dirty:
                    standing.restore(engine.statuses)
                if isinstance(error, NoRoom):
                    raise  # from any other start it would need as much
                continue
            self.count()
            standing.last_install_ms = {"resync": ms}
            standing.path = "store"
            standing.proven(engine.statuses, head.version, head.step)
            return
        dense_helps &= all(self._dense.helps(error, None) for error in unread)
        if dense_helps:
            await self._dense.ask(head)
        raise NoSource(
            f"nothing intact leads to version {head.version}" + (": " + "; ".join(reasons) if reasons else "."),
            remedy="The trainer's next version is asked to be dense; without a trainer restore the store's objects."
            if dense_helps
            else "See the reasons: a dense version would not help.",
        )

    def count(self) -> None:
        """The weights were written without a delta."""
        self._standing.resyncs += 1
        self._metrics.resyncs.inc()
