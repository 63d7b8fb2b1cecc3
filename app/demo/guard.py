"""Runs one command and ends it, with all it started, when the process that started this one is gone.

`python -I guard.py COMMAND …`, with a pipe as standard input: its end is the sign. Uses nothing but the standard
library, so that it runs as a plain file. Invariant: when this process has ended, other than by being killed, nothing of
its process group is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

PATIENCE_S = 10
"""How long the command may take to end when it is asked to."""


def main() -> None:
    """Run the command that the arguments are."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

    def stop(signum: int, frame: FrameType | None) -> None:
        child.terminate()
        signal.alarm(PATIENCE_S)

    def kill(signum: int, frame: FrameType | None) -> None:
        os.killpg(0, signal.SIGKILL)

    def watch() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=watch, name="guard", daemon=True).start()
    code = child.wait()
    print(f"guard: the command ended with code {code}", flush=True)
    os.killpg(0, signal.SIGKILL)  # this process too: the group is its own


if __name__ == "__main__":
    main()
