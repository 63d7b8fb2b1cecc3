"""Going on trying while the store cannot be used: nothing that is durable in the spool is ever given up for that."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from app.degraded import Degraded
from engine.errors import CodecError
from transports.errors import StoreError

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0


async def until_stored(degraded: Degraded, what: str, work: Callable[[], Awaitable[T]]) -> T:
    """`await work()`, again and again with growing pauses while the store fails (or shows what cannot be trusted).

    Every failure is counted as `store-unavailable` with `what` and the reason in the log. Other errors pass.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await work()
        except (StoreError, CodecError) as error:
            degraded.count("store-unavailable", detail=f"{what}: {error}")
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
