"""How commands that start processes or make folders end when they are asked to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def terminate_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that everything is cleaned up."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
