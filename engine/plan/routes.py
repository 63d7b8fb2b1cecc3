"""`Route`: a part's layout made ready once, so that following it costs little however few lanes a version changes.

One invariant: a route gives exactly what its layout says, by rank. Work is O(ranks between the layout's first and
last), memory O(ranks found).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.jit import njit
from engine.layout.blocks import TILE_LANES, Block, Layout
from engine.layout.mapping import src_side
from engine.layout.radix import Lattice

I64 = npt.NDArray[np.int64]


@njit
def _follow(ranks: I64, src0: int, dst0: int, dims: I64, places: I64, local: I64) -> int:
    """Count the rising `ranks` (none below `src0`) that a block holds; note place and lane of each where there is room.

    `dims` [D, 3]: size, source stride and destination stride, by falling source stride.
    """
    found = 0
    room = places.shape[0]
    depth = dims.shape[0]
    size, stride, step = dims[0, 0], dims[0, 1], dims[0, 2]
    row = 0  # outermost digit of the rank before, and where its row starts: rising ranks seldom leave it
    start = 0
    for i in range(ranks.shape[0]):
        rest = ranks[i] - src0 - start
        if rest >= stride:
            more = rest // stride
            row += more
            start += more * stride
            rest -= more * stride
        if row >= size:
            break
        lane = dst0 + row * step
        for j in range(1, depth):
            inner = dims[j, 1]
            digit = rest if inner == 1 else rest // inner
            if digit >= dims[j, 0]:
                rest = np.int64(1)
                break
            rest -= digit * inner
            lane += digit * dims[j, 2]
        if rest == 0:
            if found < room:
                places[found] = i
                local[found] = lane
            found += 1
    return found


class _Leg(NamedTuple):
    """One block: `first` and `stop` rank, `lane` of the first, `dims` as `_follow` takes them, `side` to count by.
    `run`: both sides are contiguous."""

    first: int
    stop: int
    lane: int
    dims: I64
    side: Lattice
    run: bool


def _leg(block: Block) -> _Leg:
    b = block.normalised()
    return _Leg(
        first=b.src_offset,
        stop=b.src_last + 1,
        lane=b.dst_offset,
        dims=np.array([b.shape, b.src_strides, b.dst_strides], np.int64).T.copy(),
        side=src_side(b),
        run=b.src_strides == (1,) and b.dst_strides == (1,),
    )


_NONE: I64 = np.empty(0, np.int64)


class Route:
    """From ranks of a slice to lanes of the receiver's tensor. LayoutError if strides of the layout are not nested."""

    def __init__(self, layout: Layout) -> None:
        self._legs = [_leg(block) for block in layout.blocks]
        self._firsts = np.array([[leg.first, leg.stop] for leg in self._legs], np.int64).reshape(-1, 2)

    def count(self, ranks: I64) -> int:
        """How many of `ranks`, I64 strictly rising, the receiver has."""
        found = 0
        for leg, (lo, hi) in zip(self._legs, self._bounds(ranks), strict=True):
            found += hi - lo if leg.run else _follow(ranks[lo:hi], leg.first, leg.lane, leg.dims, _NONE, _NONE)
        return found

    def select(self, ranks: I64) -> tuple[I64 | slice, I64]:
        """(places in `ranks`, lanes) of those that the receiver has, by rank; `ranks` I64 strictly rising."""
        if len(self._legs) == 1 and (leg := self._legs[0]).run:
            ((lo, hi),) = self._bounds(ranks)
            return slice(lo, hi), ranks[lo:hi] + (leg.lane - leg.first)
        found = [_selected(leg, ranks, lo, hi) for leg, (lo, hi) in zip(self._legs, self._bounds(ranks), strict=True)]
        if len(found) == 1:
            return found[0]
        places = np.concatenate([_NONE, *(p for p, _ in found)])
        local = np.concatenate([_NONE, *(at for _, at in found)])
        if not bool(np.all(places[1:] > places[:-1])):
            order = np.argsort(places, kind="stable")
            places, local = places[order], local[order]
        return places, local

    def reached(self, tiles: I64) -> I64:
        """Lanes of each tile of the slice that the receiver has, I64 of the length of `tiles`."""
        sides = [leg.side for leg in self._legs]
        return np.array(
            [
                sum(s.count_below((t + 1) * TILE_LANES) - s.count_below(t * TILE_LANES) for s in sides)
                for t in tiles.tolist()
            ],
            np.int64,
        )

    def _bounds(self, ranks: I64) -> list[list[int]]:
        """For each leg where in `ranks` its first is, and its last ends."""
        return np.searchsorted(ranks, self._firsts).tolist()  # type: ignore[no-any-return]


def _selected(leg: _Leg, ranks: I64, lo: int, hi: int) -> tuple[I64, I64]:
    if leg.run:
        return np.arange(lo, hi, dtype=np.int64), ranks[lo:hi] + (leg.lane - leg.first)
    places, local = np.empty((2, hi - lo), np.int64)
    n = _follow(ranks[lo:hi], leg.first, leg.lane, leg.dims, places, local)
    return places[:n] + lo, local[:n]
