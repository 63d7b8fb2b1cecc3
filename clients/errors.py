"""What can go wrong between a client and its daemon, as exceptions that say what to do. Imports no torch."""

from __future__ import annotations

from clients.protocol import Job, Problem
from engine.errors import DteError

PROBLEM_PREFIX = "urn:dte:problem:"


class ClientError(DteError):
    """Base of the client's own errors."""

    code = "client"


class DaemonUnavailable(ClientError):
    """The daemon did not answer: not started, not reachable, or too slow."""

    code = "daemon-unavailable"


class WaitTimeout(ClientError):
    """What was waited for did not happen in time. Nothing is broken by that; wait again if you like."""

    code = "wait-timeout"


class ApiError(ClientError):
    """The daemon answered with a problem document, kept in `problem`. `problem_code` is its stable identifier."""

    code = "api"

    def __init__(self, problem: Problem) -> None:
        super().__init__(
            f"{problem.title}: {problem.detail}" if problem.detail else problem.title, remedy=problem.remedy
        )
        self.problem = problem

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status

    @property
    def problem_code(self) -> str:
        """The identifier after `urn:dte:problem:`, for example `layout`."""
        return self.problem.type.removeprefix(PROBLEM_PREFIX)


class InvalidRequest(ApiError):
    """The daemon will never accept this request (400, 413, 415, 422)."""

    code = "invalid-request"


class NotAllowed(ApiError):
    """The token is missing, wrong, or not allowed to do this (401, 403)."""

    code = "not-allowed"


class NotFound(ApiError):
    """No such version, job, rank or receiver (404)."""

    code = "not-found"


class Conflict(ApiError):
    """The request does not fit the present state: an old epoch, a superseded launch, an unknown step (409)."""

    code = "conflict"


class JobFailed(ClientError):
    """A job ended without doing what was asked. `job` has the whole story."""

    code = "job-failed"

    def __init__(self, job: Job) -> None:
        problem = job.problem
        why = f"{problem.title}: {problem.detail}" if problem is not None else "the daemon gave no reason"
        super().__init__(
            f"{job.kind} job {job.id} of run {job.run}, rank {job.rank}, step {job.step} ended as {job.state}. {why}",
            remedy=problem.remedy if problem is not None else "",
        )
        self.job = job


_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidRequest, 413: InvalidRequest, 415: InvalidRequest, 422: InvalidRequest,
    401: NotAllowed, 403: NotAllowed, 404: NotFound, 409: Conflict,
}  # fmt: skip


def error_for(problem: Problem) -> ApiError:
    """The exception for a problem document, by its status."""
    return _BY_STATUS.get(problem.status, ApiError)(problem)
