"""`GET /events`: every state change as a server-sent event, resumable by Last-Event-ID.

Invariant: a stream ends at shutdown and when its client goes away, and a slow client costs no memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import StreamingResponse

from app.events import EventBus
from clients.protocol import Event
from engine.errors import InvalidInput

HEARTBEAT_S = 15.0
RETRY_MS = 1000


def format_event(event: Event) -> bytes:
    """One event in the text/event-stream format."""
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode()


async def stream(bus: EventBus, after_id: int | None, run: str | None, heartbeat_s: float) -> AsyncIterator[bytes]:
    """The bytes of one event stream. With `run`, only that run's events and those of no run."""
    cursor = bus.last_id if after_id is None else after_id
    yield f"retry: {RETRY_MS}\n\n".encode()
    while True:
        events = await bus.after(cursor, heartbeat_s)
        if events:
            cursor = events[-1].id
            wanted = [format_event(e) for e in events if run is None or e.run in (None, run)]
            if wanted:
                yield b"".join(wanted)
        elif bus.closed:
            return
        else:
            yield b": still here\n\n"


def router(bus: EventBus, heartbeat_s: float = HEARTBEAT_S) -> APIRouter:
    """The route `/events`."""
    api = APIRouter(tags=["operations"])

    @api.get(
        "/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}, "description": "`data` is an Event as JSON."}},
    )
    async def events(
        run: Annotated[str | None, Query(description="Only this run's events.")] = None,
        last_event_id: Annotated[str | None, Header(description="Resume after this event.")] = None,
    ) -> StreamingResponse:
        """Follow state changes. An event of kind `events-dropped` says that the client was too slow, and how many
        events it missed."""
        after = None
        if last_event_id:
            if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 18):
                raise InvalidInput(
                    "Last-Event-ID is not a number.", remedy="Send the id of the last event seen, or leave it out."
                )
            after = int(last_event_id)
        return StreamingResponse(
            stream(bus, after, run, heartbeat_s),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return api
