"""The proof that slices cover a canonical tensor exactly: every element has one owner.

One invariant: success means every index in [0, numel) is held by exactly one block of exactly one owner. The proof
works on boxes and counts, never on an index array, so its cost does not grow with the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import LayoutError
from engine.layout.blocks import Layout
from engine.layout.mapping import check_blocks, dst_side
from engine.layout.meet import meetings
from engine.layout.radix import Lattice, Meeting, boxes, common_levels


@dataclass(frozen=True, slots=True)
class _Piece:
    owner: str
    lattice: Lattice


def _pieces(layouts: Sequence[tuple[str, Layout]]) -> list[_Piece]:
    out: list[_Piece] = []
    for owner, layout in layouts:
        out.extend(_Piece(owner, dst_side(b)) for b in layout.blocks)
    out.sort(key=lambda p: p.lattice.offset)
    return out


def _range_of(m: Meeting) -> str:
    run = next((n for n, stride, _, _ in m.dims if stride == 1), 1)
    return f"[{m.index}, {m.index + run})"


def _overlap(tensor: str, x: _Piece, y: _Piece, m: Meeting) -> LayoutError:
    owners = f"{x.owner} and {y.owner}" if x.owner != y.owner else f"two blocks of {x.owner}"
    return LayoutError(
        f"{tensor or 'tensor'}: elements {_range_of(m)} belong to both {owners}.",
        remedy="Exactly one rank may own each element: leave replicas out of the registration.",
    )


def _pairs_by_range(pieces: list[_Piece], last: list[int]) -> list[tuple[int, int]]:
    """Pairs whose index ranges overlap; `pieces` sorted by offset."""
    out: list[tuple[int, int]] = []
    active: list[int] = []
    for j, p in enumerate(pieces):
        active = [i for i in active if last[i] >= p.lattice.offset]
        out.extend((i, j) for i in active)
        active.append(j)
    return out


def _first_overlap_regular(pieces: list[_Piece], levels: tuple[int, ...]) -> tuple[int, int] | None:
    """A pair of pieces that share an element, by comparing the digit boxes of all pieces at once."""
    cut = [(i, b) for i, p in enumerate(pieces) for b in boxes(p.lattice, levels)]
    weight = [int(w) for w in levels]
    cut.sort(key=lambda ib: sum(d * w for d, w in zip(ib[1].lo, weight, strict=True)))
    first = np.array([sum(d * w for d, w in zip(b.lo, weight, strict=True)) for _, b in cut], np.int64)
    last = np.array([sum((d - 1) * w for d, w in zip(b.hi, weight, strict=True)) for _, b in cut], np.int64)
    lo = np.array([b.lo for _, b in cut], np.int64)
    hi = np.array([b.hi for _, b in cut], np.int64)
    reach = np.searchsorted(first, last, side="right")  # boxes that start before this one ends
    for i in np.flatnonzero(reach > np.arange(len(cut)) + 1).tolist():
        rest = slice(i + 1, int(reach[i]))
        hit = np.all((lo[rest] < hi[i]) & (lo[i] < hi[rest]), axis=1)
        if hit.any():
            return cut[i][0], cut[i + 1 + int(np.argmax(hit))][0]
    return None


def _prove_disjoint(tensor: str, pieces: list[_Piece]) -> None:
    last = [p.lattice.last for p in pieces]
    if all(b.lattice.offset > a for a, b in zip(last, pieces[1:], strict=False)):
        return  # ranges one after the other
    levels = common_levels(p.lattice for p in pieces)
    if levels is not None:
        pair = _first_overlap_regular(pieces, levels)
        pairs = [] if pair is None else [pair]
    else:
        pairs = _pairs_by_range(pieces, last)
    for i, j in pairs:
        met = meetings(pieces[i].lattice, pieces[j].lattice)
        if met:
            raise _overlap(tensor, pieces[i], pieces[j], min(met, key=lambda m: m.index))


def prove_disjoint(layouts: Sequence[tuple[str, Layout]], *, tensor: str = "") -> None:
    """LayoutError naming tensor, range and owners if two blocks share a destination element."""
    _prove_disjoint(tensor, _pieces(layouts))


def prove_exact_cover(dst_numel: int, layouts: Sequence[tuple[str, Layout]], *, tensor: str = "") -> None:
    """Prove that every element of [0, dst_numel) is a destination of exactly one of the layouts.

    `layouts`: (owner label, layout into the tensor). LayoutError names the tensor, the range and the owners of the
    first overlap found, or the first gap and who owns its neighbours.
    """
    for owner, layout in layouts:
        if layout.dst_numel != dst_numel:
            raise LayoutError(
                f"{tensor or 'tensor'}: {owner} describes a tensor of {layout.dst_numel} elements, it has {dst_numel}."
            )
        check_blocks(layout)
    pieces = _pieces(layouts)
    _prove_disjoint(tensor, pieces)
    if sum(p.lattice.numel for p in pieces) == dst_numel:
        return
    start, stop = _first_gap(pieces, dst_numel)
    before = next((p.owner for p in pieces if start and _holds(p.lattice, start - 1)), None)
    after = next((p.owner for p in pieces if stop < dst_numel and _holds(p.lattice, stop)), None)
    beside = " and ".join(f"{o} {side} it" for o, side in ((before, "before"), (after, "after")) if o) or "nobody"
    raise LayoutError(
        f"{tensor or 'tensor'}: elements [{start}, {stop}) of {dst_numel} have no owner (beside the gap: {beside}).",
        remedy="Register every slice of the tensor, or declare it frozen.",
    )


def validate_slice(layout: Layout, numel: int, *, tensor: str = "") -> None:
    """What a writer's slice must be: LayoutError unless the source side covers [0, numel) exactly once and the
    destination side is within bounds and injective."""
    name = tensor or "a slice"
    if layout.src_numel != numel:
        raise LayoutError(f"{name} has {numel} elements, its layout {layout.src_numel}.")
    check_blocks(layout)
    if len(layout.blocks) == 1 and layout.blocks[0].numel == numel:
        return  # nested strides never repeat an index, and `numel` distinct ones inside [0, numel) are all of them
    inverse = Layout(tuple(b.swapped() for b in layout.blocks), layout.dst_numel, numel)
    prove_exact_cover(numel, [("the slice", inverse)], tensor=f"ranks of {name}")
    prove_disjoint([("the slice", layout)], tensor=name)


def _holds(lattice: Lattice, index: int) -> bool:
    return lattice.count_below(index + 1) > lattice.count_below(index)


def _first_gap(pieces: list[_Piece], numel: int) -> tuple[int, int]:
    """First index nobody holds, and the next one somebody holds; pieces are disjoint and do not fill [0, numel)."""
    lo, hi = 0, numel  # [0, lo) is full, [0, hi) is not
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if sum(p.lattice.count_below(mid) for p in pieces) == mid:
            lo = mid
        else:
            hi = mid
    start, stop = lo, numel
    for p in pieces:
        below = p.lattice.count_below(start)
        if below < p.lattice.numel:
            stop = min(stop, p.lattice.nth(below))
    return start, stop
