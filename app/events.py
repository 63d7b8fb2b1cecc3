"""State changes as a stream that many may follow and none can slow down.

Invariant: memory is bounded by one shared history, whatever subscribers do. A subscriber that falls behind it is told
how many events it missed (an event of kind `events-dropped`) and goes on from the oldest one kept.

Event numbers start at the daemon's start time in milliseconds, so they do not go back at a restart and a client may
always resume with the last number it saw.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

from clients.protocol import Event

DROPPED = "events-dropped"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class EventBus:
    """Publish from the event loop only; subscribers are async iterators on the same loop."""

    def __init__(self, history: int = 4096, first_id: int | None = None) -> None:
        self._ring: deque[Event] = deque(maxlen=history)
        self._first_id = _now_ms() if first_id is None else first_id
        self._next_id = self._first_id
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def last_id(self) -> int:
        """Number of the newest event (one less than the first number before there is any)."""
        return self._next_id - 1

    @property
    def closed(self) -> bool:
        """True once the daemon is shutting down; long polls should end too."""
        return self._closed

    def publish(self, kind: str, run: str | None = None, **data: Any) -> Event:
        """Append an event and wake all subscribers. `data` must be JSON values. Never blocks."""
        event = Event(id=self._next_id, kind=kind, at_ms=_now_ms(), run=run, data=data)
        self._next_id += 1
        self._ring.append(event)
        self._wake()
        return event

    def close(self) -> None:
        """End all subscriptions after what is published; idempotent."""
        self._closed = True
        self._wake()

    def subscribe(self, after_id: int | None = None) -> AsyncIterator[Event]:
        """Events numbered above `after_id` (None: only those published after this call), until the bus closes."""
        return self._follow(self.last_id if after_id is None else after_id)

    async def _follow(self, cursor: int) -> AsyncIterator[Event]:
        while True:
            for event in await self.after(cursor, None):
                cursor = event.id
                yield event
            if self._closed and cursor >= self.last_id:
                return

    async def after(self, cursor: int, timeout_s: float | None, limit: int = 256) -> list[Event]:
        """Up to `limit` events numbered above `cursor`, waiting for the first of them.

        Empty after `timeout_s`, and at once when the bus is closed. When events were dropped, the first one returned
        says so and carries the number before the oldest kept one.
        """
        while True:
            # A number from the future belongs to another daemon (or a clock set back): start over, and say so.
            if cursor > self.last_id:
                cursor = self._first_id - 2
            if cursor < self.last_id:
                return self._collect(cursor, limit)
            if self._closed:
                return []
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return []

    def _collect(self, cursor: int, limit: int) -> list[Event]:
        oldest = self._ring[0].id if self._ring else self._next_id
        found: list[Event] = []
        if cursor < oldest - 1:
            # Before our first number lies an earlier life of the daemon, whose count nobody knows.
            missed = oldest - 1 - cursor if cursor >= self._first_id - 1 else None
            found.append(Event(id=oldest - 1, kind=DROPPED, at_ms=_now_ms(), data={"missed": missed}))
            cursor = oldest - 1
        skip = cursor + 1 - oldest
        found.extend(islice(self._ring, skip, skip + limit))
        return found

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
