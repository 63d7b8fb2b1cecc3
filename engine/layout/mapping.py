"""Mapping indices through a layout, and the check every layout passes before anyone uses it.

One invariant: an index is mapped only through a block that holds it, by unique digits, so a result is never out of the
bounds that `check_blocks` proved.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.errors import LayoutError
from engine.jit import njit
from engine.layout.blocks import Block, Layout
from engine.layout.radix import Lattice

I64 = npt.NDArray[np.int64]


def dst_side(block: Block) -> Lattice:
    """The destination side of a block; LayoutError if its strides are not nested."""
    return Lattice.of(block.shape, block.dst_offset, block.dst_strides, block.src_offset, block.src_strides)


def src_side(block: Block) -> Lattice:
    """The source side of a block; LayoutError if its strides are not nested."""
    return Lattice.of(block.shape, block.src_offset, block.src_strides, block.dst_offset, block.dst_strides)


def check_blocks(layout: Layout) -> None:
    """LayoutError unless each block is nested on both sides and within bounds (blocks may still overlap)."""
    for b in layout.blocks:
        src_side(b)
        dst_side(b)
        if b.src_last >= layout.src_numel or b.dst_last >= layout.dst_numel:
            raise LayoutError(
                f"block {b.to_json()} reaches source {b.src_last} of {layout.src_numel} elements and destination "
                f"{b.dst_last} of {layout.dst_numel}."
            )


@njit
def _map_block(src: I64, shape: I64, src0: int, src_strides: I64, dst0: int, dst_strides: I64, out: I64) -> None:
    """Write the destination of every index that the block holds; leave the others alone."""
    d = shape.shape[0]
    for i in range(src.shape[0]):
        rest = src[i] - src0
        if rest < 0:
            continue
        dst = dst0
        for j in range(d):
            k = rest // src_strides[j]
            if k >= shape[j]:
                rest = np.int64(-1)
                break
            rest -= k * src_strides[j]
            dst += k * dst_strides[j]
        if rest == 0:
            out[i] = dst


def map_partial(layout: Layout, src: I64) -> I64:
    """Destination of each source index, −1 where the layout has none. Sorted input is fastest."""
    src = np.ascontiguousarray(src, np.int64)
    out = np.full(src.size, -1, np.int64)
    ordered = src.size < 2 or bool(np.all(src[1:] >= src[:-1]))
    for block in layout.blocks:
        n = block.normalised()
        src_side(n)  # nested, so that the digits below are unique
        lo, hi = 0, src.size
        if ordered:
            lo, hi = (int(x) for x in np.searchsorted(src, [n.src_offset, n.src_last + 1]))
        if lo < hi:
            _map_block(
                src[lo:hi],
                np.array(n.shape, np.int64),
                n.src_offset,
                np.array(n.src_strides, np.int64),
                n.dst_offset,
                np.array(n.dst_strides, np.int64),
                out[lo:hi],
            )
    return out


def map_indices(layout: Layout, src: I64) -> I64:
    """Destination of each source index; LayoutError if one is not covered."""
    out = map_partial(layout, src)
    if out.size and int(out.min()) < 0:
        missing = int(np.asarray(src)[np.argmax(out < 0)])
        raise LayoutError(f"source element {missing} is not covered by the layout.")
    return out


def owned_order(layout: Layout, start: int = 0, stop: int | None = None) -> I64:
    """Destination indices of source elements [start, stop) in source order, I64 [stop − start]."""
    return map_indices(layout, np.arange(start, layout.src_numel if stop is None else stop, dtype=np.int64))
