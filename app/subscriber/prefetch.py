"""Downloads the chunks of the version in flight as its parts appear, before it is decided.

One invariant: this only fills the cache; nothing depends on it, and a failure here is left to whoever needs the chunk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from app.chain import Chain
from app.subscriber.cache import ChunkCache
from engine.errors import DteError

log = logging.getLogger(__name__)

IDLE_S = 1.0


class Prefetcher:
    """One per run. `wanted` says whether any receiver has a use for the next version."""

    def __init__(self, chain: Chain, cache: ChunkCache, wanted: Callable[[], bool], *, interval_s: float) -> None:
        self._chain = chain
        self._cache = cache
        self._wanted = wanted
        self._interval_s = interval_s
        self._task = asyncio.create_task(self._run(), name=f"prefetch-{chain.run}")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                if self._wanted():
                    await self._next()
                else:
                    await asyncio.sleep(IDLE_S)
            except DteError as error:
                log.info("run %s: nothing downloaded ahead: %s", self._chain.run, error)
                await asyncio.sleep(IDLE_S)
            except Exception:
                log.exception("run %s: downloading ahead failed", self._chain.run)
                await asyncio.sleep(IDLE_S)

    async def _next(self) -> None:
        """Follow one version number until it is decided."""
        version = self._chain.next_version
        seen: set[int] = set()
        while not await self._chain.wait(version, self._interval_s):
            epoch = self._chain.epoch
            if epoch is None or not self._wanted():
                continue
            parts = await self._chain.parts(version, epoch)
            fresh = [ref for writer, part in parts.items() if writer not in seen for ref in part.chunks]
            seen.update(parts)
            results = await asyncio.gather(*(self._cache.fetch(ref) for ref in fresh), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, DteError):
                    raise result
