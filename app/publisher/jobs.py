"""`JobBook`: the jobs of this daemon, by id, and who waits for them.

One invariant: a job that has reached a final state never changes again, and everybody who waited for a change is woken
by it. Memory is bounded: only the newest `retention` finished jobs are kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from app.events import EventBus
from app.metrics import Metrics
from clients.protocol import Job, JobState, Problem


def register_job_id(run: str, launch: str, rank: int) -> str:
    """The id of a registration. The same one for the same registration, also after a restart."""
    return f"{run}:{launch}:{rank}:register"


def sync_job_id(run: str, launch: str, epoch: int, rank: int, step: int) -> str:
    """The id of a sync: it is what makes `POST /sync` idempotent per (launch, epoch, rank, step)."""
    return f"{run}:{launch}:{rank}:{epoch}:{step}"


class JobBook:
    """Used on the event loop only."""

    def __init__(self, events: EventBus, metrics: Metrics, retention: int) -> None:
        self._events = events
        self._metrics = metrics
        self._retention = retention
        self._jobs: dict[str, Job] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._changed: dict[str, asyncio.Event] = {}

    def get(self, job_id: str) -> Job | None:
        """The job as it is now; None if it was never known or is forgotten."""
        return self._jobs.get(job_id)

    def add(self, job: Job) -> Job:
        """Put a new job (or one from before a restart)."""
        self._jobs[job.id] = job
        self._finished.pop(job.id, None)
        if job.state.final:
            self._finish(job, counted=False)
        else:
            self._publish(job)
        return job

    def update(self, job_id: str, state: JobState | None = None, **changes: Any) -> Job:
        """Change a job that is not final; returns it as it is then. `timings_ms` and `detail` are merged in."""
        job = self._jobs[job_id]
        if job.state.final:
            return job
        for name in ("timings_ms", "detail"):
            if name in changes:
                changes[name] = {**getattr(job, name), **changes[name]}
        if state is not None:
            changes["state"] = state
        job = job.model_copy(update=changes)
        self._jobs[job_id] = job
        if job.state.final:
            self._finish(job, counted=True)
        self._publish(job)
        waiters = self._changed.pop(job_id, None)
        if waiters is not None:
            waiters.set()
        return job

    def fail(self, job_id: str, state: JobState, problem: Problem) -> Job:
        """Finish a job with a problem."""
        return self.update(job_id, state, problem=problem)

    async def wait(self, job_id: str, timeout_s: float) -> Job | None:
        """The job after its next change, or as it is when it is final or `timeout_s` is over."""
        job = self._jobs.get(job_id)
        if job is None or job.state.final or timeout_s <= 0 or self._events.closed:
            return job
        event = self._changed.setdefault(job_id, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass
        return self._jobs.get(job_id)

    def wake_all(self) -> None:
        """End all long polls (the daemon stops)."""
        for event in self._changed.values():
            event.set()
        self._changed.clear()

    def _finish(self, job: Job, *, counted: bool) -> None:
        if counted:
            self._metrics.jobs.labels(job.kind, job.state.value).inc()
        self._finished[job.id] = None
        while len(self._finished) > self._retention:
            old, _ = self._finished.popitem(last=False)
            self._jobs.pop(old, None)

    def _publish(self, job: Job) -> None:
        self._events.publish(
            "job",
            job.run,
            id=job.id,
            job=job.kind,
            rank=job.rank,
            step=job.step,
            state=job.state.value,
            version=job.version,
            problem=None if job.problem is None else job.problem.title,
        )
