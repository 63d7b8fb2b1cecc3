"""What two lattices have in common, as affine pieces.

One invariant: the meetings of two lattices are disjoint and hold exactly their common elements.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.errors import LayoutError
from engine.layout.blocks import Block, Layout
from engine.layout.mapping import map_indices, map_partial, owned_order
from engine.layout.radix import Lattice, Meeting, boxes, common_levels, meet_boxes

I64 = npt.NDArray[np.int64]

MAX_BLOCKS = 1 << 14
"""Blocks a layout may have."""
_IRREGULAR_LIMIT = 1 << 26  # elements that may be walked one by one when strides do not divide each other
_WALK = 1 << 20
_RUNS_LIMIT = 1 << 10  # runs by which a lattice may be cut


def meetings(a: Lattice, b: Lattice) -> list[Meeting]:
    """All pieces that `a` and `b` share. LayoutError if their shapes are too irregular to combine."""
    if a.last < b.offset or b.last < a.offset:
        return []
    levels = common_levels((a, b))
    if levels is None:
        met = _by_runs(a, b)
        return _irregular(a, b) if met is None else met
    right = boxes(b, levels)
    found = (meet_boxes(x, y, levels) for x in boxes(a, levels) for y in right)
    return [m for m in found if m is not None]


def _cut(lattice: Lattice, lo: int, hi: int) -> list[Lattice]:
    """The elements with an index in [lo, hi), as at most two lattices a dimension and one more."""
    if lattice.last < lo or lattice.offset >= hi:
        return []
    if lattice.offset >= lo and lattice.last < hi:
        return [lattice]
    (n, stride, carried), *inner = lattice.dims
    span = lattice.last - lattice.offset - (n - 1) * stride
    first = min(n, max(0, -(-(lo - lattice.offset) // stride)))  # rows from here on start inside
    stop = min(n, max(0, (hi - 1 - span - lattice.offset) // stride + 1))  # rows before this end inside

    def rows(k: int, count: int) -> Lattice:
        outer = ((count, stride, carried),) if count > 1 else ()
        return Lattice(lattice.offset + k * stride, lattice.carried_offset + k * carried, (*outer, *inner))

    out = [rows(first, stop - first)] if first < stop else []
    for k in sorted({first - 1, stop}):  # rows that reach across an end
        if 0 <= k < n:
            out += _cut(rows(k, 1), lo, hi)
    return out


def _run_of(lattice: Lattice) -> tuple[int, int]:
    """(length, carried stride) of the innermost run of neighbouring indices."""
    n, stride, carried = lattice.dims[-1] if lattice.dims else (1, 1, 1)
    return (n, carried) if stride == 1 else (1, 1)


def _by_runs(a: Lattice, b: Lattice) -> list[Meeting] | None:
    """Common elements if one side is a few runs, by which the other one is cut; None if neither is.

    Strides need not divide each other then.
    """
    runs_a, runs_b = (x.numel // _run_of(x)[0] for x in (a, b))
    if min(runs_a, runs_b) > _RUNS_LIMIT:
        return None
    if runs_a < runs_b:
        return [Meeting(m.index, m.b, m.a, tuple((n, s, y, x) for n, s, x, y in m.dims)) for m in _by_runs(b, a) or ()]
    length, carried = _run_of(b)
    outer = b.dims[:-1] if length > 1 else b.dims
    starts = [(b.offset, b.carried_offset)]
    for n, stride, step in outer:
        starts = [(at + k * stride, there + k * step) for at, there in starts for k in range(n)]
    return [
        Meeting(
            x.offset, x.carried_offset, there + (x.offset - at) * carried,
            tuple((n, stride, step, stride * carried) for n, stride, step in reversed(x.dims)),
        )
        for at, there in starts
        for x in _cut(a, at, at + length)
    ]  # fmt: skip


def _lattice_layout(lattice: Lattice) -> Layout:
    block = Block(
        tuple(d[0] for d in lattice.dims),
        lattice.offset,
        tuple(d[1] for d in lattice.dims),
        lattice.carried_offset,
        tuple(d[2] for d in lattice.dims),
    )
    return Layout((block,), block.src_last + 1, block.dst_last + 1)


def _irregular(a: Lattice, b: Lattice) -> list[Meeting]:
    """Common elements of lattices whose strides do not divide each other, found by walking the smaller one."""
    if a.numel > b.numel:
        return [Meeting(m.index, m.b, m.a, tuple((n, s, y, x) for n, s, x, y in m.dims)) for m in _irregular(b, a)]
    if a.numel > _IRREGULAR_LIMIT:
        raise LayoutError(
            f"layouts with strides {[d[1] for d in a.dims]} and {[d[1] for d in b.dims]} are too irregular to combine.",
            remedy="Describe both in the rows and columns of the canonical tensor.",
        )
    counting, inner = [], 1
    for n, s, _ in reversed(a.dims):  # number of the element → its index
        counting.append((n, inner, s))
        inner *= n
    dims = counting[::-1]
    by_number = _lattice_layout(Lattice(0, a.offset, tuple(dims)))
    forward_a, forward_b = _lattice_layout(a), _lattice_layout(b)
    out: list[Meeting] = []
    for start in range(0, a.numel, _WALK):
        index = owned_order(by_number, start, min(a.numel, start + _WALK))
        at_b = map_partial(forward_b, index)
        index, at_b = index[at_b >= 0], at_b[at_b >= 0]
        at_a = map_indices(forward_a, index)
        for lo, hi in _progressions(np.stack([index, at_a, at_b])):
            steps = (0, 0, 0)
            if hi - lo > 1:
                steps = tuple(int(c[lo + 1] - c[lo]) for c in (index, at_a, at_b))  # type: ignore[assignment]
            split = hi - lo > 1 and min(steps) < 0  # strides may not be negative: such elements stay single
            for k in range(lo, hi) if split else (lo,):
                inner_dims = () if split or hi - lo == 1 else ((hi - lo, *steps),)
                out.append(Meeting(int(index[k]), int(at_a[k]), int(at_b[k]), inner_dims))
            if len(out) > MAX_BLOCKS:
                raise LayoutError(f"combining two layouts needs more than {MAX_BLOCKS} blocks.")
    return out


def _progressions(points: I64) -> list[tuple[int, int]]:
    """Cut columns of `points` [3, n] greedily into ranges along which all rows advance by constant steps."""
    n = points.shape[1]
    steps = np.diff(points, axis=1)
    turns = np.flatnonzero(np.any(steps[:, 1:] != steps[:, :-1], axis=0)) + 1  # step k differs from step k − 1
    out, lo = [], 0
    for t in [*turns.tolist(), n - 1]:
        if t >= lo and n:
            out.append((lo, min(t + 1, n)))
            lo = t + 1
    return out
