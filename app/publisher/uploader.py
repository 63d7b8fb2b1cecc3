"""Uploads the chunks of one version straight from the spool while later ones are still being encoded.

One invariant: `finish` returns references only to chunks that are durable in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.degraded import Degraded
from app.metrics import Metrics
from app.publisher.retry import until_stored
from app.worker.protocol import EncodedChunkFile
from engine.records import ChunkRef, keys
from transports.store.base import ChunkStore

PARALLEL = 4
Listener = Callable[[EncodedChunkFile], None]


@dataclass(frozen=True)
class Target:
    """Whose chunks these are."""

    run: str
    version: int
    epoch: int
    writer: int


class Uploader:
    """At most PARALLEL puts at a time. Offer chunks as they are complete, then `finish`; `cancel` when it is over."""

    def __init__(self, store: ChunkStore, target: Target, degraded: Degraded, metrics: Metrics) -> None:
        self._store = store
        self._target = target
        self._degraded = degraded
        self._metrics = metrics
        self._gate = asyncio.Semaphore(PARALLEL)
        self._tasks: dict[int, asyncio.Task[ChunkRef]] = {}

    def offer(self, chunk: EncodedChunkFile) -> None:
        """Start (or queue) the upload of a chunk."""
        if chunk.seq not in self._tasks:
            self._tasks[chunk.seq] = asyncio.create_task(self._put(chunk), name=f"upload-{chunk.seq}")

    async def finish(self) -> list[ChunkRef]:
        """All chunks offered so far, in order, once they are in the store."""
        return list(await asyncio.gather(*(self._tasks[seq] for seq in sorted(self._tasks))))

    async def cancel(self) -> None:
        """Stop what still runs and wait for it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _put(self, chunk: EncodedChunkFile) -> ChunkRef:
        t = self._target
        key = keys.chunk(t.run, t.version, t.epoch, t.writer, chunk.seq, chunk.sha256)
        async with self._gate:
            await until_stored(self._degraded, f"chunk {key}", lambda: self._store.put_if_absent(key, Path(chunk.path)))
        self._metrics.published_bytes.inc(chunk.size_bytes)
        return ChunkRef(
            key=key,
            sha256=chunk.sha256,
            size_bytes=chunk.size_bytes,
            raw_bytes=chunk.raw_bytes,
            entries=chunk.entries,
        )
