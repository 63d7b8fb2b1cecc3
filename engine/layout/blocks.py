"""`Block` and `Layout`: how flat indices on one side map to flat indices on another.

A block is a hyper-rectangle with one offset and one stride vector per side. The multi-index (k_0, …, k_{d-1}),
0 <= k_j < shape[j], is element `src_offset + Σ k_j·src_strides[j]` of the source and
`dst_offset + Σ k_j·dst_strides[j]` of the destination. A `Layout` is a list of blocks that together map every source
element it covers to exactly one destination element.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from engine.errors import LayoutError

TILE_LANES = 1 << 16
"""16-bit lanes in a tile: the unit of detection, of the publisher's proof and of dense fallback."""


@dataclass(frozen=True, slots=True)
class Block:
    """One rectangular affine piece of a layout. All numbers count elements; strides may not be negative."""

    shape: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]

    def __post_init__(self) -> None:
        d = len(self.shape)
        if len(self.src_strides) != d or len(self.dst_strides) != d:
            raise LayoutError(f"block with {d} dimensions has strides of other lengths: {self}")
        if any(n < 1 for n in self.shape):
            raise LayoutError(f"block shape must be positive everywhere: {self.shape}")
        if min((self.src_offset, self.dst_offset, *self.src_strides, *self.dst_strides)) < 0:
            raise LayoutError(f"block offsets and strides may not be negative: {self}")

    @property
    def numel(self) -> int:
        """Number of elements the block maps."""
        return prod(self.shape)

    @property
    def src_last(self) -> int:
        """The highest source index the block touches."""
        return self.src_offset + sum((n - 1) * s for n, s in zip(self.shape, self.src_strides, strict=True))

    @property
    def dst_last(self) -> int:
        """The highest destination index the block touches."""
        return self.dst_offset + sum((n - 1) * s for n, s in zip(self.shape, self.dst_strides, strict=True))

    def swapped(self) -> Block:
        """The same pairs of elements with source and destination exchanged."""
        return Block(self.shape, self.dst_offset, self.dst_strides, self.src_offset, self.src_strides)

    def normalised(self) -> Block:
        """The same pairs with the fewest dimensions, at least one, outermost source stride first.

        Dimensions of size 1 are dropped and neighbours that continue each other on both sides are fused, so the last
        dimension is the longest run in source order.
        """
        dims = sorted(
            (d for d in zip(self.shape, self.src_strides, self.dst_strides, strict=True) if d[0] > 1),
            key=lambda d: (-d[1], -d[2]),
        )
        fused: list[tuple[int, int, int]] = []
        for n, s, t in dims:
            if fused and fused[-1][1] == n * s and fused[-1][2] == n * t:
                fused[-1] = (fused[-1][0] * n, s, t)
            else:
                fused.append((n, s, t))
        fused = fused or [(1, 1, 1)]
        return Block(
            tuple(d[0] for d in fused),
            self.src_offset,
            tuple(d[1] for d in fused),
            self.dst_offset,
            tuple(d[2] for d in fused),
        )

    def to_json(self) -> list[object]:
        """`[shape, src_offset, src_strides, dst_offset, dst_strides]`, the form used in records and chunk headers."""
        return [list(self.shape), self.src_offset, list(self.src_strides), self.dst_offset, list(self.dst_strides)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks mapping a source of `src_numel` elements to a destination of `dst_numel` elements."""

    blocks: tuple[Block, ...]
    src_numel: int
    dst_numel: int


def contiguous_shift(layout: Layout) -> int | None:
    """d such that destination = source + d for the whole layout, or None if it is not one such run from source 0."""
    if len(layout.blocks) != 1:
        return None
    block = layout.blocks[0].normalised()
    if len(block.shape) != 1 or block.src_strides != (1,) or block.dst_strides != (1,) or block.src_offset != 0:
        return None
    return block.dst_offset if block.numel == layout.src_numel else None
