"""`Installer`: takes a receiver along the chain, version by version, from what its ranks received or from the store.

One invariant: everything that leads to the head is here before the first weight is written; and what was received rank
to rank and does not prove itself is given up for what the store has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from app.degraded import Degraded
from app.metrics import Metrics
from app.subscriber.engine import Engine, HalfWritten
from app.subscriber.lane import Lane
from app.subscriber.standing import Standing
from app.subscriber.targets import Step, Targets, chunk_refs
from clients.protocol import ReceiverState
from clients.rollout.protocol import ReceiverGone, TargetBody
from engine.errors import DteError
from engine.records.models import CommitDecision

log = logging.getLogger(__name__)

_NOT_FOR_THE_STORE = frozenset({"wrong-base", "live-changed", "fenced-off", ReceiverGone.code})
"""Why a version that was received cannot be had from the store either."""


class Installer:
    """Of one receiver."""

    def __init__(self, standing: Standing, targets: Targets, metrics: Metrics, degraded: Degraded) -> None:
        self._standing = standing
        self._targets = targets
        self._metrics = metrics
        self._degraded = degraded

    async def catch_up(
        self, engine: Engine, head: CommitDecision, lane: Lane | None, stopping: Callable[[], bool]
    ) -> None:
        """Install the deltas from the installed version to the head."""
        assert self._standing.installed is not None
        plan = await self._targets.path(self._standing.installed, head.version)
        started = time.perf_counter()
        groups = {} if lane is None else await self._received(plan, lane)
        async with self._targets.local([step for step in plan if step.version not in groups]) as bodies:
            wait_ms = (time.perf_counter() - started) * 1e3
            by_version = {body.version: body for body in bodies}
            for step in plan:
                group = groups.get(step.version)
                if group is None:
                    await self._install(engine, by_version[step.version], {"download": wait_ms}, plan)
                else:
                    await self._install_received(engine, step, group, wait_ms)
                wait_ms = 0.0
                if stopping():
                    return

    async def _received(self, plan: list[Step], lane: Lane) -> dict[int, str]:
        """The groups that brought versions of the plan. Only the newest one may still be on its way."""
        found = {step.version: lane.has(step.version) for step in plan[:-1]}
        if plan:
            found[plan[-1].version] = await lane.expect(plan[-1].version)
        return {version: group for version, group in found.items() if group is not None}

    async def _install_received(self, engine: Engine, step: Step, group: str, wait_ms: float) -> None:
        try:
            await self._install(engine, self._targets.body(step, received=group), {"receive": wait_ms}, [])
        except DteError as error:
            if error.code in _NOT_FOR_THE_STORE or isinstance(error, HalfWritten) or engine.dirty:
                raise
            log.warning("receiver %s: version %d as received: %s", self._standing.name, step.version, error)
            self._degraded.count("p2p-rejected", detail=f"receiver {self._standing.name}, version {step.version}")
            started = time.perf_counter()
            async with self._targets.local([step]) as bodies:
                times = {"download": (time.perf_counter() - started) * 1e3}
                await self._install(engine, bodies[0], times, [step])

    async def _install(self, engine: Engine, body: TargetBody, before_ms: dict[str, float], plan: list[Step]) -> None:
        standing = self._standing
        standing.become(ReceiverState.INSTALLING)
        try:
            times = await engine.install(body)
        except DteError as error:
            self._metrics.installs.labels("failed").inc()
            if error.code == "chunk-damaged":
                await self._targets.cache.discard(chunk_refs(plan))
            if isinstance(error, HalfWritten):
                standing.become(ReceiverState.DIRTY, error)
                await engine.refresh()
            raise
        self._metrics.installs.labels("installed").inc()
        standing.last_install_ms = {**before_ms, **times}
        for stage, ms in standing.last_install_ms.items():
            self._metrics.stage_seconds.labels(f"install-{stage}").observe(ms / 1e3)
        standing.path = "store" if body.received is None else "p2p"
        standing.proven(engine.statuses, body.version, body.step)
