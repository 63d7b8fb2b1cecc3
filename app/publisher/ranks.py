"""`RankSession`: one registered trainer rank in the daemon, from registration to the end of its epoch.

Invariants: reads happen one at a time and in the order of the syncs; a sync is accepted only when it is durable; a
version promised to the other ranks ends in this rank's part or in an abort, whatever happens to worker, disk or store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from app.committer import Committer
from app.problems import HttpProblem
from app.publisher import files
from app.publisher.accounting import count_read
from app.publisher.checks import check_handles, check_hypers
from app.publisher.flights import Flights
from app.publisher.jobs import JobBook, register_job_id, sync_job_id
from app.publisher.p2p import TrainerMember
from app.publisher.rank_state import EpochNotOpen, LaunchEnded, RankState, Revoked
from app.publisher.registering import Registrar
from app.publisher.worker_handle import WorkerDied
from app.roles.base import Node
from app.worker import protocol as p
from app.worker.protocol import BaseMoved, HoldTimeout, SpoolFull
from app.worker.replicas import check_replica
from app.worker.source import check_slice
from app.worker.spool import RankSpool
from clients.protocol import Cut, Job, JobState, RankRegistration, SyncRequest
from engine.errors import DteError, InvalidInput, StateConflict
from transports.errors import StoreError

log = logging.getLogger(__name__)

QUEUED_SYNCS = 8
NOTING_S = 1.0
READY_S = 2.0
STORE_S = 1.5
"""How long a trainer's call waits for the store. The store's own deadline is for uploads, not for training."""
WATCH_S = 2.0
"""How often a session looks whether its trainer lives and its epoch is the newest."""


@dataclass(frozen=True)
class _Waiting:
    """A sync in the queue, and when it came."""

    job_id: str
    sync: SyncRequest
    at_s: float


class RankSession:
    """`start` it, `submit` syncs, ask for the `cut`; `retire` to finish what is in flight, `stop` to just end."""

    def __init__(
        self,
        node: Node,
        committer: Committer,
        jobs: JobBook,
        registration: RankRegistration,
        spool: RankSpool,
        known: files.RankJobs | None = None,
    ) -> None:
        self.state = RankState(node, committer, jobs, registration, spool, known)
        self.first_registration = registration
        """As it was posted; the state's has newer memory references."""
        self._flights = Flights(self.state)
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(QUEUED_SYNCS)
        self._busy = False
        self._ready = False
        self._unread = [
            (key, record.sync)
            for key, record in self.state.records.items()
            if record.sync is not None and record.job.state in (JobState.QUEUED, JobState.READING)
        ]
        self._lock = asyncio.Lock()
        self._main: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def worker_pid(self) -> int | None:
        """Process id of the running worker."""
        return self.state.link.pid

    def register_job(self) -> Job:
        """The registration's job as it is now."""
        r = self.first_registration
        job = self.state.jobs.get(register_job_id(r.run, r.launch, r.rank))
        if job is None:
            raise StateConflict(
                f"{self.state.name} was registered long ago; its job is forgotten.", remedy="Go on with POST /sync."
            )
        return job

    def start(self) -> Job:
        """Begin, or go on after a restart; returns the registration's job."""
        state, r = self.state, self.state.registration
        job_id = register_job_id(r.run, r.launch, r.rank)
        record = state.records.get(job_id)
        job = (
            record.job
            if record is not None
            else state.add(Job(id=job_id, kind="register", run=r.run, rank=r.rank, step=r.step, state=JobState.QUEUED))
        )
        self._main = asyncio.create_task(self._run(job_id), name=f"rank-{r.rank}")
        self._watch = asyncio.create_task(self._look_again(), name=f"watch-rank-{r.rank}")
        return job

    async def cut(self) -> Cut:
        """Whether the next sync may publish, and as which number."""
        state, epoch = self.state, await self._open_epoch()
        try:
            async with asyncio.timeout(STORE_S):
                await state.chain.refresh()
        except (StoreError, TimeoutError) as error:
            return Cut(epoch=epoch, version=None, reason=f"the store cannot be read: {error or 'no answer in time'}")
        # What only has to be noted down here is worth a moment: a null costs the whole job a version.
        await state.until(self._noted, NOTING_S)
        state.check_superseded()
        if state.undecided is not None:
            return Cut(epoch=epoch, version=None, reason=f"version {state.undecided} is not decided yet")
        if state.taken == state.chain.next_version:
            return Cut(epoch=epoch, version=None, reason=f"version {state.taken} has an older part of this rank")
        if self._busy or not self._queue.empty():
            return Cut(epoch=epoch, version=None, reason="an earlier sync is still being read")
        try:
            # Here and not in the sync: now the trainer is not held.
            async with asyncio.timeout(STORE_S):
                state.dense_asked = await state.chain.dense_asked()
        except (StoreError, TimeoutError) as error:
            log.warning("%s: requests for a dense version cannot be read: %s", state.name, error or "no answer in time")
        return Cut(epoch=epoch, version=state.chain.next_version)

    async def submit(self, sync: SyncRequest) -> tuple[Job, bool]:
        """Accept a sync; returns its job, and whether it is new. Raises the problem that forbids it."""
        async with self._lock:
            state = self.state
            known = state.jobs.get(sync_job_id(sync.run, sync.launch, sync.epoch, sync.rank, sync.step))
            if known is not None:
                return known, False
            epoch = await self._open_epoch()
            if sync.epoch != epoch:
                raise StateConflict(
                    f"epoch {sync.epoch} is not this launch's, which is {epoch}.",
                    remedy="Use the epoch of the registration's job.",
                )
            if sync.step <= state.last_step:
                raise StateConflict(
                    f"step {sync.step} is not newer than step {state.last_step}.",
                    remedy="Steps must grow from one sync to the next.",
                )
            if sync.version is not None:
                # A store that is away now is no reason to refuse: the number was given out, and the commit is fenced.
                with contextlib.suppress(StoreError, TimeoutError):
                    async with asyncio.timeout(STORE_S):
                        await state.chain.refresh()
                state.check_superseded()
                self._check_number(sync.version)
            try:
                return await self._accept(sync, await self._checked(sync)), True
            except (InvalidInput, SpoolFull):
                if sync.version is not None:
                    self._flights.abandon(sync.version, "revoked")
                raise

    async def retire(self) -> None:
        """Take no more syncs, finish those accepted and what is in flight, remove the spool."""
        self.state.end(LaunchEnded("this rank was deregistered.", remedy="Register it again under a new launch."))
        if self._main is not None:
            await asyncio.wait([self._main])

    async def _leave(self) -> None:
        member, self.state.member = self.state.member, None
        if member is not None:
            await member.aclose()

    async def stop(self) -> None:
        """End now; everything that is not finished goes on after the next start."""
        await self._leave()
        for task in (self._watch, self._main):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._flights.stop()
        await self.state.link.stop()

    async def _look_again(self) -> None:
        """Until the session ends: what its trainer's calls would show may have to be noticed without them."""
        state = self.state
        while state.ended is None:
            await state.until(lambda: state.ended is not None, WATCH_S)
            await state.look()

    def _noted(self) -> bool:
        """Nothing is being read, and no version waits that is decided already."""
        undecided = self.state.undecided
        reading = self._busy or not self._queue.empty()
        return not reading and (undecided is None or undecided >= self.state.chain.next_version)

    # --- accepting -------------------------------------------------------------------------------------------------

    async def _open_epoch(self) -> int:
        """The epoch, once the rank is ready for syncs."""
        await self.state.until(lambda: self._ready or self.state.ended is not None or self.state.epoch is None, READY_S)
        if self.state.ended is not None:
            raise self.state.ended
        if self.state.epoch is None:
            raise EpochNotOpen("the epoch of this launch is not open yet.", remedy="Wait for the registration's job.")
        if not self._ready:
            raise HttpProblem(503, "starting", "the rank's worker is starting.", remedy="Try again in a moment.")
        return self.state.epoch

    def _check_number(self, version: int) -> None:
        number, undecided = self.state.chain.next_version, self.state.undecided
        if version != number:
            raise StateConflict(
                f"version {version} is not the next number, which is {number}.",
                remedy="Ask GET /ranks/{rank}/cut on every rank and use the minimum.",
            )
        if undecided is not None:
            raise StateConflict(
                f"version {undecided} of this rank is not decided yet.",
                remedy="Sync with version null until GET /ranks/{rank}/cut gives a number.",
            )

    async def _checked(self, sync: SyncRequest) -> RankRegistration:
        """The registration as it is with this sync; InvalidInput or LayoutError if the sync does not fit it."""
        registration = check_handles(self.state.registration, sync)
        check_hypers(registration, sync)
        if registration is not self.state.registration:
            metas = {t.name: t for t in registration.tensors}

            def check() -> None:
                for spec in sync.handles:
                    check_slice(spec, metas, len(registration.groups))
                for spec in sync.replica_handles:
                    check_replica(spec, metas)

            await asyncio.to_thread(check)
        return registration

    async def _accept(self, sync: SyncRequest, registration: RankRegistration) -> Job:
        state = self.state
        if self._queue.full():
            raise HttpProblem(
                503, "busy", f"{QUEUED_SYNCS} syncs of this rank wait already.", remedy="Wait for an earlier job."
            )
        job = Job(
            id=sync_job_id(sync.run, sync.launch, sync.epoch, sync.rank, sync.step),
            kind="sync",
            run=sync.run,
            rank=sync.rank,
            step=sync.step,
            state=JobState.QUEUED,
            epoch=sync.epoch,
            version=sync.version,
        )
        arrived_s = time.monotonic()
        state.records[job.id] = files.JobRecord(job=job, sync=sync)
        try:
            if registration is not state.registration:
                await state.save_registration(registration)
            await state.save()
        except SpoolFull:
            del state.records[job.id]
            raise
        state.last_step = sync.step
        if sync.version is not None:
            state.promised = sync.version
        state.jobs.add(job)
        self._queue.put_nowait(_Waiting(job.id, sync, arrived_s))
        state.changed()
        return job

    # --- reading ---------------------------------------------------------------------------------------------------

    async def _run(self, register_job: str) -> None:
        state = self.state
        try:
            if await Registrar(state, self._flights).run(register_job):
                self._requeue()
                self._take_part()
                self._ready = True
                state.changed()
                while (waiting := await self._next()) is not None:
                    self._busy = True
                    try:
                        await self._read(waiting)
                    finally:
                        self._busy = False
                        state.changed()
        except Exception as error:
            log.exception("%s: the session failed", state.name)
            state.end(DteError(f"the session failed: {error}", remedy="Register the rank as a new launch."))
        await self._wind_up()

    def _take_part(self) -> None:
        """Enter P2P groups, where this daemon does."""
        state = self.state
        if state.node.p2p.enabled and state.epoch is not None and state.ended is None:
            state.member = TrainerMember(state.node, state.link, state.registration, state.epoch)
            state.member.enter()

    async def _next(self) -> _Waiting | None:
        """The next sync; None when the session has ended and none waits."""
        await self.state.until(lambda: not self._queue.empty() or self.state.ended is not None, None)
        return None if self._queue.empty() else self._queue.get_nowait()

    async def _wind_up(self) -> None:
        """The session has ended: nothing new comes, what was promised still lands, and then the spool is of no use."""
        state = self.state
        assert state.ended is not None
        await state.fail_waiting()
        await self._leave()
        # What is in flight is in the spool: the trainer's memory is wanted by whoever comes next.
        await state.link.detach()
        await self._flights.landed()
        await state.link.stop()
        if isinstance(state.ended, LaunchEnded) or state.epoch is None:
            await asyncio.to_thread(state.spool.remove)

    def _requeue(self) -> None:
        """Syncs that were accepted before a restart and not read come first."""
        for key, sync in self._unread:
            self._queue.put_nowait(_Waiting(key, sync, time.monotonic()))
            if sync.version is not None and sync.version != self.state.in_flight:
                self.state.promised = sync.version

    async def _read(self, waiting: _Waiting) -> None:
        state, job_id, sync = self.state, waiting.job_id, waiting.sync
        state.update(job_id, JobState.READING)
        try:
            done = await self._read_on_head(waiting)
        except DteError as error:
            await state.release(sync.hold)
            if isinstance(error, SpoolFull):
                state.node.degraded.count("spool-full", detail=state.name)
            if isinstance(error, HoldTimeout):
                state.node.degraded.count("read-revoked", detail=f"{state.name}: {error.message}")
            reason = "spool-lost" if isinstance(error, SpoolFull | WorkerDied) else "revoked"
            await self._cannot_deliver(waiting, JobState.FAILED, error, reason)
            return
        if done.revoked:
            state.node.degraded.count("read-revoked", detail=state.name)
            revoked = Revoked(
                f"the read of step {sync.step} was revoked and thrown away.",
                remedy="The next version carries what changed dense; raise hold_timeout_s if this happens often.",
            )
            await self._cannot_deliver(waiting, JobState.ABORTED, revoked, "revoked")
            return
        hold_s = time.monotonic() - waiting.at_s
        state.node.metrics.hold_seconds.observe(hold_s)
        count_read(state.node, state.name, done)
        timings = {"hold": hold_s * 1e3, **done.timings_ms}
        state.update(job_id, JobState.RELEASED, timings_ms=timings, detail=done.detail)
        if done.published is None:
            await state.finish(job_id, JobState.ACCUMULATED)
            await self._flights.rescue(sync)
        else:
            self._flights.deliver(job_id, done.published, timings)
            await state.save()

    async def _read_on_head(self, waiting: _Waiting) -> p.ReadDone:
        sync, state = waiting.sync, self.state
        dense = sync.version is not None and state.dense_asked
        if dense:
            state.node.degraded.count("dense-on-request", detail=f"{state.name}, version {sync.version}")

        def request() -> p.Read:
            head = state.chain.head
            left_s = state.node.settings.hold_timeout_s - (time.monotonic() - waiting.at_s)
            return p.Read(sync=sync, base=None if head is None else head.version, dense=dense, left_s=left_s)

        try:
            return await self.state.link.call(request(), p.ReadDone)
        except BaseMoved:
            # A part of an earlier life of this rank, which no spool remembers, was committed after all.
            self.state.node.degraded.count(
                "spool-lost", detail=f"{self.state.name} starts over from the newest version"
            )
            await self.state.rebase()
            return await self.state.link.call(request(), p.ReadDone)

    async def _cannot_deliver(self, waiting: _Waiting, state: JobState, error: DteError, reason: str) -> None:
        log.error("%s: step %d: %s", self.state.name, waiting.sync.step, error)
        if waiting.sync.version is not None:
            self._flights.abandon(waiting.sync.version, reason)
        await self.state.finish(waiting.job_id, state, error)
