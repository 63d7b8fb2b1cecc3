"""Rebuild every version's bits from the store alone, the way a reader with nothing else would."""

from __future__ import annotations

import numpy as np

from app.chain import Chain
from engine.codec.chunk import ChunkHeader, decode
from engine.codec.table import canonical_lanes
from engine.detect.base import TILE
from engine.digest import DigestKey, digest_array, to_hex
from engine.layout.algebra import from_json, map_indices
from engine.records import CommitDecision, sha256_hex

Bits = dict[str, np.ndarray]


async def replay(chain: Chain, version: int, bits: Bits | None = None, base: int | None = None) -> Bits:
    """Canonical lanes of every tensor at `version`, its digests checked against the decision at each step."""
    await chain.refresh()
    state: Bits = {} if bits is None else {k: v.copy() for k, v in bits.items()}
    for commit in chain.path(base, version):
        await _apply(chain, await chain.full(commit.version), state)
    return state


async def _apply(chain: Chain, commit: CommitDecision, state: Bits) -> None:
    for ref in commit.parts:
        part = await chain.part(ref)
        for seq, chunk in enumerate(part.chunks):
            data = await chain.store.get(chunk.key, max_bytes=chunk.size_bytes)
            assert sha256_hex(data) == chunk.sha256
            header = ChunkHeader(chain.run, commit.version, commit.epoch, part.writer, seq, commit.base)
            for item in decode(data, max_raw_bytes=chunk.raw_bytes, expect=header)[1]:
                numel = canonical_lanes(item.shape, item.dtype)
                lanes = state.setdefault(item.tensor, np.zeros(numel, np.uint16))
                layout = from_json(item.blocks, item.lanes, numel)
                where = map_indices(layout, item.ranks)
                lanes[where] = lanes[where] + item.diffs
                at = 0
                for tile in item.dense_tiles.tolist():
                    ranks = np.arange(tile * TILE, min((tile + 1) * TILE, item.lanes), dtype=np.int64)
                    lanes[map_indices(layout, ranks)] = item.dense_bits[at : at + ranks.size]
                    at += ranks.size
    for meta in commit.tensors:
        assert to_hex(digest_array(DigestKey.for_tensor(meta.name), state[meta.name])) == meta.digest, meta.name


def assert_same(found: Bits, expected: Bits) -> None:
    """Bit for bit, all tensors."""
    assert found.keys() == expected.keys()
    for name, lanes in expected.items():
        wrong = np.flatnonzero(found[name] != lanes)
        assert wrong.size == 0, f"{name}: {wrong.size} lanes differ, first at {wrong[:5]}"
