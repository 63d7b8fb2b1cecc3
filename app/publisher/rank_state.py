"""`RankState`: what the daemon knows of one registered rank, shared by the parts that act on it.

One invariant: at most one of `in_flight` and `promised` is set. `in_flight` is a version in the worker's ledger,
`promised` one that the ranks agreed on and this rank has not read yet or must abort; while either stands, the rank's
cut is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from app.chain import Chain
from app.committer import Committer
from app.problems import problem
from app.publisher import files
from app.publisher.jobs import JobBook
from app.publisher.link import WorkerLink
from app.publisher.opening import base_at_head
from app.publisher.p2p import TrainerMember
from app.publisher.retry import until_stored
from app.publisher.worker_handle import WorkerHandle
from app.roles.base import Node
from app.worker import protocol as p
from app.worker.protocol import SpoolFull
from app.worker.spool import RankSpool
from clients.protocol import Job, JobState, RankRegistration, SyncRequest
from engine.errors import CodecError, DteError, InvalidInput, StateConflict
from transports.errors import StoreError
from transports.memory.cuda_ipc import REMEDY as DEVICE_REMEDY
from transports.memory.cuda_ipc import DeviceMemoryError
from transports.memory.generation import ControlBlock
from transports.memory.shm import SHM_DIR, SharedMemoryError

log = logging.getLogger(__name__)


class Revoked(DteError):
    """The trainer took its memory back before the read was complete; nothing of it was used."""

    code = "revoked"


class LaunchEnded(StateConflict):
    """This launch can publish nothing any more."""

    code = "launch-ended"


class TrainerGone(LaunchEnded):
    """The trainer's process has ended; what it had handed over is still published."""

    code = "trainer-gone"


class EpochNotOpen(StateConflict):
    """The rank is known, but its epoch is not open (again) yet. Ask again soon."""

    code = "epoch-not-open"


def trainer_lives(control: str) -> bool:
    """Whether the process that made this control block still holds its lock. A file that is there and cannot be looked
    into is nobody's death."""
    try:
        with ControlBlock.open(control) as block:
            return block.owner_alive()
    except (SharedMemoryError, OSError):
        return (SHM_DIR / control).exists()


class RankState:
    """Used on the event loop only."""

    def __init__(
        self,
        node: Node,
        committer: Committer,
        jobs: JobBook,
        registration: RankRegistration,
        spool: RankSpool,
        known: files.RankJobs | None,
    ) -> None:
        self.node = node
        self.committer = committer
        self.chain: Chain = committer.chain
        self.jobs = jobs
        self.registration = registration
        self.spool = spool
        self.epoch: int | None = None if known is None else known.epoch
        self.taken: int | None = None
        """A number at which a part of an earlier life of this rank stands."""
        self.last_step = registration.step
        self.in_flight: int | None = None
        self.promised: int | None = None
        self.ended: DteError | None = None
        self.records: dict[str, files.JobRecord] = {}
        self.dense_asked = False
        """At the last cut, a receiver was waiting for a dense version."""
        self.unbegun = False
        """The epoch is open, but the ledger does not know yet (the daemon died in between)."""
        self.member: TrainerMember | None = None
        """The rank in P2P groups; None where this daemon takes no part in them."""
        self._lost_in_flight = False
        self._changed = asyncio.Event()
        self._save_lock = asyncio.Lock()
        s = node.settings
        self.link = WorkerLink(
            lambda: self.registration,
            spool,
            p.WorkerOptions(
                backend=s.detect_backend,
                threads=s.detect_threads,
                dense_fraction=s.dense_fraction,
                chunk_bytes=s.chunk_bytes,
            ),
            node.degraded,
            self._on_open,
            node.launch_worker,
        )
        for record in [] if known is None else known.jobs:
            self.records[record.job.id] = record
            self.last_step = max(self.last_step, record.job.step)
            jobs.add(record.job)

    @property
    def name(self) -> str:
        r = self.registration
        return f"run {r.run}, launch {r.launch}, rank {r.rank}"

    @property
    def unmapped(self) -> bool:
        """Nothing began: no worker could map the trainer's device memory. The trainer may register copies instead."""
        return self.epoch is None and isinstance(self.ended, DeviceMemoryError)

    @property
    def undecided(self) -> int | None:
        """The number this rank waits for, if any."""
        return self.in_flight if self.in_flight is not None else self.promised

    def changed(self) -> None:
        """Wake who waits in `until`."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def until(self, reached: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until `reached()` or `timeout_s` (None: for ever) is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not reached():
                    await self._changed.wait()

    # --- the end ---------------------------------------------------------------------------------------------------

    def end(self, why: DteError) -> None:
        """Take no more syncs, for good. The first reason counts."""
        if self.ended is None:
            self.ended = why
            log.warning("%s: ended: %s", self.name, why)
            r = self.registration
            self.node.events.publish("rank-ended", r.run, rank=r.rank, launch=r.launch, reason=why.message)
            self.changed()

    def check_superseded(self) -> None:
        """Raise what ended this rank, which it is now if a newer epoch is open."""
        newest = self.chain.state.epoch
        if self.epoch is not None and newest > self.epoch:
            self.end(
                LaunchEnded(
                    f"a newer epoch ({newest}) is open; this launch has ended.",
                    remedy="Stop this trainer, or start it again as a new launch.",
                )
            )
        if self.ended is not None:
            raise self.ended

    async def look(self) -> None:
        """Notice that a newer epoch is open, or that the trainer's process is gone, when nobody calls."""
        with contextlib.suppress(StoreError, CodecError):
            # Asks the store at most once a poll interval, whoever else follows the run.
            await self.chain.wait(self.chain.next_version, 0)
        with contextlib.suppress(LaunchEnded):
            self.check_superseded()
        if self.ended is None and not await asyncio.to_thread(trainer_lives, self.registration.control):
            self.end(
                TrainerGone(
                    "the trainer's process has ended.", remedy="Start it again; it registers as a new launch by itself."
                )
            )

    # --- jobs ------------------------------------------------------------------------------------------------------

    def add(self, job: Job, sync: SyncRequest | None = None) -> Job:
        """Put a new job."""
        self.records[job.id] = files.JobRecord(job=job, sync=sync)
        return self.jobs.add(job)

    def update(self, job_id: str, state: JobState | None = None, **changes: object) -> None:
        """Change a job, here and in the book."""
        record = self.records.get(job_id)
        if record is None or self.jobs.get(job_id) is None:  # not accepted yet
            return
        job = self.jobs.update(job_id, state, **changes)
        self.records[job_id] = files.JobRecord(job=job, sync=None if job.state.final else record.sync)

    async def finish(self, job_id: str, state: JobState, why: DteError | None = None) -> None:
        """Give a job its final state, durably if there is room."""
        self.update(job_id, state, **({} if why is None else {"problem": problem(why)}))
        with contextlib.suppress(SpoolFull):
            await self.save()

    async def fail_waiting(self) -> None:
        """Fail the jobs that were never read, after the rank has ended, and let their trainer go."""
        assert self.ended is not None
        for record in list(self.records.values()):
            if record.sync is not None and record.job.state in (JobState.QUEUED, JobState.READING):
                await self.release(record.sync.hold)
                await self.finish(record.job.id, JobState.FAILED, self.ended)

    async def save(self) -> None:
        """Make the jobs durable; SpoolFull if there is no room."""
        async with self._save_lock:
            final = [k for k, v in self.records.items() if v.job.state.final]
            for key in final[: max(0, len(self.records) - files.KEPT_JOBS)]:
                del self.records[key]
            saved = files.RankJobs(epoch=self.epoch, jobs=list(self.records.values()))
            await asyncio.to_thread(files.save_jobs, self.spool, saved)

    async def save_registration(self, registration: RankRegistration) -> None:
        """Make (moved) memory references durable; SpoolFull if there is no room."""
        await asyncio.to_thread(files.save_registration, self.spool, registration)
        self.registration = registration

    # --- worker ----------------------------------------------------------------------------------------------------

    async def release(self, hold: int) -> None:
        """Give a hold back from the daemon itself, for when no worker can."""

        def release() -> None:
            with contextlib.suppress(DteError), ControlBlock.open(self.registration.control) as control:
                control.release(hold)

        await asyncio.to_thread(release)

    async def _on_open(self, opened: p.Opened, handle: WorkerHandle) -> None:
        """A worker has loaded the rank: compare its ledger with what this session believes."""
        for name, ok in opened.exact_replay.items():
            if not ok:
                self.node.degraded.count("inexact-replay", detail=f"{name}: replay may not drop elements here")
        if not opened.attached:
            self.node.degraded.count("trainer-detached", detail=f"{self.name}: {opened.why}")
            if self.epoch is None and opened.unmappable:
                raise DeviceMemoryError(opened.why, remedy=DEVICE_REMEDY)
            if self.epoch is None:
                raise InvalidInput(
                    f"the trainer's memory cannot be used: {opened.why}", remedy="Register again from a live trainer."
                )
        if self.epoch is None:
            return
        if opened.read and opened.epoch is None:
            self.unbegun = True
        elif opened.read and opened.epoch == self.epoch:
            self.last_step = max(self.last_step, opened.step or 0)
            if opened.in_flight is not None and self.in_flight is None:
                self.in_flight, self.promised = opened.in_flight, None
        else:
            self.node.degraded.count("ledger-lost", detail=self.name)
            self._lost_in_flight = self.in_flight is not None
            await handle.call(await self._rebase_request(), p.Done)

    async def _rebase_request(self) -> p.Rebase:
        assert self.epoch is not None
        epoch = self.epoch
        await until_stored(self.node.degraded, "the chain", self.chain.refresh)
        base = await until_stored(
            self.node.degraded, "slice digests", lambda: base_at_head(self.chain, self.registration, epoch)
        )
        return p.Rebase(epoch=epoch, base=base.version, digests=base.digests)

    async def rebase(self) -> None:
        """Forget what the ledger says and start over from the newest commit, every tile dense."""
        await self.link.call(await self._rebase_request(), p.Done)

    async def settle(self, version: int, *, committed: bool, dense: bool) -> None:
        """Tell the ledger how the version in flight was decided. Goes on trying while the spool is full."""

        async def attempt() -> None:
            await self.link.call(p.Settle(version=version, committed=committed, dense=dense), p.Done)
            if self._lost_in_flight:
                self._lost_in_flight = False
                await self.rebase()

        pause_s = 0.2
        while True:
            try:
                await attempt()
                break
            except SpoolFull as error:
                self.node.degraded.count("spool-full", detail=f"{self.name}: {error}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 10.0)
        self.in_flight = None
        self.changed()
