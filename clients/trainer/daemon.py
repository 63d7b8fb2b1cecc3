"""The trainer's line to its daemon: short calls with deadlines, and what a posted sync can be asked later.

One invariant: no call here waits longer than its own deadline, so training never waits for the network unless it was
told to (`until_up`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import httpx

from clients.errors import ApiError, ClientError, DaemonUnavailable, JobFailed, WaitTimeout
from clients.http import Call, Options, Sender, nothing, one
from clients.protocol import Cut, Job, JobState, RankRegistration, SyncRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

POST_OPTIONS: Final = Options(connect_s=1.0, answer_s=5.0, attempts=3, backoff_s=0.05)
PEEK_OPTIONS: Final = Options(connect_s=0.5, answer_s=1.0, attempts=1)
_LONG_POLL_S: Final = 10.0
_RETRY_S: Final = 0.5


def is_down(error: Exception) -> bool:
    """Whether an error means "the daemon cannot work now" rather than "it refuses this"."""
    if isinstance(error, ApiError):
        return error.status >= 500 or error.status == 429 or error.problem_code == "epoch-not-open"
    return isinstance(error, DaemonUnavailable)


class Daemon:
    """The calls a trainer rank makes."""

    def __init__(
        self, url: str, token: str | None, transport: httpx.BaseTransport | None = None, *, wait: bool = False
    ) -> None:
        """`wait`: whether `until_up` waits for a daemon that is down."""
        self.url = url
        self._wait = wait
        self._sender = Sender(url, token=token, options=POST_OPTIONS, transport=transport)
        self._peek = Sender(url, token=token, options=PEEK_OPTIONS, transport=transport)

    def register(self, body: RankRegistration) -> Job:
        """`POST /ranks`; repeatable, a registration is idempotent per launch and rank."""
        return self._sender.send(Call("POST", "/ranks", one(Job), body=body))

    def unregister(self, run: str, launch: str, rank: int) -> None:
        """`DELETE /ranks/{rank}`."""
        self._peek.send(Call("DELETE", f"/ranks/{rank}", nothing, {"run": run, "launch": launch}))

    def sync(self, body: SyncRequest) -> Job:
        """`POST /sync`; repeatable, a sync is idempotent per launch, epoch, rank and step."""
        return self._sender.send(Call("POST", "/sync", one(Job), body=body))

    def cut(self, run: str, rank: int) -> Cut:
        """`GET /ranks/{rank}/cut`."""
        return self._sender.send(Call("GET", f"/ranks/{rank}/cut", one(Cut), {"run": run}))

    def job(self, job_id: str, wait_s: float = 0.0) -> Job:
        """`GET /jobs/{id}`, answered at the job's next change or after `wait_s`."""
        return self._sender.send(Call("GET", f"/jobs/{job_id}", one(Job), {"wait": wait_s}, wait_s=wait_s))

    def peek(self, job_id: str) -> Job:
        """The job now, one short try."""
        return self._peek.send(Call("GET", f"/jobs/{job_id}", one(Job), {"wait": 0.0}))

    def wait_job(self, job_id: str, timeout_s: float, *, opened: bool = False) -> Job:
        """Wait until a job is final (`opened`: until its read is done and its epoch is open).

        JobFailed when it failed, WaitTimeout after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            asked_s = time.monotonic()
            job = self.job(job_id, min(left_s, _LONG_POLL_S))
            if job.state is JobState.FAILED:
                raise JobFailed(job)
            if opened and job.epoch is not None and job.state not in (JobState.QUEUED, JobState.READING):
                return job
            if job.state.final:
                if opened:
                    raise JobFailed(job)
                return job
            if left_s <= 0:
                raise WaitTimeout(
                    f"job {job_id} is still {job.state} after {timeout_s:g} s.",
                    remedy="All ranks of the launch must register before its epoch opens; see GET /events."
                    if opened
                    else "The daemon goes on with it; wait again, or see GET /events.",
                )
            # A daemon that answers early (a change that is not the one awaited) must not be asked in a tight loop.
            if time.monotonic() - asked_s < 0.02:
                time.sleep(0.02)

    def until_up(self, call: Callable[[], T], what: str) -> T:
        """Run `call`; where the trainer waits for its daemon, again and again until that can answer."""
        while True:
            try:
                return call()
            except (DaemonUnavailable, ApiError) as e:
                if not self._wait or not is_down(e):
                    raise
                log.warning("waiting to %s: %s", what, e)
                time.sleep(_RETRY_S)

    def close(self) -> None:
        """Close the connections."""
        self._sender.close()
        self._peek.close()


@dataclass(frozen=True)
class SyncHandle:
    """One posted sync. `version` is the number it tries to become, None when it only accumulates.

    `job_id` is None when the daemon was down and training went on without it.
    """

    step: int
    version: int | None
    job_id: str | None
    _daemon: Daemon = field(repr=False)

    @property
    def posted(self) -> bool:
        """Whether the daemon accepted it."""
        return self.job_id is not None

    def poll(self) -> Job:
        """The job as it is now."""
        return self._daemon.job(self._id())

    def failed(self) -> Job | None:
        """The job if it is known to have failed or to have been aborted. One short try, no error."""
        with contextlib.suppress(ClientError):
            if self.job_id is not None:
                job = self._daemon.peek(self.job_id)
                return job if job.state in (JobState.FAILED, JobState.ABORTED) else None
        return None

    def wait(self, timeout_s: float = 600.0) -> Job:
        """Wait for the final state: committed, accumulated, unchanged or aborted.

        JobFailed if it failed, WaitTimeout if it is not final in time, DaemonUnavailable if it was never posted.
        """
        return self._daemon.wait_job(self._id(), timeout_s)

    def _id(self) -> str:
        if self.job_id is None:
            raise DaemonUnavailable(
                f"step {self.step} was not posted: the daemon was down.",
                remedy="The next sync carries what changed since; nothing is lost.",
            )
        return self.job_id
