"""`/receivers`: register rollout engines, see where each one is, wait for one to be in sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from app.problems import HttpProblem
from clients.protocol import Problem, ReceiverInfo, ReceiverRegistration

if TYPE_CHECKING:
    from app.roles.subscriber import SubscriberRole


def _unknown(name: str) -> HttpProblem:
    return HttpProblem(
        404, "unknown-receiver", f"no receiver is called {name[:128]!r}.", remedy="See GET /receivers for their names."
    )


def receivers_router(role: SubscriberRole) -> APIRouter:
    """The routes, bound to one subscriber."""
    router = APIRouter(tags=["receivers"])

    @router.post("/receivers", summary="Register a receiver, or ask again for its owner")
    async def register(registration: ReceiverRegistration) -> ReceiverInfo:
        return await role.register(registration)

    @router.get("/receivers", summary="Every receiver: installed version, lag, proof, last error")
    async def list_receivers(run: str | None = None) -> list[ReceiverInfo]:
        return role.list(run)

    @router.get("/receivers/{name}", responses={404: {"model": Problem}}, summary="One receiver")
    async def get_receiver(name: str) -> ReceiverInfo:
        try:
            return role.get(name)
        except KeyError:
            raise _unknown(name) from None

    @router.get(
        "/receivers/{name}/ready",
        responses={404: {"model": Problem}, 503: {"model": Problem}},
        summary="200 while the receiver may get traffic, else 503 with the reason",
    )
    async def receiver_ready(name: str) -> ReceiverInfo:
        info = await get_receiver(name)
        if not info.ready:
            raise HttpProblem(
                503,
                "receiver-not-ready",
                f"receiver {name!r} is {info.state.value}: {info.last_error or 'not at a proven version yet'}",
                remedy="Wait, or read its last_error.",
            )
        return info

    @router.delete("/receivers/{name}", status_code=204, responses={404: {"model": Problem}}, summary="Forget one")
    async def remove(name: str) -> Response:
        try:
            await role.remove(name)
        except KeyError:
            raise _unknown(name) from None
        return Response(status_code=204)

    return router
