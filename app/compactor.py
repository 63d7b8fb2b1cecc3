"""Makes anchors: complete, dense versions from which a receiver can start without the whole chain.

One invariant: an anchor's manifest is put, if absent, only after every one of its chunks is durable and every tensor's
digest has come out as that version's decision says. Compaction streams tensor by tensor: memory is one tensor, the
chunk being built, and a bounded cache of decoded chunks; the chunks themselves lie in a directory meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from app.chain import Chain
from app.rebuilding import DECODED_CACHE_BYTES, TILE_LANES, U16, Rebuilder
from engine.codec.chunk import ChunkHeader, ChunkItem, encode
from engine.layout.algebra import identity, to_json
from engine.records import (
    AnchorRecord,
    ChunkRef,
    CommitDecision,
    TensorDigest,
    keys,
    record_bytes,
    sha256_hex,
    sign,
)

log = logging.getLogger(__name__)


class Compactor:
    """Compaction of one run. `directory` is scratch space; several compactors may share it and a store."""

    def __init__(
        self, chain: Chain, directory: Path, chunk_bytes: int, *, cache_bytes: int = DECODED_CACHE_BYTES
    ) -> None:
        self._chain = chain
        self._directory = directory / chain.run
        self._chunk_bytes = chunk_bytes
        self._cache_bytes = cache_bytes

    async def due(self, every: int) -> int | None:
        """The version that should have an anchor and has none: the newest of every `every`-th commit."""
        commits = self._chain.commits()
        index = (len(commits) - 1) // every * every
        if index <= 0:
            return None
        version = commits[index].version
        anchored = await self._chain.anchor_versions(max_age_s=5.0)
        return None if anchored and anchored[-1] >= version else version

    async def run_due(self, every: int) -> AnchorRecord | None:
        """Make the anchor that is due, if one is."""
        version = await self.due(every)
        return None if version is None else await self.make(version)

    async def make(self, version: int) -> AnchorRecord:
        """Make the anchor of a committed version, or return the one that stands.

        ProofError when a tensor does not come out as the decision says, CodecError or StoreError when the chain
        cannot be read; nothing is visible then but chunks no manifest names.
        """
        chain = self._chain
        standing = await chain.anchor(version)
        if standing is not None:
            return standing
        scratch = self._directory / f"{version}"
        await asyncio.to_thread(scratch.mkdir, parents=True, exist_ok=True)
        try:
            rebuilt = await Rebuilder.open(chain, version, scratch, cache_bytes=self._cache_bytes)
            chunks = await self._write(rebuilt)
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        record = sign(
            AnchorRecord(run=chain.run, version=version, tensors=rebuilt.decision.tensors, chunks=chunks),
            chain.signing_key,
        )
        data = await asyncio.to_thread(record_bytes, record)
        created = await chain.store.put_if_absent(keys.anchor_manifest(chain.run, version), data)
        chain.forget_anchors()
        log.info("run %s: anchor of version %d %s", chain.run, version, "made" if created else "was there")
        return await chain.anchor(version) or record

    async def _write(self, rebuilt: Rebuilder) -> list[ChunkRef]:
        """Rebuild, prove, encode and upload every tensor; returns the references in order."""
        decision = rebuilt.decision
        refs: list[ChunkRef] = []
        batch: list[ChunkItem] = []
        batch_bytes = 0
        for number, name in enumerate(rebuilt.order):
            lanes = await asyncio.to_thread(rebuilt.tensor, name)
            for item in _dense_items(rebuilt.meta(name), number, lanes, self._chunk_bytes):
                full = batch_bytes + item.dense_bits.nbytes > self._chunk_bytes
                if batch and (full or batch[-1].slice == number):
                    refs.append(await self._upload(decision, len(refs), batch))
                    batch, batch_bytes = [], 0
                batch.append(item)
                batch_bytes += item.dense_bits.nbytes
        if batch:
            refs.append(await self._upload(decision, len(refs), batch))
        return refs

    async def _upload(self, decision: CommitDecision, seq: int, items: list[ChunkItem]) -> ChunkRef:
        header = ChunkHeader(
            run=decision.run, version=decision.version, epoch=decision.epoch, writer=0, seq=seq, base=None
        )
        chunk = await asyncio.to_thread(encode, header, items)
        sha256 = await asyncio.to_thread(sha256_hex, chunk.data)
        key = keys.anchor_chunk(decision.run, decision.version, seq, sha256)
        await self._chain.store.put_if_absent(key, chunk.data)
        return ChunkRef(
            key=key, sha256=sha256, size_bytes=len(chunk.data), raw_bytes=chunk.raw_bytes, entries=chunk.entries
        )


def _dense_items(meta: TensorDigest, number: int, lanes: U16, chunk_bytes: int) -> Iterator[ChunkItem]:
    """The tensor as dense items of whole tiles (slice `number` of the anchor), each of about `chunk_bytes` at most."""
    tiles = -(-len(lanes) // TILE_LANES)
    step = max(1, chunk_bytes // (2 * TILE_LANES))
    blocks = to_json(identity(len(lanes))) if len(lanes) else []
    for start in range(0, tiles, step):
        stop = min(start + step, tiles)
        yield ChunkItem(
            tensor=meta.name,
            shape=meta.shape,
            dtype=meta.dtype,
            slice=number,
            lanes=len(lanes),
            blocks=blocks,
            ranks=np.empty(0, np.int64),
            diffs=np.empty(0, np.uint16),
            dense_tiles=np.arange(start, stop, dtype=np.int64),
            dense_bits=lanes[start * TILE_LANES : stop * TILE_LANES],
        )
