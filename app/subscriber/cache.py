"""Chunks in local files: downloaded once, verified, kept until space is needed.

One invariant: a file has its final name only when its bytes have the length and SHA-256 of its reference; and a file
that somebody holds is never removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from app.degraded import Degraded
from app.metrics import Metrics
from engine.errors import CodecError
from engine.records.models import ChunkRef
from transports.store.base import ChunkStore
from transports.store.download import download

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 1 << 30


class ChunkCache:
    """One directory of chunks, named by hash. Used on one event loop.

    `max_bytes` bounds what is kept; what is held at one time may exceed it, which is counted as degraded.
    """

    def __init__(
        self, root: Path, store: ChunkStore, *, max_bytes: int, parallel: int, metrics: Metrics, degraded: Degraded
    ) -> None:
        self._root = root
        self._store = store
        self._max_bytes = max_bytes
        self._gate = asyncio.Semaphore(parallel)
        self._metrics = metrics
        self._degraded = degraded
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by hash, least recently used first
        self._held: Counter[str] = Counter()
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of complete chunks on disk."""
        return sum(self._sizes.values())

    def path(self, ref: ChunkRef) -> Path:
        return self._root / f"{ref.sha256}.dtc"

    async def open(self) -> None:
        """Find what an earlier process left; anything incomplete is removed."""
        found = await asyncio.to_thread(self._scan)
        self._sizes.update(found)
        await self._trim()

    async def aclose(self) -> None:
        """Cancel downloads in progress."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def holding(self, refs: Sequence[ChunkRef]) -> AsyncIterator[list[Path]]:
        """All chunks local and verified, and kept so inside the block. StoreError if one cannot be had."""
        self._held.update(r.sha256 for r in refs)
        try:
            tasks = [asyncio.ensure_future(self.fetch(ref)) for ref in refs]
            try:
                yield list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
        finally:
            self._held.subtract(r.sha256 for r in refs)
            self._held += Counter()
            await self._trim()

    async def fetch(self, ref: ChunkRef) -> Path:
        """The chunk's local file, downloaded if need be; several callers share one download."""
        path = self.path(ref)
        if ref.sha256 in self._sizes:
            self._sizes.move_to_end(ref.sha256)
            return path
        if ref.size_bytes > MAX_CHUNK_BYTES:
            raise CodecError(f"{ref.key} declares {ref.size_bytes} bytes, more than the {MAX_CHUNK_BYTES} of a chunk.")
        task = self._running.get(ref.sha256)
        if task is None:
            task = asyncio.create_task(self._download(ref, path))
            self._running[ref.sha256] = task
            task.add_done_callback(lambda t: self._finished(ref.sha256, t))
        await asyncio.shield(task)
        return path

    async def discard(self, refs: Iterable[ChunkRef]) -> None:
        """Forget files that turned out to be damaged, so that they are downloaded again."""
        for ref in refs:
            self._sizes.pop(ref.sha256, None)
            await asyncio.to_thread(self.path(ref).unlink, missing_ok=True)

    async def _download(self, ref: ChunkRef, path: Path) -> None:
        async with self._gate:
            await download(self._store, ref.key, path, ref.size_bytes, ref.sha256)
        self._sizes[ref.sha256] = ref.size_bytes
        self._metrics.downloaded_bytes.inc(ref.size_bytes)
        await self._trim()

    def _finished(self, sha256: str, task: asyncio.Task[None]) -> None:
        self._running.pop(sha256, None)
        if not task.cancelled() and task.exception() is not None:
            log.debug("chunk %s…: %s", sha256[:16], task.exception())

    async def _trim(self) -> None:
        excess = self.bytes - self._max_bytes
        if excess <= 0:
            return
        doomed = []
        for sha256, size in self._sizes.items():
            if excess <= 0:
                break
            if not self._held[sha256]:
                doomed.append(sha256)
                excess -= size
        for sha256 in doomed:
            del self._sizes[sha256]
        if excess > 0:
            self._degraded.count("cache-over-bound", detail=f"{excess} bytes more than cache_bytes are in use")
        await asyncio.to_thread(self._remove, doomed)

    def _remove(self, doomed: Sequence[str]) -> None:
        for sha256 in doomed:
            (self._root / f"{sha256}.dtc").unlink(missing_ok=True)

    def _scan(self) -> dict[str, int]:
        self._root.mkdir(parents=True, exist_ok=True)
        found: list[tuple[float, str, int]] = []
        for file in self._root.iterdir():
            stat = file.lstat()
            if file.suffix == ".dtc" and len(file.stem) == 64 and file.is_file() and not file.is_symlink():
                found.append((stat.st_mtime, file.stem, stat.st_size))
            elif file.is_file() or file.is_symlink():
                file.unlink()
        return {name: size for _, name, size in sorted(found)}
