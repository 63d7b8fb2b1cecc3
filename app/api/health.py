"""Liveness, readiness and metrics: what a supervisor asks a daemon."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import APIRouter, Response
from pydantic import BaseModel

from app.roles.base import Node, Role

log = logging.getLogger(__name__)


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
    said: dict[str, str | None] = {}

    @api.get("/healthz")
    async def healthz() -> Health:
        """Is the process alive? Needs no token."""
        return Health()

    @api.get("/readyz", responses={503: {"model": Readiness, "description": "Not ready, and why."}})
    async def readyz(response: Response) -> Readiness:
        """Can every role of this daemon serve?"""
        reasons = {role.name: role.unready() for role in roles}
        ready = all(reason is None for reason in reasons.values())
        _log_changes(said, reasons)
        if not ready:
            response.status_code = 503
        return Readiness(ready=ready, roles=reasons)

    @api.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(node.metrics.render(), headers={"Content-Type": node.metrics.content_type})

    return api


def _log_changes(said: dict[str, str | None], reasons: dict[str, str | None]) -> None:
    """Probes come every few seconds for as long as a daemon lives: say only what is new since the last one."""
    for role, reason in reasons.items():
        if said.get(role, "") != reason:
            log.info("role %s is %s", role, "ready" if reason is None else f"not ready: {reason}")
            said[role] = reason
