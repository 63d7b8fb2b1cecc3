"""`WorkerLink`: a rank's worker that is there whenever it is needed.

One invariant: a request is answered by a worker that has opened the rank's newest registration; if the worker dies, a
new one goes on from the spool and is asked again, at most RESTARTS times a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from app.degraded import Degraded
from app.publisher.worker_handle import WorkerDied, WorkerHandle
from app.worker import protocol as p
from app.worker.launching import Launcher
from app.worker.spool import RankSpool
from clients.protocol import Model, RankRegistration

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Model)
RESTARTS = 3


class WorkerLink:
    """Starts the worker on first use. `on_open` sees every `Opened` before any other request goes to that worker."""

    def __init__(
        self,
        registration: Callable[[], RankRegistration],
        spool: RankSpool,
        options: p.WorkerOptions,
        degraded: Degraded,
        on_open: Callable[[p.Opened, WorkerHandle], Awaitable[None]],
        launch: Launcher,
    ) -> None:
        self._registration = registration
        self._spool = spool
        self._options = options
        self._degraded = degraded
        self._on_open = on_open
        self._launch = launch
        self._handle: WorkerHandle | None = None
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The running worker's process id."""
        return None if self._handle is None or not self._handle.alive else self._handle.pid

    async def ready(self) -> WorkerHandle:
        """A worker that has opened the rank."""
        async with self._lock:
            if self._handle is not None and self._handle.alive:
                return self._handle
            if self._handle is not None:
                self._degraded.count("worker-restarted", detail=str(self._spool.root))
                await self._handle.stop()
            self._handle = None
            handle = WorkerHandle(await self._launch())
            try:
                request = p.Open(registration=self._registration(), spool=str(self._spool.root), options=self._options)
                await self._on_open(await handle.call(request, p.Opened), handle)
            except BaseException:
                handle.kill()
                await handle.stop()
                raise
            self._handle = handle
            return handle

    async def call(self, request: Model, reply: type[M]) -> M:
        """Ask, restarting the worker if it dies. All requests but `encode` may be asked twice."""
        for attempt in range(RESTARTS + 1):
            try:
                return await (await self.ready()).call(request, reply)
            except WorkerDied:
                if attempt == RESTARTS:
                    raise
                log.error("the worker died; trying again (%d of %d)", attempt + 1, RESTARTS)
        raise AssertionError("unreachable")

    async def encode(
        self, request: p.Encode, started: Callable[[], Awaitable[Callable[[p.EncodedChunkFile], None]]]
    ) -> p.EncodeDone:
        """Encode from the start, again if the worker dies. `started` gives the listener for each attempt's chunks."""
        for attempt in range(RESTARTS + 1):
            try:
                handle = await self.ready()
                return await handle.call(request, p.EncodeDone, await started())
            except WorkerDied:
                if attempt == RESTARTS:
                    raise
                log.error("the worker died while encoding; trying again (%d of %d)", attempt + 1, RESTARTS)
        raise AssertionError("unreachable")

    async def detach(self) -> None:
        """Have the worker, if one runs, let go of the trainer's memory."""
        async with self._lock:
            if self._handle is not None and self._handle.alive:
                with contextlib.suppress(WorkerDied):
                    await self._handle.call(p.Detach(), p.Done)

    async def stop(self) -> None:
        """End the worker. Idempotent."""
        async with self._lock:
            if self._handle is not None:
                await self._handle.stop()
                self._handle = None
