"""Layouts as a plan compares them: each distinct one is normalised, checked, hashed and combined once.

One invariant: two layouts share a `Known` if and only if they are the same list of blocks, whatever order it came in,
so that what is computed for one layer of a model serves all layers like it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.errors import LayoutError
from engine.layout.algebra import invert, to_json
from engine.layout.blocks import Block, Layout
from engine.layout.cover import prove_disjoint, validate_slice
from engine.layout.mapping import check_blocks, dst_side
from engine.layout.meet import meetings
from engine.layout.radix import Lattice


@dataclass(frozen=True, slots=True)
class Known:
    """A layout into a canonical tensor. `first`, `last`: lowest and highest canonical lane. `lanes`: how many it maps.

    `number` counts the distinct layouts of one `Shelf`; it says nothing outside. `lattices`: the canonical side of each
    block.
    """

    number: int
    layout: Layout
    first: int
    last: int
    lanes: int
    lattices: tuple[Lattice, ...] = field(repr=False)
    sha256: str = field(repr=False)

    @staticmethod
    def of(number: int, form: Layout) -> Known:
        """Of a layout in canonical form."""
        check_blocks(form)
        lattices = tuple(dst_side(b) for b in form.blocks)
        first, last = min((x.offset for x in lattices), default=0), max((x.last for x in lattices), default=-1)
        return Known(number, form, first, last, lane_total(form), lattices, layout_digest(form))


@dataclass(frozen=True, slots=True)
class Common:
    """What a slice and a receiver's tensor share: `layout` maps rank to local lane, of `lanes` lanes."""

    layout: Layout
    lanes: int
    sha256: str = field(repr=False)


def lane_total(layout: Layout) -> int:
    """Pairs of a layout."""
    return sum(b.numel for b in layout.blocks)


def canonical_form(layout: Layout) -> Layout:
    """The same blocks with the fewest dimensions each, sorted by source."""
    blocks = sorted((b.normalised() for b in layout.blocks), key=lambda b: (b.src_offset, b.dst_offset))
    return Layout(tuple(blocks), layout.src_numel, layout.dst_numel)


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
            layout = _meet(held, wanted)
            found = self._common[key] = Common(layout, lane_total(layout), layout_digest(layout))
        return found

    def _known(self, layout: Layout) -> Known:
        known = self._by_given.get(layout)
        if known is None:
            form = canonical_form(layout)
            known = self._by_form.get(form)
            if known is None:
                known = Known.of(len(self._by_form), form)
                self._by_form[form] = known
            self._by_given[layout] = known
        return known


def _meet(held: Known, wanted: Known) -> Layout:
    """`intersect` of the two, in canonical form."""
    blocks = [
        Block(tuple(d[0] for d in m.dims), m.a, tuple(d[2] for d in m.dims), m.b, tuple(d[3] for d in m.dims))
        for x in held.lattices
        for y in wanted.lattices
        for m in meetings(x, y)
    ]
    return canonical_form(Layout(tuple(blocks), held.layout.src_numel, wanted.layout.src_numel))


def _shared(a: Known, b: Known) -> list[Lattice]:
    """The canonical lanes that both hold."""
    met = [m for x in a.lattices for y in b.lattices for m in meetings(x, y)]
    return [Lattice(m.index, m.a, tuple(d[:3] for d in sorted(m.dims, key=lambda d: -d[1]))) for m in met]


def _below(lattices: Sequence[Lattice], limit: int) -> int:
    return sum(x.count_below(limit) for x in lattices)


def _last(holds: Callable[[int], bool], lo: int, hi: int) -> int:
    """The highest index in [lo, hi] for which `holds` is true; it is true at lo, and false once it has been false."""
    hi += 1
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if holds(mid):
            lo = mid
        else:
            hi = mid
    return lo


def first_gap(held: Sequence[Known], wanted: Known) -> tuple[int, int]:
    """The first canonical lanes [start, stop) of `wanted` that none of the disjoint `held` has; there must be some."""
    mine, theirs = wanted.lattices, [x for k in held for x in _shared(k, wanted)]
    start = _last(lambda x: _below(mine, x) == _below(theirs, x), 0, wanted.last)
    wanted_before, held_before = _below(mine, start), _below(theirs, start)
    stop = _last(
        lambda x: _below(mine, x) - wanted_before == x - start and _below(theirs, x) == held_before,
        start, wanted.last + 1,
    )  # fmt: skip
    return start, stop


def first_overlap(a: Known, b: Known) -> tuple[int, int]:
    """The first canonical lanes [start, stop) that two layouts share; there must be some."""
    shared = _shared(a, b)
    start, end = min(x.offset for x in shared), max(x.last for x in shared) + 1
    return start, _last(lambda x: _below(shared, x) == x - start, start, end)


def misfit(tensor: str, who: str, layout: Layout, lanes: int) -> LayoutError:
    """What is said of a layout that describes a tensor of another size."""
    return LayoutError(
        f"{tensor}: {who} describes a tensor of {layout.dst_numel} lanes, it has {lanes}.",
        remedy="Both sides must publish and hold the tensor in the same shape and dtype.",
    )
