"""All pairs of one member at once, each in a thread of its own.

One invariant: a pair that fails or stalls keeps no other pair from its end, and all threads have ended on return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from transports.p2p.base import Carrier
from transports.p2p.errors import ExchangeFailed, P2PError

T = TypeVar("T")


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.result: T | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error


def drive(carrier: Carrier, jobs: Mapping[int, Callable[[], T]], what: str) -> dict[int, T]:
    """Run every member's job to its end; results by member.

    After any failure the carrier is closed, so that no other member waits for this one until its deadline. Then raises
    `ExchangeFailed` if all failures are P2PError, else the first that is none.
    """
    running = {member: _Job(work) for member, work in jobs.items()}
    threads = [threading.Thread(target=job.run, name=f"p2p-{member}", daemon=True) for member, job in running.items()]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        # Interrupted, or no more threads: what was started must not go on behind the caller's back.
        carrier.close()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    failures: dict[int, P2PError] = {}
    for member, job in running.items():
        if job.error is None:
            continue
        carrier.close()
        if not isinstance(job.error, P2PError):
            raise job.error
        failures[member] = job.error
    if failures:
        said = "; ".join(
            f"member {member}: {error.message.rstrip('.')}" for member, error in list(failures.items())[:4]
        )
        raise ExchangeFailed(f"{what} failed with {len(failures)} of {len(jobs)} members: {said}.", failures)
    return {member: job.result for member, job in running.items() if job.result is not None}
