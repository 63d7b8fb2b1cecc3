"""Child processes of the demo: started in order, watched, and ended in reverse order whatever happens.

Invariant: after `close` no process that was started here is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from app.demo import guard
from engine.errors import DteError

_TAIL_BYTES = 2000


class ChildFailed(DteError):
    """A process of the demo ended or did not become ready."""

    code = "demo-process-failed"


@dataclass(frozen=True)
class Child:
    """A running process and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Children:
    """Owns child processes. Use as a context manager."""

    def __init__(self, log_dir: Path, stop_timeout_s: float = 15.0) -> None:
        self._log_dir = log_dir
        self._stop_timeout_s = stop_timeout_s
        self._children: list[Child] = []

    def start(self, name: str, command: Sequence[str], env: dict[str, str], *, guarded: bool = False) -> Child:
        """Start a process with its output in `<log_dir>/<name>.log`.

        It gets its own session, so that Ctrl-C on the terminal reaches only the demo itself, which then ends everything
        in order. Its standard input is a pipe that closes when this process dies, however it dies. A command that does
        not watch it is to be `guarded`: the child is then a process that watches it for the command.
        """
        if guarded:
            command = [sys.executable, "-I", guard.__file__, *command]
        log = self._log_dir / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=out, stderr=out, env=env, start_new_session=True
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """ChildFailed if any process has ended by itself."""
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                raise ChildFailed(
                    f"the {child.name} process ended with code {code}. Its last words:\n{_tail(child.log)}"
                )

    def wait_until(self, what: str, ready: Callable[[], bool], timeout_s: float, *, every_s: float = 0.05) -> None:
        """Poll `ready` until it says yes. ChildFailed when a process ends first, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                tails = "\n".join(f"-- {c.name}:\n{_tail(c.log)}" for c in self._children)
                raise ChildFailed(f"{what} was not ready within {timeout_s:.0f} s.\n{tails}")
            time.sleep(every_s)

    def end(self, child: Child) -> None:
        """End one process: ask, wait, then kill its whole session."""
        process = child.process
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._stop_timeout_s)
        # The session may hold workers of a daemon that did not end cleanly.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._children.remove(child)

    def close(self) -> None:
        """End all processes, the last started first."""
        for child in list(reversed(self._children)):
            self.end(child)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - _TAIL_BYTES))
            return f.read().decode(errors="replace").strip()
    except OSError:
        return ""


def free_port() -> int:
    """A loopback TCP port that was free a moment ago.

    It lies below those the system gives out by itself: an engine takes a minute until it binds it.
    """
    while True:
        port = random.randrange(12000, 30000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
