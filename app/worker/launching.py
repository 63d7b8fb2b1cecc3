"""How a daemon starts a worker: `start_process`, unless whoever builds the daemon knows another way."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from typing import Protocol


class WorkerProcess(Protocol):
    """A process that runs `app.worker.server.Server` between its `stdin` and `stdout`, and ends with the daemon."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> asyncio.StreamWriter | None: ...

    @property
    def stdout(self) -> asyncio.StreamReader | None: ...

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        ...

    async def wait(self) -> int: ...

    def kill(self) -> None:
        """SIGKILL; ProcessLookupError if it has ended."""
        ...


Launcher = Callable[[], Awaitable[WorkerProcess]]


async def start_process() -> WorkerProcess:
    """A process of this interpreter. What it logs goes to the daemon's stderr."""
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app.worker", str(os.getpid()), stdin=PIPE, stdout=PIPE, env=env
    )
