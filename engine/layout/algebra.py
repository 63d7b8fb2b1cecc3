"""Operations on layouts: JSON, mapping, inversion, composition, intersection, runs, owned order.

One invariant: every operation treats a layout as the set of its (source, destination) pairs, and its result holds
exactly the pairs it promises, each once. Nothing here allocates more than its caller's indices or the result's runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidInput, LayoutError
from engine.layout.blocks import Block, Layout
from engine.layout.cover import prove_disjoint, prove_exact_cover, validate_slice
from engine.layout.mapping import check_blocks, dst_side, map_indices, map_partial, owned_order, src_side
from engine.layout.meet import MAX_BLOCKS, meetings

__all__ = [
    "Runs",
    "check_blocks",
    "compose",
    "contiguous",
    "from_json",
    "identity",
    "intersect",
    "invert",
    "map_indices",
    "map_partial",
    "owned_order",
    "prove_disjoint",
    "prove_exact_cover",
    "runs",
    "scaled",
    "to_json",
    "validate_slice",
]

I64 = npt.NDArray[np.int64]

MAX_DIMS = 16
MAX_INDEX = 1 << 62


def identity(numel: int) -> Layout:
    """Every element maps to itself."""
    return contiguous(0, numel, numel)


def contiguous(offset: int, numel: int, dst_numel: int) -> Layout:
    """Source [0, numel) maps to destination [offset, offset + numel) of `dst_numel` elements."""
    if offset < 0 or numel < 0 or offset + numel > dst_numel:
        raise LayoutError(f"range [{offset}, {offset + numel}) does not lie in a tensor of {dst_numel} elements.")
    blocks = (Block((numel,), 0, (1,), offset, (1,)),) if numel else ()
    return Layout(blocks, numel, dst_numel)


def to_json(layout: Layout) -> list[list[object]]:
    """The block list as records and chunk headers hold it (the sizes of both sides travel beside it)."""
    return [b.to_json() for b in layout.blocks]


def _int(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < MAX_INDEX:
        raise LayoutError(f"{what} of a block must be an integer in [0, 2^62), not {str(value)[:40]!r}.")
    return value


def _ints(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_DIMS:
        raise LayoutError(f"{what} of a block must be a list of at most {MAX_DIMS} integers.")
    return tuple(_int(v, what) for v in value)


def from_json(blocks: object, src_numel: int, dst_numel: int) -> Layout:
    """Inverse of `to_json` for input nobody vouches for.

    LayoutError unless every block is well-formed, nested on both sides and inside [0, src_numel) × [0, dst_numel).
    """
    _int(src_numel, "source size")
    _int(dst_numel, "destination size")
    if not isinstance(blocks, list | tuple) or len(blocks) > MAX_BLOCKS:
        raise LayoutError(f"a block list must be a list of at most {MAX_BLOCKS} blocks.")
    parsed = []
    for raw in blocks:
        if not isinstance(raw, list | tuple) or len(raw) != 5:
            raise LayoutError("a block must be [shape, src_offset, src_strides, dst_offset, dst_strides].")
        parsed.append(
            Block(
                _ints(raw[0], "shape"),
                _int(raw[1], "src_offset"),
                _ints(raw[2], "src_strides"),
                _int(raw[3], "dst_offset"),
                _ints(raw[4], "dst_strides"),
            )
        )
    layout = Layout(tuple(parsed), src_numel, dst_numel)
    check_blocks(layout)
    return layout


def invert(layout: Layout) -> Layout:
    """Destination → source."""
    return Layout(tuple(b.swapped() for b in layout.blocks), layout.dst_numel, layout.src_numel)


def scaled(layout: Layout, k: int) -> Layout:
    """The same layout for elements that consist of `k` lanes each."""
    if k < 1:
        raise InvalidInput(f"an element has at least one lane, not {k}.")
    if k == 1:
        return layout

    def widen(b: Block) -> Block:
        return Block(
            (*b.shape, k),
            b.src_offset * k,
            (*(s * k for s in b.src_strides), 1),
            b.dst_offset * k,
            (*(s * k for s in b.dst_strides), 1),
        ).normalised()

    return Layout(tuple(widen(b) for b in layout.blocks), layout.src_numel * k, layout.dst_numel * k)


@dataclass(frozen=True, slots=True)
class Runs:
    """Arithmetic runs, I64 [R] each: pairs (src_start + k·src_stride, dst_start + k·dst_stride), 0 <= k < length."""

    src_start: I64
    dst_start: I64
    length: I64
    src_stride: I64
    dst_stride: I64


def runs(layout: Layout) -> Runs:
    """The layout as maximal runs sorted by source start. For a slice (dense source) every src_stride is 1."""
    columns: list[list[I64]] = [[], [], [], [], []]
    for block in layout.blocks:
        n = block.normalised()
        src, dst = np.array([n.src_offset], np.int64), np.array([n.dst_offset], np.int64)
        for size, s, d in zip(n.shape[:-1], n.src_strides[:-1], n.dst_strides[:-1], strict=True):
            k = np.arange(size, dtype=np.int64)
            src, dst = np.add.outer(src, k * s).reshape(-1), np.add.outer(dst, k * d).reshape(-1)
        inner = (n.shape[-1], n.src_strides[-1], n.dst_strides[-1])
        for column, values in zip(columns, (src, dst, *(np.full(src.size, x, np.int64) for x in inner)), strict=True):
            column.append(values)
    if not columns[0]:
        return Runs(*(np.empty(0, np.int64) for _ in range(5)))
    joined = [np.concatenate(c) for c in columns]
    order = np.argsort(joined[0], kind="stable")
    src, dst, length, ss, ds = (c[order] for c in joined)
    goes_on = (ss[1:] == ss[:-1]) & (ds[1:] == ds[:-1])
    goes_on &= (src[1:] == src[:-1] + length[:-1] * ss[:-1]) & (dst[1:] == dst[:-1] + length[:-1] * ds[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return Runs(src[first], dst[first], np.add.reduceat(length, first), ss[first], ds[first])


def compose(a: Layout, b: Layout) -> Layout:
    """First `a`, then `b`: source of a → destination of b, for the elements both hold."""
    if a.dst_numel != b.src_numel:
        raise LayoutError(f"cannot compose: the first layout ends in {a.dst_numel} elements, the second starts in "
                          f"{b.src_numel}.")  # fmt: skip
    right = [src_side(y) for y in b.blocks]
    blocks: list[Block] = []
    for x in a.blocks:
        left = dst_side(x)
        for lattice in right:
            for m in meetings(left, lattice):
                blocks.append(
                    Block(
                        tuple(d[0] for d in m.dims), m.a, tuple(d[2] for d in m.dims), m.b, tuple(d[3] for d in m.dims)
                    ).normalised()
                )
    blocks.sort(key=lambda k: k.src_offset)
    return Layout(tuple(blocks), a.src_numel, b.dst_numel)


def intersect(a: Layout, b: Layout) -> Layout:
    """For two layouts into the same destination: source of a → source of b, for the elements both hold."""
    return compose(a, invert(b))
