"""The one shape that rule tables need: a rectangle of a canonical tensor that lies, strided, in a local one.

One invariant: a `Local` holds no element twice, and everything put into it lies inside it; `done` proves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from engine.errors import LayoutError
from engine.layout.algebra import prove_disjoint
from engine.layout.blocks import Block, Layout
from engine.layout.mapping import check_blocks
from engine.layout.placement import Placement, numel_of
from engine.records.models import TensorMeta

Range = tuple[int, int]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


@dataclass
class Local:
    """A local parameter being described, contiguous with `shape`."""

    name: str
    shape: tuple[int, ...]
    placements: list[Placement] = field(default_factory=list)

    def put(self, meta: TensorMeta, ranges: Sequence[Range], corner: Sequence[int]) -> None:
        """Canonical elements `ranges` (first, after last; one a dimension) lie here from `corner` on.

        The canonical dimensions are the last ones of the local tensor; leading canonical ones may be absent here only
        as an index in `corner`. An empty range puts nothing.
        """
        if len(ranges) != len(meta.shape) or len(corner) != len(self.shape) or len(ranges) > len(corner):
            raise LayoutError(f"{self.name!r}: {meta.name!r} does not have the dimensions expected of it.")
        inside = zip(ranges, meta.shape, corner[-len(ranges) :], self.shape[-len(ranges) :], strict=True)
        for (lo, hi), canonical, at, local in inside:
            if not 0 <= lo <= hi <= canonical or at < 0 or at + hi - lo > local:
                raise LayoutError(f"{self.name!r} {list(self.shape)} has no room for {ranges} of {meta.name!r}.")
        size = tuple(hi - lo for lo, hi in ranges)
        if not prod(size):
            return
        here, there = row_major(self.shape), row_major(meta.shape)
        block = Block(
            size,
            sum(at * step for at, step in zip(corner, here, strict=True)),
            here[-len(size) :],
            sum(lo * step for (lo, _), step in zip(ranges, there, strict=True)),
            there,
        ).normalised()
        self.placements.append(Placement(meta, Layout((block,), prod(self.shape), numel_of(meta))))

    def done(self) -> list[Placement]:
        """The placements; LayoutError if two share a local element. One for each canonical tensor and local region."""
        layouts = [p.layout for p in self.placements]
        for layout in layouts:
            check_blocks(layout)
        inverse = [Layout(tuple(b.swapped() for b in x.blocks), x.dst_numel, x.src_numel) for x in layouts]
        prove_disjoint([(p.tensor.name, x) for p, x in zip(self.placements, inverse, strict=True)], tensor=self.name)
        return merged(self.placements)


def merged(placements: Sequence[Placement]) -> list[Placement]:
    """Placements of one canonical tensor joined where they repeat none of its elements; replicas stay apart."""
    kept: dict[str, list[Placement]] = {}
    for placement in placements:
        copies = kept.setdefault(placement.tensor.name, [])
        for at, other in enumerate(copies):
            blocks = sorted((*other.layout.blocks, *placement.layout.blocks), key=lambda b: b.src_offset)
            joined = Layout(tuple(blocks), other.layout.src_numel, other.layout.dst_numel)
            try:
                prove_disjoint([("", joined)])
            except LayoutError:
                continue  # a replica
            copies[at] = Placement(placement.tensor, joined)
            break
        else:
            copies.append(placement)
    return [p for copies in kept.values() for p in copies]
