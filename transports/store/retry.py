"""When to try again, and when to stop: exponential backoff with full jitter, `Retry-After`, one deadline an operation.

Invariant: an operation ends at most at its deadline, which is `deadline_s` plus the time its bytes take at
`min_rate_bytes_s`; time the caller spends with bytes it was given does not count. Clock, sleep and chance are
arguments, so that no test has to wait.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from transports.errors import StoreUnavailable


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an operation takes from the outside: monotonic seconds, wall-clock seconds, sleep, a number in [0, 1)."""

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of one operation. The n-th pause is uniform in [0, min(cap_s, base_s * 2^n))."""

    deadline_s: float = 60.0
    min_rate_bytes_s: float = 1 << 20
    base_s: float = 0.1
    cap_s: float = 5.0


class Retrier:
    """One operation's deadline and pauses."""

    def __init__(self, what: str, policy: RetryPolicy, around: Surroundings, *, size_bytes: int = 0) -> None:
        self._what = what
        self._policy = policy
        self._around = around
        self._deadline = around.clock() + policy.deadline_s + size_bytes / policy.min_rate_bytes_s
        self._failures = 0

    def remaining_s(self) -> float:
        """Seconds to the deadline, at least 0."""
        return max(0.0, self._deadline - self._around.clock())

    def received(self, size_bytes: int) -> None:
        """Bytes arrived: the connection works, so backoff starts over and the deadline moves by their due time."""
        self._failures = 0
        self._deadline += size_bytes / self._policy.min_rate_bytes_s

    def exclude(self, seconds: float) -> None:
        """The caller, not the store, took this long."""
        self._deadline += seconds

    async def pause(self, reason: str, retry_after: str | None = None) -> None:
        """Wait before the next try. StoreUnavailable, naming `reason`, when the deadline would pass meanwhile."""
        limit = min(self._policy.cap_s, self._policy.base_s * 2.0 ** min(self._failures, 32))
        wait = self._around.random() * limit
        asked = parse_retry_after(retry_after, self._around.wall())
        if asked is not None:
            wait += asked  # never earlier than asked, and not all clients at once
        self._failures += 1
        if wait >= self.remaining_s():
            raise self.expired(reason)
        await self._around.sleep(wait)

    def expired(self, reason: str) -> StoreUnavailable:
        """The error for an operation whose time is over."""
        tries = f" after {self._failures} tries" if self._failures > 1 else ""
        return StoreUnavailable(
            f"{self._what}: the store did not do it in time{tries} (last: {reason}).",
            remedy="Check that the store's daemon runs and can be reached; it is safe to try again.",
        )


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Seconds to wait by a `Retry-After` header (delay or HTTP date), or None if there is none that can be read."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None
