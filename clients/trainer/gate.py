"""`Gate`: between reads and writes of shared memory stands this, on the trainer's side.

One invariant: a mutation begins only when no read is running, or after the running read was revoked and will be thrown
away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import httpx

from clients.errors import ClientError, NotFound
from clients.trainer.daemon import Daemon
from transports.memory.generation import ControlBlock

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0


@dataclass
class GateStats:
    """How long mutations waited for reads (in all, and the latest one), and how many reads were taken back."""

    hold_ms: float = 0.0
    last_hold_ms: float = 0.0
    revoked: int = 0


class Gate:
    """The control block with its waiting rules. One hold at a time."""

    def __init__(self, control: ControlBlock, daemon: Daemon, timeout_s: float) -> None:
        """`timeout_s`: the longest a mutation waits before the running read is revoked."""
        self.control = control
        self.stats = GateStats()
        self._daemon = daemon
        self._timeout_s = timeout_s
        self._hold = 0
        self._job: str | None = None
        self._open: set[str] = set()
        self._pid = os.getpid()
        self.announced = 0
        """Mutations that the trainer announced and that may have written anything."""
        self.on_unread: Callable[[], None] = lambda: None
        """Called when a mutation may begin: nobody reads any more."""

    def take(self) -> int:
        """Allow one read: the next mutation waits for its release. Returns the hold's number."""
        self._hold = self.control.hold()
        self._job = None
        return self._hold

    def take_over(self) -> int:
        """A hold that is over already, for a call after which nothing is read: no mutation waits for it."""
        number = self.take()
        self.control.revoke()
        return number

    def posted(self, job_id: str) -> None:
        """The job that works under the present hold."""
        self._job = job_id

    def revoke(self, why: str) -> None:
        """Take the present hold back; the read, if one runs, will be thrown away."""
        if not self.control.is_released(self._hold):
            self.control.revoke()
            self.stats.revoked += 1
            log.warning("the read of hold %d was revoked: %s", self._hold, why)

    def wait(self) -> None:
        """Wait while a read is running, at most `timeout_s`; then revoke it and go on."""
        start_s = time.monotonic()
        while not self.control.is_released(self._hold):
            left_s = self._timeout_s - (time.monotonic() - start_s)
            if left_s <= 0:
                self.revoke(f"it took longer than hold_timeout_s = {self._timeout_s:g}")
            elif not self.control.wait_released(self._hold, min(left_s, _LOOK_S)):
                dead = self._read_is_dead()
                if dead:
                    self.revoke(dead)
        self.on_unread()
        self.stats.last_hold_ms = (time.monotonic() - start_s) * 1e3
        self.stats.hold_ms += self.stats.last_hold_ms

    @contextlib.contextmanager
    def mutating(self, *, ours: bool = False) -> Iterator[None]:
        """Around any write to shared memory. `ours`: by this client, which knows what it writes."""
        self.wait()
        self.announced += not ours
        with self.control.mutating():
            yield

    def begin(self, what: str) -> None:
        """The mutation `what` begins, in a hook. One of the same kind that never ended goes on.

        In a fork of the trainer hooks do nothing: the words belong to the process that registered.
        """
        if os.getpid() != self._pid:
            return
        self.wait()
        if what not in self._open:
            self._open.add(what)
            self.control.begin_mutation()

    def end(self, what: str) -> None:
        """The mutation `what` ends."""
        if what in self._open and os.getpid() == self._pid:
            self._open.remove(what)
            self.control.end_mutation()

    def end_all(self) -> list[str]:
        """End mutations whose second hook never came (the call raised). Returns their names."""
        dangling = sorted(self._open)
        for what in dangling:
            self.end(what)
        return dangling

    def close(self) -> None:
        """Remove the control block."""
        self.control.unlink()
        self.control.close()

    def _read_is_dead(self) -> str:
        """Why nobody will ever release the present hold; empty while somebody may."""
        if self._job is None:
            return "it was never posted"
        try:
            job = self._daemon.peek(self._job)
        except NotFound:
            return "the daemon does not know its job (any more)"
        except ClientError as e:
            return "the daemon is gone" if isinstance(e.__cause__, httpx.ConnectError) else ""
        return f"its job ended as {job.state}" if job.state.final else ""
