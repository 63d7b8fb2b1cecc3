"""Which canonical tensors lie in a flat range of a local parameter, as a distributed optimizer's rank owns it.

One invariant: runs are disjoint and sorted, hold exactly the range's elements that have a canonical place, and no two
neighbours of one canonical tensor could be one run. The cost grows with the number of runs, not of elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from engine.errors import LayoutError
from engine.layout.blocks import Block, Layout
from engine.layout.placement import Placement, numel_of
from engine.records.models import TensorMeta


@dataclass(frozen=True)
class Run:
    """Local elements [start, start + numel), in flat memory order, all of one canonical tensor.

    `layout` maps element k of the run, 0 ≤ k < numel, to the tensor's flat index.
    """

    tensor: TensorMeta
    start: int
    numel: int
    layout: Layout


@dataclass(frozen=True)
class _Chunk:
    """Contiguous local elements from `start` on; the blocks' source offsets count from there."""

    start: int
    numel: int
    blocks: tuple[Block, ...]


def restrict(placements: Sequence[Placement], start: int, stop: int) -> list[Run]:
    """The runs of local elements [start, stop), in order.

    `placements`: of one local parameter, as `MegatronTable.placements` gives them. LayoutError if the range does not
    lie in the parameter.
    """
    if not 0 <= start <= stop or any(stop > p.layout.src_numel for p in placements):
        raise LayoutError(f"[{start}, {stop}) is not a range of the parameter.", remedy="Count in its own elements.")
    out: list[Run] = []
    for p in placements if start < stop else ():
        chunks = sorted((c for b in p.layout.blocks for c in _chunks(b, start, stop)), key=lambda c: c.start)
        out.extend(
            Run(p.tensor, c.start, c.numel, Layout(c.blocks, c.numel, numel_of(p.tensor))) for c in _joined(chunks)
        )
    return sorted(out, key=lambda r: r.start)


def _chunks(block: Block, start: int, stop: int) -> Iterator[_Chunk]:
    """The stretches of [start, stop) that a block fills without holes."""
    b = block.normalised()
    dims = len(b.shape)
    size = 1
    while dims and b.src_strides[dims - 1] == size:
        dims -= 1
        size *= b.shape[dims]
    inner, onto = b.shape[dims:], b.dst_strides[dims:]
    src, dst = np.array([b.src_offset], np.int64), np.array([b.dst_offset], np.int64)
    for n, s, t in zip(b.shape[:dims], b.src_strides[:dims], b.dst_strides[:dims], strict=True):
        k = np.arange(n, dtype=np.int64)
        src, dst = np.add.outer(src, k * s).reshape(-1), np.add.outer(dst, k * t).reshape(-1)
    meets = (src < stop) & (src + size > start)
    for at, to in zip(src[meets].tolist(), dst[meets].tolist(), strict=True):
        lo, hi = max(start - at, 0), min(stop - at, size)
        yield _Chunk(at + lo, hi - lo, tuple(_slice(inner, onto, lo, hi, 0, to)))


def _slice(shape: tuple[int, ...], strides: tuple[int, ...], lo: int, hi: int, at: int, to: int) -> Iterator[Block]:
    """Elements [lo, hi) in row-major order of a rectangle with canonical `strides` whose first element is `to`."""
    if len(shape) < 2:
        step = strides[0] if strides else 1
        yield Block((hi - lo,), at, (1,), to + lo * step, (step,))
        return
    row = prod(shape[1:])
    first, head = divmod(lo, row)
    last, tail = divmod(hi, row)
    if head:
        end = row if last > first else tail
        yield from _slice(shape[1:], strides[1:], head, end, at, to + first * strides[0])
        if last == first:
            return
        at += end - head
        first += 1
    if last > first:
        steps = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
        yield Block((last - first, *shape[1:]), at, steps, to + first * strides[0], strides).normalised()
        at += (last - first) * row
    if tail:
        yield from _slice(shape[1:], strides[1:], 0, tail, at, to + last * strides[0])


def _joined(chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """Chunks that follow each other without a hole become one."""
    out: list[_Chunk] = []
    parts: list[Block] = []
    start = end = -1
    for c in chunks:
        if c.start != end:
            if parts:
                out.append(_Chunk(start, end - start, tuple(parts)))
            start, parts = c.start, []
        for b in c.blocks:
            moved = Block(b.shape, b.src_offset + c.start - start, b.src_strides, b.dst_offset, b.dst_strides)
            if parts and (longer := _continued(parts[-1], moved)):
                parts[-1] = longer
            else:
                parts.append(moved)
        end = c.start + c.numel
    if parts:
        out.append(_Chunk(start, end - start, tuple(parts)))
    return out


def _continued(a: Block, b: Block) -> Block | None:
    """Both as one block where they are stretches of one dimension, the second continuing the first."""
    if len(a.shape) == len(b.shape) == 1 and a.dst_strides == b.dst_strides and a.src_strides == b.src_strides:
        n = a.shape[0]
        if (b.src_offset, b.dst_offset) == (a.src_offset + n * a.src_strides[0], a.dst_offset + n * a.dst_strides[0]):
            return Block((n + b.shape[0],), a.src_offset, a.src_strides, a.dst_offset, a.dst_strides)
    return None
