"""Liveness, readiness and metrics: what a supervisor asks a daemon."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Response
from pydantic import BaseModel

from app.roles.base import Node, Role


class Health(BaseModel):
    """`GET /healthz`: the process answers. Open to everybody, so it says nothing else."""

    status: str = "ok"


class Readiness(BaseModel):
    """`GET /readyz`: per role null (ready) or the reason why not."""

    ready: bool
    roles: dict[str, str | None]


def router(node: Node, roles: Sequence[Role]) -> APIRouter:
    """Routes `/healthz`, `/readyz` and `/metrics`."""
    api = APIRouter(tags=["operations"])

    @api.get("/healthz")
    async def healthz() -> Health:
        """Is the process alive? Needs no token."""
        return Health()

    @api.get("/readyz", responses={503: {"model": Readiness, "description": "Not ready, and why."}})
    async def readyz(response: Response) -> Readiness:
        """Can every role of this daemon serve?"""
        reasons = {role.name: role.unready() for role in roles}
        ready = all(reason is None for reason in reasons.values())
        if not ready:
            response.status_code = 503
        return Readiness(ready=ready, roles=reasons)

    @api.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(node.metrics.render(), headers={"Content-Type": node.metrics.content_type})

    return api
