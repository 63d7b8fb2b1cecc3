"""One committed version, rebuilt tensor by tensor from its chunks, for whoever writes it down dense: anchors, exports.

One invariant: a tensor is handed out only when its digest is the one that the version's decision says. Memory is one
tensor and a bounded cache of decoded chunks; the chunks themselves lie in a directory meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.aio import gather_bounded
from app.chain import Chain
from engine.codec.chunk import ChunkItem, decode
from engine.commit.launch import tensor_lanes
from engine.digest import DigestKey, digest_array, to_hex
from engine.errors import CodecError, ProofError
from engine.layout.algebra import from_json, map_indices
from engine.records import ChunkRef, CommitDecision, TensorDigest
from transports.store.download import download

TILE_LANES = 1 << 16
U16 = npt.NDArray[np.uint16]
DECODED_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Source:
    """A chunk to apply, in order: which run and version it must say it is of, and epoch and writer where they are
    known; and where its bytes are."""

    header: tuple[str, int, int | None, int | None]
    ref: ChunkRef
    path: Path


class Rebuilder:
    """The tensors of one version; make it with `open`, or from chunks at hand: all from a whole version or an anchor
    on. `order` names the tensors as their chunks hold them."""

    def __init__(
        self, decision: CommitDecision, sources: Sequence[Source], cache_bytes: int = DECODED_CACHE_BYTES
    ) -> None:
        self.decision = decision
        self._metas = {t.name: t for t in decision.tensors}
        self._cache = _Decoded(sources, cache_bytes)
        self._index = self._cache.index()
        # In the order in which chunks hold them, so that neighbours are decoded once.
        held = [name for name in self._index if name in self._metas]
        self.order: tuple[str, ...] = (*held, *(name for name in self._metas if name not in self._index))

    @classmethod
    async def open(
        cls,
        chain: Chain,
        version: int,
        scratch: Path,
        *,
        own_anchor: bool = False,
        cache_bytes: int = DECODED_CACHE_BYTES,
    ) -> Rebuilder:
        """Download and decode what the version needs into `scratch`, an existing directory.

        `own_anchor`: start from the version's own anchor if it has one. StateConflict if `version` is no commit,
        StoreError or CodecError when the chain cannot be read.
        """
        decision = await chain.full(version)
        sources = await _sources(chain, version, scratch, own_anchor=own_anchor)
        return await asyncio.to_thread(cls, decision, sources, cache_bytes)

    def meta(self, name: str) -> TensorDigest:
        return self._metas[name]

    def tensor(self, name: str) -> U16:
        """The tensor's canonical lanes after all chunks; ProofError unless their digest is the decision's."""
        meta = self._metas[name]
        lanes = np.zeros(tensor_lanes(meta), np.uint16)
        numbers = self._index.get(name, [])
        for number in numbers:
            for item in self._cache.items(number):
                if item.tensor == name:
                    _apply(item, lanes)
        key = DigestKey.for_tensor(name)
        found = to_hex(digest_array(key, lanes))
        if found != meta.digest:
            raise ProofError(
                f"tensor {name!r} of version {self.decision.version} comes out with digest {found}, the decision says "
                f"{meta.digest}" + (": nothing is made of it." if numbers else "; the store has no chunks of it."),
                remedy="A chunk of the chain is not what its writer proved; ask for a dense version."
                if numbers
                else "The first version's chunks were left out; use a version that carries the whole model.",
            )
        return lanes


async def _sources(chain: Chain, version: int, scratch: Path, *, own_anchor: bool) -> list[Source]:
    """All chunks from the newest usable anchor (or the newest version that is whole) on, downloaded."""
    wanted: list[tuple[tuple[str, int, int, int], ChunkRef]] = []
    # A version that is dense everywhere needs nothing before it.
    whole = [c for c in chain.path(None, version) if c.base is None or c.totals.complete][-1]
    base = whole.base
    last = version if own_anchor else version - 1
    usable = [v for v in await chain.anchor_versions() if whole.version <= v <= last]
    for candidate in reversed(usable):
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

    async def fetch(item: tuple[tuple[str, int, int, int], ChunkRef]) -> Source:
        header, ref = item
        path = scratch / f"{ref.sha256}.dtc"
        await download(chain.store, ref.key, path, ref.size_bytes, ref.sha256)
        return Source(header, ref, path)

    return await gather_bounded(fetch, wanted)


class _Decoded:
    """Decoded chunks by number, the least recently used dropped above a bound (they can be decoded again)."""

    def __init__(self, sources: Sequence[Source], limit_bytes: int) -> None:
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
        said = (header.run, header.version, header.epoch, header.writer)
        if any(want is not None and want != found for want, found in zip(source.header, said, strict=True)):
            raise CodecError(f"{source.ref.key} says it is of another version or writer: {header}.")
        size = sum(i.ranks.nbytes + i.diffs.nbytes + i.dense_bits.nbytes for i in items)
        self._held[number] = (items, size)
        self._held_bytes += size
        while self._held_bytes > self._limit_bytes and len(self._held) > 1:
            self._held_bytes -= self._held.popitem(last=False)[1][1]
        return items


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
