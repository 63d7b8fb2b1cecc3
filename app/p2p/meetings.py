"""The meetings of all runs at one coordinator. Soft state: after a restart the daemons join again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from app.events import EventBus
from app.p2p.meeting import Meeting
from app.settings import Settings
from engine.errors import StateConflict

log = logging.getLogger(__name__)

MAX_RUNS = 256
TICK_S = 0.25


class Meetings:
    """One `Meeting` a run, made when somebody joins or asks."""

    def __init__(self, settings: Settings, events: EventBus) -> None:
        self._settings = settings
        self._events = events
        self._meetings: dict[str, Meeting] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """True once the daemon is shutting down."""
        return self._events.closed

    def get(self, run: str) -> Meeting:
        """The run's meeting. StateConflict above MAX_RUNS runs."""
        settings = self._settings
        meeting = self._meetings.get(run)
        if meeting is None:
            if len(self._meetings) >= MAX_RUNS:
                for idle in [name for name, m in self._meetings.items() if m.idle]:
                    del self._meetings[idle]
            if len(self._meetings) >= MAX_RUNS:
                raise StateConflict(f"{MAX_RUNS} runs meet at this coordinator already.", remedy="Use another one.")
            meeting = self._meetings[run] = Meeting(
                run,
                timeout_s=settings.p2p_timeout_s,
                lease_s=settings.p2p_lease_s,
                carrier=settings.p2p_carrier,
                bucket_bytes=settings.p2p_bucket_bytes,
                max_bytes=settings.p2p_max_bytes,
                clock=time.monotonic,
                notice=lambda kind, data: self._events.publish(kind, run, **data),
            )
        return meeting

    def start(self) -> None:
        self._task = asyncio.create_task(self._tick(), name="p2p-meetings")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for meeting in list(self._meetings.values()):
                try:
                    meeting.tick()
                except Exception:  # one run's trouble is not the others'
                    log.exception("the meeting of run %s", meeting.run)
