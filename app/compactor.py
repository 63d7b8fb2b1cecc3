"""Makes anchors: complete, dense versions from which a receiver can start without the whole chain.

One invariant: an anchor's manifest is put, if absent, only after every one of its chunks is durable and every tensor's
digest has come out as that version's decision says. Compaction streams tensor by tensor: memory is one tensor, the
chunk being built, and a bounded cache of decoded chunks; the chunks themselves lie in a directory meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.aio import gather_bounded
from app.chain import Chain
from engine.codec.chunk import ChunkHeader, ChunkItem, decode, encode
from engine.commit.launch import tensor_lanes
from engine.digest import DigestKey, digest_array, to_hex
from engine.errors import CodecError, ProofError
from engine.layout.algebra import from_json, identity, map_indices, to_json
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
from transports.store.download import download

log = logging.getLogger(__name__)

TILE_LANES = 1 << 16
U16 = npt.NDArray[np.uint16]
DECODED_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class _Source:
    """A chunk to apply, in order: which version and writer it must say it is of, and where its bytes are."""

    header: tuple[str, int, int, int]
    ref: ChunkRef
    path: Path


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
        decision = await chain.full(version)
        scratch = self._directory / f"{version}"
        await asyncio.to_thread(scratch.mkdir, parents=True, exist_ok=True)
        try:
            sources = await self._sources(version, scratch)
            chunks = await self._write(decision, sources)
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        record = sign(
            AnchorRecord(run=chain.run, version=version, tensors=decision.tensors, chunks=chunks), chain.signing_key
        )
        data = await asyncio.to_thread(record_bytes, record)
        created = await chain.store.put_if_absent(keys.anchor_manifest(chain.run, version), data)
        chain.forget_anchors()
        log.info("run %s: anchor of version %d %s", chain.run, version, "made" if created else "was there")
        return await chain.anchor(version) or record

    async def _sources(self, version: int, scratch: Path) -> list[_Source]:
        """All chunks from the newest anchor before `version` (or the version without a base) on, downloaded."""
        chain = self._chain
        wanted: list[tuple[tuple[str, int, int, int], ChunkRef]] = []
        # A version that is dense everywhere needs nothing before it.
        whole = [c for c in chain.path(None, version) if c.base is None or c.totals.complete][-1]
        base = whole.base
        for candidate in reversed([v for v in await chain.anchor_versions() if whole.version <= v < version]):
            anchor = await chain.anchor(candidate)
            if anchor is not None:
                base = candidate
                epoch = (await chain.full(candidate)).epoch
                wanted += [((chain.run, candidate, epoch, 0), ref) for ref in anchor.chunks]
                break
        for commit in chain.path(base, version):
            for part_ref in commit.parts:
                header = (chain.run, commit.version, commit.epoch, part_ref.writer)
                wanted += [(header, ref) for ref in (await chain.part(part_ref)).chunks]

        async def fetch(item: tuple[tuple[str, int, int, int], ChunkRef]) -> _Source:
            header, ref = item
            path = scratch / f"{ref.sha256}.dtc"
            await download(chain.store, ref.key, path, ref.size_bytes, ref.sha256)
            return _Source(header, ref, path)

        return await gather_bounded(fetch, wanted)

    async def _write(self, decision: CommitDecision, sources: list[_Source]) -> list[ChunkRef]:
        """Rebuild, prove, encode and upload every tensor; returns the references in order."""
        cache = _Decoded(sources, self._cache_bytes)
        index = await asyncio.to_thread(cache.index)
        metas = {t.name: t for t in decision.tensors}
        # In the order in which chunks hold them, so that neighbours are decoded once.
        order = [name for name in index if name in metas] + [name for name in metas if name not in index]
        refs: list[ChunkRef] = []
        batch: list[ChunkItem] = []
        batch_bytes = 0
        for number, name in enumerate(order):
            lanes = await asyncio.to_thread(_rebuild, metas[name], cache, index.get(name, []))
            for item in _dense_items(metas[name], number, lanes, self._chunk_bytes):
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


class _Decoded:
    """Decoded chunks by number, the least recently used dropped above a bound (they can be decoded again)."""

    def __init__(self, sources: list[_Source], limit_bytes: int) -> None:
        self._sources = sources
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[int, tuple[list[ChunkItem], int]] = OrderedDict()
        self._held_bytes = 0

    def index(self) -> dict[str, list[int]]:
        """Which chunks hold each tensor, in order."""
        found: dict[str, list[int]] = defaultdict(list)
        for number in range(len(self._sources)):
            for name in dict.fromkeys(item.tensor for item in self.items(number)):
                found[name].append(number)
        return found

    def items(self, number: int) -> list[ChunkItem]:
        if number in self._held:
            self._held.move_to_end(number)
            return self._held[number][0]
        source = self._sources[number]
        header, items = decode(source.path.read_bytes(), max_raw_bytes=source.ref.raw_bytes)
        if (header.run, header.version, header.epoch, header.writer) != source.header:
            raise CodecError(f"{source.ref.key} says it is of another version or writer: {header}.")
        size = sum(i.ranks.nbytes + i.diffs.nbytes + i.dense_bits.nbytes for i in items)
        self._held[number] = (items, size)
        self._held_bytes += size
        while self._held_bytes > self._limit_bytes and len(self._held) > 1:
            self._held_bytes -= self._held.popitem(last=False)[1][1]
        return items


def _rebuild(meta: TensorDigest, cache: _Decoded, numbers: list[int]) -> U16:
    """The tensor's canonical lanes after all chunks; ProofError unless their digest is the decision's."""
    lanes = np.zeros(tensor_lanes(meta), np.uint16)
    for number in numbers:
        for item in cache.items(number):
            if item.tensor == meta.name:
                _apply(item, lanes)
    key = DigestKey.for_tensor(meta.name)
    found = to_hex(digest_array(key, lanes))
    if found != meta.digest:
        raise ProofError(
            f"tensor {meta.name!r} comes out with digest {found}, the decision says {meta.digest}: no anchor is made.",
            remedy="A chunk of the chain is not what its writer proved; ask for a dense version.",
        )
    return lanes


def _apply(item: ChunkItem, lanes: U16) -> None:
    layout = from_json(item.blocks, item.lanes, len(lanes))
    at = 0
    for tile in item.dense_tiles:
        start = int(tile) * TILE_LANES
        ranks = np.arange(start, min(start + TILE_LANES, item.lanes), dtype=np.int64)
        lanes[map_indices(layout, ranks)] = item.dense_bits[at : at + len(ranks)]
        at += len(ranks)
    if len(item.ranks):
        lanes[map_indices(layout, item.ranks)] += item.diffs


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
