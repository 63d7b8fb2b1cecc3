"""`/p2p`: where the daemons of trainer and receiver ranks meet to exchange versions rank to rank."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from app.p2p.messages import Join, Joined, Offer, Report, View
from clients.protocol import Problem
from engine.records.models import RunId

if TYPE_CHECKING:
    from app.p2p.meetings import Meetings

MAX_WAIT_S = 60.0
POLL_END_S = 1.0
"""How soon after the daemon began to shut down a long poll ends."""
RunPath = Annotated[RunId, Path(description="The run.")]
GroupPath = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$", description="The group.")]
MemberPath = Annotated[str, Path(max_length=256, description="The member, as joining named it.")]
_OVER: dict[int | str, dict[str, Any]] = {
    409: {"model": Problem, "description": "The group is over, or the member has to join again."}
}
_TAKEN: dict[int | str, dict[str, Any]] = {
    409: {"model": Problem, "description": "Another daemon has a receiver of this name."}
}


def p2p_router(meetings: Meetings) -> APIRouter:
    """The routes, bound to one coordinator."""
    router = APIRouter(tags=["p2p"])

    @router.post("/p2p/{run}/members", responses=_TAKEN, summary="Join as a trainer rank or a receiver rank")
    async def join(run: RunPath, join: Join) -> Joined:
        return Joined(member=meetings.get(run).join(join))

    @router.delete("/p2p/{run}/members/{member}", status_code=204, summary="Leave; a group with this member is over")
    async def leave(run: RunPath, member: MemberPath) -> Response:
        meetings.get(run).leave(member)
        return Response(status_code=204)

    @router.put("/p2p/{run}/members/{member}/offer", status_code=204, responses=_OVER, summary="A version can be sent")
    async def offer(run: RunPath, member: MemberPath, offer: Offer) -> Response:
        meetings.get(run).offer(member, offer)
        return Response(status_code=204)

    @router.get("/p2p/{run}", summary="Members, group and exchange as they are now")
    async def view(
        run: RunPath,
        daemon: Annotated[str, Query(max_length=256, description="Who asks; its members live.")] = "",
        tag: Annotated[str, Query(max_length=64, description="Only another state than this one.")] = "",
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for one.")] = 0.0,
    ) -> View:
        meeting = meetings.get(run)
        meeting.seen(daemon)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait
        while (found := meeting.view()).tag == tag and not meetings.closed and (left_s := until_s - loop.time()) > 0:
            await meeting.wait(tag, min(left_s, POLL_END_S))
            meeting.seen(daemon)
        return found

    @router.get(
        "/p2p/{run}/groups/{group}/roster",
        responses={**_OVER, 200: {"content": {"application/json": {}}}},
        response_class=Response,
        summary="The layouts of the group's members",
    )
    async def roster(run: RunPath, group: GroupPath) -> Response:
        data = await asyncio.to_thread(meetings.get(run).roster(group))
        return Response(data, media_type="application/json")

    @router.post(
        "/p2p/{run}/groups/{group}/reports/{member}", status_code=204, responses=_OVER, summary="What became of a part"
    )
    async def report(run: RunPath, group: GroupPath, member: MemberPath, report: Report) -> Response:
        meetings.get(run).report(group, member, report)
        return Response(status_code=204)

    return router
