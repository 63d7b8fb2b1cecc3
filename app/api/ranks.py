"""HTTP routes of the publisher role: ranks, syncs and their jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Response

from app.problems import HttpProblem
from clients.protocol import Cut, Job, RankRegistration, SyncRequest

if TYPE_CHECKING:
    from app.roles.publisher import PublisherRole

MAX_WAIT_S = 60.0


def router(role: PublisherRole) -> APIRouter:
    """The routes over one publisher."""
    api = APIRouter(tags=["trainer"])
    chains = role.node.chains

    @api.post("/ranks", status_code=202)
    async def register(registration: RankRegistration) -> Job:
        """Register a trainer rank. The trainer stays held until the job is released. Repeatable."""
        return await role.register(registration)

    @api.delete("/ranks/{rank}", status_code=204)
    async def deregister(rank: int, run: str | None = None, launch: str | None = None) -> None:
        """Take no more syncs of a rank. What it has promised is still finished."""
        await role.deregister(chains.resolve(run), rank, launch)

    @api.get("/ranks/{rank}/cut")
    async def cut(rank: int, run: str | None = None) -> Cut:
        """May the next sync publish? The ranks of a job use the minimum of their answers (null: none may)."""
        return await role.session(chains.resolve(run), rank).cut()

    @api.post("/sync", status_code=202, responses={200: {"model": Job, "description": "The job of this step."}})
    async def sync(request: SyncRequest, response: Response) -> Job:
        """Read the state after an optimizer step. 202 for a new job, 200 when this step was posted before."""
        job, new = await role.sync(request)
        if not new:
            response.status_code = 200
        return job

    @api.get("/jobs/{job_id}")
    async def job(job_id: str, wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0) -> Job:
        """A job now; with `wait`, after its next change or that many seconds (at once when it is final)."""
        found = await role.jobs.wait(job_id, wait)
        if found is None:
            raise HttpProblem(
                404, "unknown-job", f"no job {job_id[:200]!r}.", remedy="Old jobs are forgotten; see GET /versions."
            )
        return found

    return api
