"""How a rank comes to its open epoch: by registering, or by going on where an earlier life of the daemon stopped.

One invariant: the trainer's registration hold is released exactly once something durable says how the rank begins, or
when it is certain that it cannot.
"""

from __future__ import annotations

import contextlib
import logging
import time

from app.publisher.flights import Flights
from app.publisher.opening import Opening, open_epoch
from app.publisher.rank_state import LaunchEnded, RankState, Revoked
from app.publisher.rejoining import epoch_joined_before
from app.publisher.retry import until_stored
from app.worker import protocol as p
from app.worker.protocol import SpoolFull
from clients.protocol import JobState
from engine.errors import DteError

log = logging.getLogger(__name__)


class Registrar:
    """Runs once per session, before any sync is read."""

    def __init__(self, state: RankState, flights: Flights) -> None:
        self._state = state
        self._flights = flights

    async def run(self, job_id: str) -> bool:
        """True when the rank's epoch is open; False when it cannot go on, with the job failed and the hold released."""
        state = self._state
        try:
            await state.save_registration(state.registration)
            await state.save()
            await state.link.ready()
            if state.epoch is not None and not state.unbegun:
                await self._adopt(job_id)
            else:
                state.update(job_id, JobState.READING)
                await self._register(job_id)
        except DteError as error:
            await state.release(state.registration.hold)
            state.end(error)
            await state.finish(job_id, JobState.FAILED, error)
            return False
        return state.ended is None

    async def _register(self, job_id: str) -> None:
        state = self._state
        r = state.registration
        started = time.monotonic()
        initial = await state.link.call(p.Initial(generation=r.generation, hold=r.hold), p.InitialDone)
        if initial.revoked:
            if state.epoch is None:
                await self._rejoin(job_id)
            await self._begin_unread(job_id)
            return
        timings = {"initial": (time.monotonic() - started) * 1e3}
        opening = await open_epoch(state.node, state.chain, state.committer, r, initial, state.check_superseded)
        state.epoch = opening.epoch
        state.update(job_id, epoch=opening.epoch)
        await state.save()
        if opening.moved:
            self._count_lost()
            await self._begin_unread(job_id)
            return
        done = await self._begin(opening)
        timings = {**timings, "hold": (time.monotonic() - started) * 1e3, **done.timings_ms}
        state.unbegun = False
        state.update(job_id, JobState.RELEASED, timings_ms=timings, detail=done.detail)
        if opening.first is None or not opening.publish:
            await state.finish(job_id, JobState.ACCUMULATED)
        elif done.published is None:
            self._flights.abandon(opening.first, "revoked")
            unread = Revoked("the first version was not read.", remedy="The next sync carries it.")
            await state.finish(job_id, JobState.ABORTED, unread)
        else:
            state.update(job_id, version=done.published)
            self._flights.deliver(job_id, done.published, timings)
            await state.save()

    async def _rejoin(self, job_id: str) -> None:
        """Find the epoch without a read; Revoked if this rank was never in one."""
        state = self._state
        state.epoch = await epoch_joined_before(state.node, state.committer, state.registration, state.check_superseded)
        if state.epoch is None:
            raise Revoked(
                "the registration's hold was revoked before every slice was read.",
                remedy="Keep the trainer held until the registration's job is released; register as a new launch.",
            )
        self._count_lost()
        state.update(job_id, epoch=state.epoch)
        await state.save()

    def _count_lost(self) -> None:
        state = self._state
        state.node.degraded.count("spool-lost", detail=f"{state.name} starts over from the newest version")

    async def _begin(self, opening: Opening) -> p.ReadDone:
        """Set the base and, under the hold, read the first version; without it if the spool has no room."""
        state = self._state
        r = state.registration

        def request(version: int | None) -> p.Begin:
            return p.Begin(
                epoch=opening.epoch,
                version=version,
                base=opening.base,
                differs=None if opening.differs is None else sorted(opening.differs),
                generation=r.generation,
                hold=r.hold,
            )

        try:
            return await state.link.call(request(opening.first if opening.publish else None), p.ReadDone)
        except SpoolFull as error:
            state.node.degraded.count("spool-full", detail=f"{state.name}: {error}")
            return await state.link.call(request(None), p.ReadDone)

    async def _begin_unread(self, job_id: str) -> None:
        """The epoch is open, but what the rank holds was not read in it: everything goes dense with the next sync."""
        state = self._state
        await until_stored(state.node.degraded, "the chain", state.chain.refresh)
        await state.rebase()
        state.unbegun = False
        await state.release(state.registration.hold)
        number = state.chain.next_version
        await self._find_own_part()
        if state.chain.state.first and state.epoch == state.chain.state.epoch:
            # The others may wait for this rank's part of the epoch's first version; it will never come.
            self._flights.abandon(number, "revoked")
        await state.finish(job_id, JobState.ACCUMULATED)

    async def _find_own_part(self) -> None:
        """A part of this rank's that no spool remembers may stand at the next number: it is not tried again. If it is
        the last one, that number is a version; else whoever has none there aborts it, or sends its own."""
        state, epoch = self._state, self._state.epoch
        assert epoch is not None
        number = state.chain.next_version
        parts = await until_stored(state.node.degraded, "parts", lambda: state.chain.parts(number, epoch))
        if state.registration.rank in parts:
            state.taken = number
            await until_stored(state.node.degraded, "decision", lambda: state.committer.try_commit(number))

    async def _adopt(self, job_id: str) -> None:
        """Go on after a restart: jobs and the version in flight are those of the spool."""
        state = self._state
        await until_stored(state.node.degraded, "the chain", state.chain.refresh)
        with contextlib.suppress(LaunchEnded):
            state.check_superseded()
        version = state.in_flight
        if version is not None:
            owners = [k for k, v in state.records.items() if v.job.version == version and not v.job.state.final]
            self._flights.deliver(owners[-1] if owners else job_id, version, {})
        elif state.ended is None:
            await self._find_own_part()  # what an earlier life found out is not in the spool
        for key, record in list(state.records.items()):
            job = record.job
            waits = record.sync is not None and job.state in (JobState.QUEUED, JobState.READING)
            if not job.state.final and not waits and (job.version is None or job.version != version):
                await state.finish(key, JobState.ACCUMULATED)
        log.info("%s: adopted at step %d, in flight: %s", state.name, state.last_step, version)
