"""A readers-writer gate between serving and writing weights.

One invariant: no reader is inside while a writer is, and nobody enters as a reader unless the weights are proven. A
waiting writer goes before new readers, so that endless traffic cannot starve an update.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from engine.errors import StateConflict


class Gate:
    """Not bound to threads: a writer may enter in one thread and leave in another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    @property
    def readers(self) -> int:
        return self._readers

    @property
    def writing(self) -> bool:
        return self._writing

    def enter_read(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until `ready()` and no writer is in or waiting; StateConflict after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._writing or self._writers_waiting or not ready():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise StateConflict(
                        f"the weights were not proven and free within {timeout_s} s.",
                        remedy="Ask the rollout daemon's GET /receivers what it is waiting for.",
                    )
                self._changed.wait(left)
            self._readers += 1

    def leave_read(self) -> None:
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    def enter_write(self, timeout_s: float) -> None:
        """Keep new readers out and wait until the last one has left; StateConflict after `timeout_s`.

        Entering again while already in is allowed: a commit may be repeated.
        """
        with self._changed:
            if self._writing:
                return
            self._writers_waiting += 1
            try:
                if not self._changed.wait_for(lambda: self._readers == 0, timeout_s):
                    raise StateConflict(
                        f"{self._readers} requests were still being served after {timeout_s} s.",
                        remedy="Finish or abort them, or allow more time.",
                    )
                self._writing = True
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()

    def leave_write(self) -> None:
        """Let readers in again; a no-op when no writer is in."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting readers look at readiness again."""
        with self._changed:
            self._changed.notify_all()
