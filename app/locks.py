"""Keeps two daemons with a role in common off one `data_dir`.

One invariant: while a lock is held, no other process that asks can serve the same role from the same directory. The
kernel gives the lock back however the process ends, so nothing stale can stay behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


class Taken(Exception):
    """Another process serves `role` from this directory; `pid` is its process id, as far as it said so."""

    def __init__(self, role: str, pid: str) -> None:
        super().__init__(role)
        self.role = role
        self.pid = pid


@contextlib.contextmanager
def held(data_dir: Path, roles: Sequence[str]) -> Iterator[None]:
    """Hold `data_dir` for these roles. Taken if another process has one of them, OSError if it cannot be written to."""
    with contextlib.ExitStack() as stack:
        data_dir.mkdir(parents=True, exist_ok=True)
        for role in roles:
            fd = os.open(data_dir / f".{role}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Taken(role, os.pread(fd, 32, 0).decode("ascii", "replace").strip()) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
