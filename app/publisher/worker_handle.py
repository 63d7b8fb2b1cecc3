"""The daemon's end of one worker process.

One invariant: every call ends: with the worker's answer, with its error, or with `WorkerDied`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from app.worker import frames
from app.worker import protocol as p
from app.worker.launching import WorkerProcess
from clients.protocol import Model
from engine.errors import CodecError, DteError

M = TypeVar("M", bound=Model)
_STOP_S = 5.0


class WorkerDied(DteError):
    """The worker process ended before it answered. Its state is in the spool; a new one goes on from there."""

    code = "worker-died"


class WorkerHandle:
    """One running worker. `call` it, `stop` it; after `WorkerDied` start another."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._on_chunk: dict[int, Callable[[p.EncodedChunkFile], None]] = {}
        self._write_lock = asyncio.Lock()
        self._reader = asyncio.create_task(self._read_loop(), name=f"worker-{process.pid}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._reader.done()

    async def wait_ended(self) -> None:
        """Return when it has ended."""
        await asyncio.wait([self._reader])

    async def call(
        self, request: Model, reply: type[M], on_chunk: Callable[[p.EncodedChunkFile], None] | None = None
    ) -> M:
        """Send one request and wait for its answer. Raises the worker's error, or WorkerDied."""
        if not self.alive:
            raise self._died()
        number = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        if on_chunk is not None:
            self._on_chunk[number] = on_chunk
        try:
            data = frames.pack({"id": number, **request.model_dump(mode="json")})
            assert self._process.stdin is not None
            try:
                async with self._write_lock:
                    self._process.stdin.write(data)
                    await self._process.stdin.drain()
            except (ConnectionError, RuntimeError):
                raise self._died() from None
            message = await future
        finally:
            self._waiting.pop(number, None)
            self._on_chunk.pop(number, None)
        if "error" in message:
            raise p.error_from_json(message["error"])
        return reply.model_validate(message["ok"])

    async def stop(self) -> None:
        """End the worker: let it see the end of its input, then kill it. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _died(self) -> WorkerDied:
        return WorkerDied(
            f"the worker process {self._process.pid} ended (exit code {self._process.returncode}).",
            remedy="See the daemon's log for the reason; the worker is started again.",
        )

    async def _read_loop(self) -> None:
        assert self._process.stdout is not None
        try:
            while (message := await frames.read_async(self._process.stdout)) is not None:
                self._deliver(message)
        except CodecError:
            self.kill()
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), _STOP_S)
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._died())

    def _deliver(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if not isinstance(number, int):
            return
        if "chunk" in message:
            listener = self._on_chunk.get(number)
            if listener is not None:
                listener(p.EncodedChunkFile.model_validate(message["chunk"]))
            return
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(message)
