"""One version of one rank on its way from the spool to its decision.

One invariant: a publication ends only when the number is decided. Either this rank's part is in the store, or the abort
it wrote stands, or somebody else decided first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.chain import Chain
from app.committer import Committer
from app.publisher.link import WorkerLink
from app.publisher.retry import until_stored
from app.publisher.uploader import Listener, Target, Uploader
from app.roles.base import Node
from app.worker import protocol as p
from app.worker.protocol import SpoolLost
from clients.protocol import JobState
from engine.errors import DteError, StateConflict
from engine.records import ChunkRef, Decision, PartRecord

log = logging.getLogger(__name__)
RETRY_COMMIT_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """What stands at the number, and why this rank could not deliver (None: it did). Counts are this rank's."""

    decision: Decision
    problem: DteError | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    entries: int = 0
    dense_tiles: int = 0


class Publication:
    """Runs once. `on_stage` is called with ENCODING and UPLOADING when these begin."""

    def __init__(
        self,
        node: Node,
        chain: Chain,
        committer: Committer,
        link: WorkerLink,
        target: Target,
        launch: str,
        on_stage: Callable[[JobState], object],
    ) -> None:
        self._node = node
        self._chain = chain
        self._committer = committer
        self._link = link
        self._target = target
        self._launch = launch
        self._on_stage = on_stage
        self._uploader: Uploader | None = None
        self.timings_ms: dict[str, float] = {}

    async def encode_and_upload(self) -> tuple[p.EncodeDone, list[ChunkRef]]:
        """Encode from the spool while uploading; returns when every chunk is in the store."""
        started = time.monotonic()
        self._on_stage(JobState.ENCODING)
        try:
            done = await self._link.encode(p.Encode(version=self._target.version), self._fresh_uploader)
            assert self._uploader is not None
            self.timings_ms["encode"] = done.timings_ms.get("encode", 0.0)
            self._on_stage(JobState.UPLOADING)
            refs = await self._uploader.finish()
        finally:
            if self._uploader is not None:
                await self._uploader.cancel()
        self.timings_ms["upload"] = (time.monotonic() - started) * 1e3
        return done, refs

    async def _fresh_uploader(self) -> Listener:
        if self._uploader is not None:
            await self._uploader.cancel()
        self._uploader = Uploader(self._node.store, self._target, self._node.degraded, self._node.metrics)
        return self._uploader.offer

    async def deliver(self, done: p.EncodeDone, refs: list[ChunkRef], timings_ms: dict[str, float]) -> None:
        """Put the part. SpoolLost if another part of ours, of another step or base, stands there."""
        t = self._target
        part = PartRecord(
            run=t.run,
            version=t.version,
            epoch=t.epoch,
            writer=t.writer,
            launch=self._launch,
            step=done.step,
            base=done.base,
            chunks=refs,
            slices=done.slices,
            replicas=done.replicas,
            created_ms=time.time_ns() // 1_000_000,
            timings_ms={k: round(v, 3) for k, v in {**done.timings_ms, **timings_ms, **self.timings_ms}.items()},
            detail=done.detail,
        )
        standing = await until_stored(
            self._node.degraded, f"part of version {t.version}", lambda: self._committer.put_part(part)
        )
        if (standing.step, standing.base, standing.slices) != (part.step, part.base, part.slices):
            raise SpoolLost(
                f"another part of this rank stands at version {t.version}.",
                remedy="Two daemons publish for one rank: stop one of them.",
            )

    async def decided(self) -> Decision:
        """Wait until the number is decided, deciding it as soon as all parts are there."""
        version = self._target.version
        while True:
            decision = await until_stored(
                self._node.degraded, f"decision of version {version}", lambda: self._committer.try_commit(version)
            )
            if decision is not None:
                return decision
            await until_stored(
                self._node.degraded,
                f"decision of version {version}",
                lambda: self._chain.wait(version, RETRY_COMMIT_S),
            )

    async def abort(self, reason: str) -> Decision:
        """Say that this rank cannot deliver; returns what stands at the number."""
        return await abort_version(
            self._node, self._chain, self._committer, self._target.version, self._target.epoch, reason
        )

    async def run(self, timings_ms: dict[str, float]) -> Outcome:
        """Everything after the read, to the end."""
        try:
            done, refs = await self.encode_and_upload()
            await self.deliver(done, refs, timings_ms)
        except DteError as problem:
            # Store errors are not among these: they are waited out.
            log.error("version %d cannot be delivered: %s", self._target.version, problem)
            return Outcome(await self.abort("spool-lost"), problem)
        decision = await self.decided()
        return Outcome(
            decision,
            None,
            dict(self.timings_ms),
            sum(s.changed for s in done.slices),
            sum(s.dense_tiles for s in done.slices),
        )


async def abort_version(
    node: Node, chain: Chain, committer: Committer, version: int, epoch: int, reason: str
) -> Decision:
    """Abort a number this writer cannot deliver, however long the store is away; returns what stands there."""

    async def attempt() -> Decision | None:
        try:
            return await committer.abort(version, epoch, reason)
        except StateConflict:
            # Not the next number yet, or the epoch is over: what stands is what counts.
            return chain.standing(version)

    while True:
        decision = await until_stored(node.degraded, f"abort of version {version}", attempt)
        if decision is not None:
            return decision
        await asyncio.sleep(RETRY_COMMIT_S)
