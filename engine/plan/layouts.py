"""Layouts as a plan compares them: each distinct one is normalised, checked, hashed and combined once.

One invariant: two layouts share a `Known` if and only if they are the same list of blocks, whatever order it came in,
so that what is computed for one layer of a model serves all layers like it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from engine.errors import LayoutError
from engine.layout.algebra import compose, intersect, invert, to_json
from engine.layout.blocks import Layout
from engine.layout.cover import prove_disjoint, validate_slice
from engine.layout.mapping import check_blocks, dst_side
from engine.layout.radix import Lattice


@dataclass(frozen=True, slots=True)
class Known:
    """A layout into a canonical tensor. `first`, `last`: lowest and highest canonical lane. `lanes`: how many it maps.

    `number` counts the distinct layouts of one `Shelf`; it says nothing outside.
    """

    number: int
    layout: Layout
    first: int
    last: int
    lanes: int


@dataclass(frozen=True, slots=True)
class Common:
    """What a slice and a receiver's tensor share: `layout` maps rank to local lane, of `lanes` lanes."""

    layout: Layout
    lanes: int


def lane_total(layout: Layout) -> int:
    """Pairs of a layout."""
    return sum(b.numel for b in layout.blocks)


def canonical_form(layout: Layout) -> Layout:
    """The same blocks with the fewest dimensions each, sorted by source."""
    blocks = sorted((b.normalised() for b in layout.blocks), key=lambda b: (b.src_offset, b.dst_offset))
    return Layout(tuple(blocks), layout.src_numel, layout.dst_numel)


@lru_cache(maxsize=1 << 16)
def layout_digest(layout: Layout) -> str:
    """SHA-256, in hex, of a layout in canonical form: sizes and blocks as compact JSON."""
    form = [layout.src_numel, layout.dst_numel, to_json(layout)]
    return hashlib.sha256(json.dumps(form, separators=(",", ":")).encode()).hexdigest()


class Shelf:
    """The layouts of one plan."""

    def __init__(self) -> None:
        self._by_given: dict[Layout, Known] = {}
        self._by_form: dict[Layout, Known] = {}
        self._common: dict[tuple[int, int], Common] = {}
        self._slices: set[int] = set()
        self._tensors: set[int] = set()

    def slice(self, layout: Layout, tensor: str) -> Known:
        """The layout of a slice: rank → canonical lane. LayoutError unless it covers all its ranks, each once."""
        known = self._known(layout)
        if known.number not in self._slices:
            validate_slice(known.layout, layout.src_numel, tensor=tensor)
            self._slices.add(known.number)
        return known

    def local(self, layout: Layout, tensor: str) -> Known:
        """The layout of a receiver's tensor. LayoutError if it maps a lane of either side twice, or out of bounds."""
        known = self._known(layout)
        if known.number not in self._tensors:
            check_blocks(known.layout)
            if len(known.layout.blocks) > 1:
                prove_disjoint([("the receiver", known.layout)], tensor=tensor)
                prove_disjoint([("the receiver", invert(known.layout))], tensor=f"local lanes of {tensor}")
            self._tensors.add(known.number)
        return known

    def common(self, held: Known, wanted: Known) -> Common:
        """What a slice and a receiver's tensor share."""
        key = (held.number, wanted.number)
        found = self._common.get(key)
        if found is None:
            layout = canonical_form(intersect(held.layout, wanted.layout))
            found = self._common[key] = Common(layout, lane_total(layout))
        return found

    def _known(self, layout: Layout) -> Known:
        known = self._by_given.get(layout)
        if known is None:
            form = canonical_form(layout)
            known = self._by_form.get(form)
            if known is None:
                first = min((b.dst_offset for b in form.blocks), default=0)
                last = max((b.dst_last for b in form.blocks), default=-1)
                known = Known(len(self._by_form), form, first, last, lane_total(form))
                self._by_form[form] = known
            self._by_given[layout] = known
        return known


def first_gap(held: list[Known], wanted: Known) -> tuple[int, int]:
    """The first canonical lanes [start, stop) of `wanted` that none of the disjoint `held` has; there must be some."""
    mine = _canonical_side(wanted.layout)
    theirs = [x for k in held for x in _canonical_side(compose(intersect(k.layout, wanted.layout), wanted.layout))]

    def wants(limit: int) -> int:
        return sum(x.count_below(limit) for x in mine)

    def has(limit: int) -> int:
        return sum(x.count_below(limit) for x in theirs)

    start = _last(lambda x: wants(x) == has(x), 0, wanted.last + 1)
    before_wanted, before_has = wants(start), has(start)
    stop = _last(
        lambda x: wants(x) - before_wanted == x - start and has(x) == before_has, start, wanted.last + 1, inclusive=True
    )
    return start, stop


def _canonical_side(layout: Layout) -> list[Lattice]:
    return [dst_side(b) for b in layout.blocks]


def _last(holds: Callable[[int], bool], lo: int, hi: int, *, inclusive: bool = False) -> int:
    """The highest index in [lo, hi) (with `inclusive`, hi too) for which the falling `holds` is true; it is at lo."""
    hi = hi + 1 if inclusive else hi
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if holds(mid):
            lo = mid
        else:
            hi = mid
    return lo


def first_overlap(a: Known, b: Known) -> tuple[int, int]:
    """The first canonical lanes [start, stop) that two layouts share; there must be some."""
    shared = _canonical_side(compose(intersect(a.layout, b.layout), b.layout))
    start = min(x.offset for x in shared)
    stop = _last(
        lambda x: sum(s.count_below(x) for s in shared) == x - start, start, max(x.last for x in shared) + 1,
        inclusive=True,
    )  # fmt: skip
    return start, stop


def misfit(tensor: str, who: str, layout: Layout, lanes: int) -> LayoutError:
    """What is said of a layout that describes a tensor of another size."""
    return LayoutError(
        f"{tensor}: {who} describes a tensor of {layout.dst_numel} lanes, it has {lanes}.",
        remedy="Both sides must publish and hold the tensor in the same shape and dtype.",
    )
