"""The publisher role: the trainer ranks of this node, each with its worker process and its spool.

Invariant: per run and rank exactly one session takes syncs. A session it replaced only finishes what it had promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from fastapi import APIRouter

from app.api import ranks as api
from app.committer import Committer
from app.problems import HttpProblem
from app.publisher import files
from app.publisher.jobs import JobBook
from app.publisher.rank_state import LaunchEnded
from app.publisher.ranks import RankSession
from app.roles.base import Node, Role
from app.worker.replicas import check_replicas
from app.worker.source import check_registration
from app.worker.spool import RankSpool
from clients.protocol import Job, RankRegistration, SyncRequest
from engine.errors import DteError, StateConflict

log = logging.getLogger(__name__)


class PublisherRole(Role):
    """Sessions by (run, rank)."""

    name = "publisher"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.jobs = JobBook(node.events, node.metrics, node.settings.job_retention)
        self._sessions: dict[tuple[str, int], RankSession] = {}
        self._retiring: dict[RankSession, asyncio.Task[None]] = {}
        self._committers: dict[str, Committer] = {}
        self._lock = asyncio.Lock()
        self._started = False

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Adopt the ranks that an earlier life of the daemon left in the spool."""
        self.node.settings.spool_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for spool in await asyncio.to_thread(lambda: list(files.found(self.node.settings.spool_dir))):
            loaded = await asyncio.to_thread(files.load, spool)
            if loaded is None:
                self.node.degraded.count("spool-unusable", detail=str(spool.root))
                continue
            registration, known = loaded
            self._replace(self._session(registration, spool, known))
        self._started = True

    async def stop(self) -> None:
        """End all sessions; the spool keeps what is not finished."""
        self.jobs.wake_all()
        for task in self._retiring.values():
            task.cancel()
        await asyncio.gather(*self._retiring.values(), return_exceptions=True)
        sessions = [*self._sessions.values(), *self._retiring]
        await asyncio.gather(*(s.stop() for s in sessions), return_exceptions=True)

    def router(self) -> APIRouter:
        return api.router(self)

    def unready(self) -> str | None:
        return None if self._started else "not started"

    # --- calls -----------------------------------------------------------------------------------------------------

    async def register(self, registration: RankRegistration) -> Job:
        """`POST /ranks`. Repeating the same registration gives the same job; a new launch replaces the old one."""
        await asyncio.to_thread(check_registration, registration)
        await asyncio.to_thread(check_replicas, registration)
        async with self._lock:
            key = (registration.run, registration.rank)
            current = self._sessions.get(key)
            if current is not None and current.state.registration.launch == registration.launch:
                if not current.state.unmapped or current.first_registration == registration:
                    return self._again(current, registration)
                await current.stop()
                del self._sessions[key]
            if any(_same_launch(s.state.registration, registration) for s in self._retiring):
                raise StateConflict(
                    f"launch {registration.launch!r} of rank {registration.rank} has ended here.",
                    remedy="Register as a new launch.",
                )
            spool = RankSpool.of(self.node.settings.spool_dir, registration.run, registration.launch, registration.rank)
            await asyncio.to_thread(spool.remove)
            session = self._session(registration, spool, None)
            if registration.mirrored:
                self.node.degraded.count("mirrored", registration.mirrored, detail=session.state.name)
            return self._replace(session)

    async def deregister(self, run: str, rank: int, launch: str | None) -> None:
        """`DELETE /ranks/{rank}`: what is in flight is still finished."""
        async with self._lock:
            session = self._find(run, rank, launch)
            del self._sessions[run, rank]
            self._retire(session)

    async def sync(self, sync: SyncRequest) -> tuple[Job, bool]:
        """`POST /sync`: the job, and whether it is new."""
        return await self._find(sync.run, sync.rank, sync.launch).submit(sync)

    def session(self, run: str, rank: int) -> RankSession:
        """The session that takes the syncs of a rank; 404 if there is none."""
        return self._find(run, rank, None)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _again(self, current: RankSession, registration: RankRegistration) -> Job:
        first = current.first_registration
        if first != registration:
            raise StateConflict(
                f"rank {registration.rank} is registered under launch {registration.launch!r} with another body.",
                remedy="Register as a new launch.",
            )
        return current.register_job()

    def _find(self, run: str, rank: int, launch: str | None) -> RankSession:
        session = self._sessions.get((run, rank))
        if session is None or (launch is not None and session.state.registration.launch != launch):
            which = f"rank {rank} of run {run!r}" + ("" if launch is None else f", launch {launch!r},")
            raise HttpProblem(
                404, "unknown-rank", f"{which} is not registered here.", remedy="POST /ranks first, at this daemon."
            )
        return session

    def _session(self, registration: RankRegistration, spool: RankSpool, known: files.RankJobs | None) -> RankSession:
        committer = self._committers.get(registration.run)
        if committer is None:
            committer = self._committers[registration.run] = Committer(self.node.chains.get(registration.run))
        return RankSession(self.node, committer, self.jobs, registration, spool, known)

    def _replace(self, session: RankSession) -> Job:
        r = session.state.registration
        old = self._sessions.pop((r.run, r.rank), None)
        job = session.start()
        self._sessions[r.run, r.rank] = session
        if old is not None:
            old.state.end(
                LaunchEnded(
                    f"rank {r.rank} was registered again under launch {r.launch!r}; this launch has ended.",
                    remedy="Stop the old trainer.",
                )
            )
            self._retire(old)
        return job

    def _retire(self, session: RankSession) -> None:
        async def retire() -> None:
            try:
                with contextlib.suppress(DteError):
                    await session.retire()
            except Exception:
                log.exception("%s could not be retired", session.state.name)
            finally:
                self._retiring.pop(session, None)

        self._retiring[session] = asyncio.create_task(retire(), name="retire")


def _same_launch(a: RankRegistration, b: RankRegistration) -> bool:
    return (a.run, a.launch, a.rank) == (b.run, b.launch, b.rank)
