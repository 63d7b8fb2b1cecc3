"""From decisions, parts and anchors to what a receiver is asked to become.

One invariant: a plan is complete before it is handed out: every chunk of every version in it is local and verified.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from app.chain import Chain
from app.subscriber.cache import ChunkCache
from clients.rollout.protocol import ChunkBody, TargetBody
from engine.errors import CodecError, DteError, StateConflict
from engine.records import DenseRequest, keys, record_bytes
from engine.records.models import ChunkRef, CommitDecision, TensorDigest
from transports.errors import ObjectCorrupt, ObjectNotFound, StoreError

log = logging.getLogger(__name__)


class NoSource(StoreError):
    """Nothing intact leads to the wanted version."""

    code = "no-intact-chain"


@dataclass(frozen=True)
class Step:
    """One version to install, or a complete one to start from: an anchor (`base` None) or a version that is dense
    everywhere, whatever its base."""

    version: int
    step: int
    base: int | None
    tensors: list[TensorDigest]
    base_tensors: list[TensorDigest] | None
    chunks: list[ChunkRef]


def digests(tensors: list[TensorDigest]) -> dict[str, str]:
    """Digest by name."""
    return {t.name: t.digest for t in tensors}


class Targets:
    """Plans for one run."""

    def __init__(self, chain: Chain, cache: ChunkCache) -> None:
        self.chain = chain
        self.cache = cache

    async def delta(self, version: int) -> Step:
        """The step that installs `version` on its base."""
        commit = await self.chain.full(version)
        chunks = [ref for part in commit.parts for ref in (await self.chain.part(part)).chunks]
        base = None if commit.base is None else (await self.chain.full(commit.base)).tensors
        return Step(version, commit.step, commit.base, commit.tensors, base, chunks)

    async def path(self, base: int, target: int) -> list[Step]:
        """The steps from `base` to `target`; StateConflict if they are not on one chain."""
        return [await self.delta(commit.version) for commit in self.chain.path(base, target)]

    async def resync_plans(
        self, head: CommitDecision, least: int = 0, *, failures: list[DteError] | None = None
    ) -> AsyncIterator[list[Step]]:
        """Ways to build `head` from nothing that start at version `least` or later, the newest start first. Starts that
        cannot be read are passed over; their errors go to `failures`."""
        for version in sorted((v for v in await self._starts(head) if v >= least), reverse=True):
            for start in (self._anchored, self._complete):
                try:
                    first = await start(version)
                    if first is not None:
                        yield [first, *await self.path(version, head.version)]
                except (StoreError, CodecError) as error:
                    log.warning("run %s: version %d is no starting point: %s", self.chain.run, version, error)
                    if failures is not None:
                        failures.append(error)

    async def _starts(self, head: CommitDecision) -> set[int]:
        """Versions on the head's chain that have an anchor, need no base, or are dense everywhere."""
        line = self.chain.path(None, head.version)
        complete = {commit.version for commit in line if commit.base is None or commit.totals.complete}
        return complete | {v for v in await self.chain.anchor_versions() if v in {c.version for c in line}}

    async def _anchored(self, version: int) -> Step | None:
        anchor = await self.chain.anchor(version)
        if anchor is None:
            return None
        commit = await self.chain.full(version)
        if digests(anchor.tensors) != digests(commit.tensors):
            raise CodecError(f"the anchor of version {version} does not have the digests of its decision.")
        return Step(version, commit.step, None, commit.tensors, None, list(anchor.chunks))

    async def _complete(self, version: int) -> Step | None:
        commit = await self.chain.full(version)
        if commit.base is not None and not commit.totals.complete:
            return None
        step = await self.delta(version)
        if not step.chunks and commit.totals.dense_tiles:
            return None  # only digests were published: receivers were expected to start from the same checkpoint
        return replace(step, base_tensors=None)

    async def ask_for_dense(self, head: CommitDecision) -> bool:
        """Ask the trainer for a dense version after `head`, because nothing intact leads to it; False if somebody has
        asked already."""
        key = keys.dense_request(self.chain.run, head.version)
        return await self.chain.store.put_if_absent(
            key, record_bytes(DenseRequest(run=self.chain.run, version=head.version))
        )

    @asynccontextmanager
    async def local(self, plan: list[Step]) -> AsyncIterator[list[TargetBody]]:
        """The plan with all its chunks in local files, which stay while the block runs."""
        refs = [ref for step in plan for ref in step.chunks]
        async with self.cache.holding(refs):
            yield [self.body(step) for step in plan]

    def body(self, step: Step, received: str | None = None) -> TargetBody:
        """What the ranks are asked to become: from the step's chunks, which are local, or from what they have received
        in the P2P group `received`."""
        return TargetBody(
            run=self.chain.run,
            version=step.version,
            step=step.step,
            base=step.base,
            tensors=step.tensors,
            base_digests=None if step.base_tensors is None else digests(step.base_tensors),
            chunks=[
                ChunkBody(
                    path=str(self.cache.path(c).absolute()),
                    sha256=c.sha256,
                    size_bytes=c.size_bytes,
                    raw_bytes=c.raw_bytes,
                    entries=c.entries,
                )
                for c in (step.chunks if received is None else ())
            ],
            received=received,
        )


def chunk_refs(plan: list[Step]) -> list[ChunkRef]:
    """All chunks of a plan."""
    return [ref for step in plan for ref in step.chunks]


def is_unreadable(error: DteError) -> bool:
    """True if another way to the version may work where this one failed."""
    return isinstance(error, ObjectNotFound | ObjectCorrupt | CodecError | StateConflict | NoSource)
