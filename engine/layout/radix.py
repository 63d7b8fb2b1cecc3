"""Rectangles in mixed-radix digits: the arithmetic under intersect, compose and the cover proof.

One side of a block is a *lattice*: offset + Σ k_j·stride_j with *nested* strides (each stride exceeds the span of all
smaller ones). When the strides of several lattices divide each other, every index has one common digit representation
and each lattice is a few boxes in it; boxes intersect digit by digit.

One invariant: the boxes of a lattice are disjoint and together hold exactly its elements, so no function here ever
needs an index array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from engine.errors import LayoutError

MAX_BOXES = 1 << 12
"""Boxes one lattice may fall into; real layouts need fewer than ten."""


@dataclass(frozen=True, slots=True)
class Lattice:
    """One side of a block: `dims` = (size, stride, carried stride) by falling stride; `carried` is the other side.

    Element k has index offset + Σ k_j·stride_j here and carried_offset + Σ k_j·carried_stride_j there.
    """

    offset: int
    carried_offset: int
    dims: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(
        shape: Sequence[int], offset: int, strides: Sequence[int], carried_offset: int, carried: Sequence[int]
    ) -> Lattice:
        """Build from one block's numbers; LayoutError if the strides are not nested (then indices could repeat)."""
        dims = sorted((d for d in zip(shape, strides, carried, strict=True) if d[0] > 1), key=lambda d: -d[1])
        span = 0
        for n, stride, _ in reversed(dims):
            if stride <= span:
                raise LayoutError(
                    f"strides {tuple(strides)} of a block of shape {tuple(shape)} are not nested: "
                    f"stride {stride} does not exceed the {span} elements the inner dimensions span.",
                    remedy="Split the block so that each stride exceeds the span of all smaller ones.",
                )
            span += (n - 1) * stride
        return Lattice(offset, carried_offset, tuple(dims))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(d[0] for d in self.dims)

    @property
    def last(self) -> int:
        """The highest index."""
        return self.offset + sum((n - 1) * s for n, s, _ in self.dims)

    def count_below(self, limit: int) -> int:
        """Number of elements with an index below `limit`."""
        rest, total = limit - self.offset, 0
        inner, span = self.numel, self.last - self.offset
        for n, stride, _ in self.dims:
            inner //= n
            span -= (n - 1) * stride
            whole = min(n, max(0, (rest - span - 1) // stride + 1))  # rows that end below the limit
            total += whole * inner
            if whole == n or rest <= 0:
                return total
            rest -= whole * stride
        return total + (1 if rest > 0 else 0)

    def nth(self, number: int) -> int:
        """Index of element `number` counted in rising order."""
        index, inner = self.offset, self.numel
        for n, stride, _ in self.dims:
            inner //= n
            k, number = divmod(number, inner)
            index += k * stride
        return index


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of digits: level j holds digits [lo, hi); `carried` is the other side's index of the lowest corner
    and `steps[j]` what one digit more adds to it."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]
    carried: int
    steps: tuple[int, ...]


def common_levels(lattices: Iterable[Lattice]) -> tuple[int, ...] | None:
    """Rising strides [1, …] that all lattices share as digit weights, or None if they do not divide each other."""
    levels = sorted({1}.union(*({s for _, s, _ in lat.dims} for lat in lattices)))
    if any(b % a for a, b in pairwise(levels)):
        return None
    return tuple(levels)


def boxes(lattice: Lattice, levels: tuple[int, ...]) -> list[Box]:
    """Cut a lattice into boxes of the digit system `levels` (as `common_levels` returns it)."""
    own = {s: (n, carried) for n, s, carried in lattice.dims}
    out: list[Box] = []
    # (level, offset in units of it, dimension carried up from the level below, corner, digits so far)
    todo: list[tuple[int, int, tuple[int, int] | None, int, list[tuple[int, int, int]]]] = [
        (0, lattice.offset, None, lattice.carried_offset, [])
    ]
    while todo:
        level, q, extra, corner, digits = todo.pop()
        n, step = own.get(levels[level]) or extra or (1, 0)
        if level == len(levels) - 1:
            digits = [*digits, (q, q + n, step)]
            lo_hi_steps = list(zip(*digits, strict=True))
            out.append(Box(lo_hi_steps[0], lo_hi_steps[1], corner, lo_hi_steps[2]))
            if len(out) > MAX_BOXES:
                raise LayoutError(f"a block falls into more than {MAX_BOXES} pieces: {lattice}.")
            continue
        radix = levels[level + 1] // levels[level]
        above, lo = divmod(q, radix)
        rows, tail = divmod(lo + n, radix)
        if lo and rows:  # the first row starts inside
            todo.append((level + 1, above, None, corner, [*digits, (lo, radix, step)]))
        first = 1 if lo else 0
        if rows > first:  # whole rows become a dimension of the next level
            up = (rows - first, step * radix)
            start = corner + (first * radix - lo) * step
            todo.append((level + 1, above + first, up if up[0] > 1 else None, start, [*digits, (0, radix, step)]))
        if tail:
            begin = lo if not rows else 0
            start = corner + (rows * radix + begin - lo) * step
            todo.append((level + 1, above + rows, None, start, [*digits, (begin, tail, step)]))
    return out


@dataclass(frozen=True, slots=True)
class Meeting:
    """Elements common to two lattices: `index` of the lowest on the shared side, its carried indices on both other
    sides, and per dimension (size, shared stride, first carried stride, second carried stride)."""

    index: int
    a: int
    b: int
    dims: tuple[tuple[int, int, int, int], ...]


def meet_boxes(a: Box, b: Box, levels: tuple[int, ...]) -> Meeting | None:
    """The intersection of two boxes of the same digit system, or None if they share nothing."""
    index, at_a, at_b = 0, a.carried, b.carried
    dims: list[tuple[int, int, int, int]] = []
    for weight, alo, ahi, astep, blo, bhi, bstep in zip(levels, a.lo, a.hi, a.steps, b.lo, b.hi, b.steps, strict=True):
        lo, hi = max(alo, blo), min(ahi, bhi)
        if lo >= hi:
            return None
        index += lo * weight
        at_a += (lo - alo) * astep
        at_b += (lo - blo) * bstep
        if hi - lo > 1:
            dims.append((hi - lo, weight, astep, bstep))
    return Meeting(index, at_a, at_b, tuple(dims))
