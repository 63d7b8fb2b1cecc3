"""Entry of the worker process: frames in on stdin, frames out on stdout, nothing else on either.

One invariant: the worker lives no longer than the daemon that started it. It ends when stdin ends, and the kernel kills
it when the daemon dies while it computes.
"""

from __future__ import annotations

# ruff: noqa: E402
import gc

# Imports make half a million objects that all stay: looking for rubbish among them is a sixth of a worker's start.
gc.disable()

import ctypes
import os
import signal
import sys

from app.worker.server import serve

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; end at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """`python -m app.worker PARENT_PID`."""
    die_with_parent(int(sys.argv[1]))
    serve()


if __name__ == "__main__":
    main()
