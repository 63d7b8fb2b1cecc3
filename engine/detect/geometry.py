"""Where the ranks of a slice lie in their canonical tensor, and the digest of tiles at those places.

Invariant: `tile_digests` of a tile range equals the same rows of `engine.digest.digest_slice` of the whole slice.
"""

from __future__ import annotations

import numpy as np

from engine.detect.base import I64, TILE, U16, U64, SliceGeometry
from engine.digest import DigestKey, digest_slice, run_digest
from engine.errors import LayoutError
from engine.layout.blocks import Layout
from engine.layout.mapping import map_indices, owned_order


def contiguous_start(layout: Layout) -> int | None:
    """Canonical index of rank 0 when the slice is one contiguous canonical run in order, else None."""
    if len(layout.blocks) != 1:
        return None
    block = layout.blocks[0].normalised()
    is_run = len(block.shape) == 1 and block.src_offset == 0 and block.src_strides == block.dst_strides == (1,)
    return block.dst_offset if is_run and block.shape[0] == layout.src_numel else None


def canonical_of(geometry: SliceGeometry, ranks: I64) -> I64:
    """Canonical lane index of each rank."""
    start = contiguous_start(geometry.layout)
    return ranks + start if start is not None else map_indices(geometry.layout, ranks)


def tile_digests(geometry: SliceGeometry, bits: U16, tile_start: int) -> U64:
    """Digest per tile of `bits`, the lanes of whole consecutive tiles from `tile_start` on (the last may be short)."""
    layout, first = geometry.layout, tile_start * TILE
    if first + bits.size > layout.src_numel:
        raise LayoutError(
            f"{bits.size} lanes from tile {tile_start} on exceed the {layout.src_numel} lanes of this slice of "
            f"{geometry.tensor!r}.",
            remedy="Pass the lanes of the tiles asked for, and the layout of this slice.",
        )
    key = DigestKey.for_tensor(geometry.tensor)
    start = contiguous_start(layout)
    if start is None and bits.size == layout.src_numel:
        return digest_slice(key, bits, layout)
    out = np.zeros(-(-bits.size // TILE), np.uint64)
    words = key.b_words(layout.dst_numel)
    for t in range(out.size):
        piece = bits[t * TILE : (t + 1) * TILE]
        if start is not None:
            out[t] = run_digest(piece, key.a, words, start + first + t * TILE)
        else:
            rank = first + t * TILE
            weights = key.weights(owned_order(layout, rank, rank + piece.size))
            out[t] = (weights * (piece.astype(np.uint64) + np.uint64(1))).sum(dtype=np.uint64)
    return out
