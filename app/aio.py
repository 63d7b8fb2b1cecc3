"""Two habits of the event loop: big work goes to a thread, and many requests go out a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

INLINE_BYTES = 64 << 10
"""Bytes parsed or hashed on the event loop; more goes to a thread."""
WINDOW = 16
"""Requests in flight at once."""

K = TypeVar("K")
T = TypeVar("T")


async def offload(size_bytes: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread if it has to go through more than INLINE_BYTES."""
    return work() if size_bytes <= INLINE_BYTES else await asyncio.to_thread(work)


async def gather_bounded(work: Callable[[K], Awaitable[T]], items: Iterable[K]) -> list[T]:
    """`work` of every item, in order, at most WINDOW at a time; the first error cancels the rest."""
    gate = asyncio.Semaphore(WINDOW)

    async def one(item: K) -> T:
        async with gate:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
