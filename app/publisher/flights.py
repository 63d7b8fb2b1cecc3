"""Versions of one rank on their way: delivered, or aborted by the rank that cannot deliver.

One invariant: every number this rank has promised leads to exactly one task here, and that task ends when something
stands at the number. Until then the rank's cut stays closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine

from app.publisher.accounting import count_version
from app.publisher.publication import Publication, abort_version
from app.publisher.rank_state import LaunchEnded, RankState
from app.publisher.uploader import Target
from clients.protocol import JobState, SyncRequest
from engine.errors import DteError, StateConflict
from engine.records import AbortDecision, CommitDecision, Decision

log = logging.getLogger(__name__)


class Flights:
    """At most one task at a time."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._task: asyncio.Task[None] | None = None

    def deliver(self, job_id: str, version: int, timings_ms: dict[str, float]) -> None:
        """Publish the version that the worker's ledger has in flight."""
        self._state.in_flight, self._state.promised = version, None
        self._start(self._publish(job_id, version, timings_ms), f"publish-{version}")

    def abandon(self, version: int, reason: str) -> None:
        """Abort a promised number that this rank cannot deliver."""
        self._state.promised = version
        self._start(self._abandon(version, reason), f"abort-{version}")

    async def rescue(self, sync: SyncRequest) -> None:
        """Abort a version that other ranks wait for and whose sync never reached this rank.

        The cut is agreed before anything is read, so a part of an older step than this one, at a number where this rank
        has nothing in flight, can never be completed.
        """
        state = self._state
        if state.undecided is not None or state.epoch is None:
            return
        number = state.chain.next_version
        try:
            parts = await state.chain.parts(number, state.epoch)
        except DteError as error:
            log.warning("%s: parts of version %d cannot be read: %s", state.name, number, error)
            return
        missed = any(part.step < sync.step for part in parts.values())
        if missed and state.registration.rank not in parts and state.undecided is None:
            self.abandon(number, "revoked")

    async def landed(self) -> None:
        """Wait until nothing is on its way."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Cancel what is on its way; it goes on after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        before = self._task

        async def guarded() -> None:
            if before is not None and not before.done():
                await asyncio.wait([before])
            try:
                await work
            except DteError as error:
                self._state.end(error)
            except Exception as error:
                log.exception("%s: %s failed", self._state.name, name)
                self._state.end(DteError(f"{name} failed: {error}", remedy="Register the rank as a new launch."))

        self._task = asyncio.create_task(guarded(), name=name)

    async def _abandon(self, version: int, reason: str) -> None:
        s = self._state
        assert s.epoch is not None
        await abort_version(s.node, s.chain, s.committer, version, s.epoch, reason)
        if s.promised == version:
            s.promised = None
            s.changed()
        with contextlib.suppress(LaunchEnded):
            s.check_superseded()

    async def _publish(self, job_id: str, version: int, timings_ms: dict[str, float]) -> None:
        s = self._state
        assert s.epoch is not None
        target = Target(s.registration.run, version, s.epoch, s.registration.rank)
        publication = Publication(
            s.node,
            s.chain,
            s.committer,
            s.link,
            target,
            s.registration.launch,
            lambda stage: s.update(job_id, stage),
        )
        if s.member is not None:
            await s.member.offer(version)
        outcome = await publication.run(timings_ms)
        decision = outcome.decision
        committed = isinstance(decision, CommitDecision) and decision.epoch == s.epoch
        rejected = isinstance(decision, AbortDecision) and decision.reason == "rejected"
        if rejected:
            s.node.degraded.count("version-rejected", detail=f"{s.name}, version {version}")
        await s.settle(version, committed=committed, dense=rejected)
        s.update(job_id, timings_ms=outcome.timings_ms)
        count_version(s.node, outcome)
        await self._finish(job_id, decision, outcome.problem, committed)
        with contextlib.suppress(LaunchEnded):
            s.check_superseded()

    async def _finish(self, job_id: str, decision: Decision, trouble: DteError | None, committed: bool) -> None:
        if committed:
            await self._state.finish(job_id, JobState.COMMITTED)
        elif isinstance(decision, AbortDecision) and decision.reason == "unchanged":
            await self._state.finish(job_id, JobState.UNCHANGED)
        elif trouble is not None:
            await self._state.finish(job_id, JobState.FAILED, trouble)
        else:
            reason = decision.reason if isinstance(decision, AbortDecision) else "superseded"
            aborted = StateConflict(
                f"version {decision.version} was aborted: {reason}.",
                remedy="Nothing is lost: the next version carries what this one had.",
            )
            await self._state.finish(job_id, JobState.ABORTED, aborted)
