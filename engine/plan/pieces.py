"""The canonical pieces of a tensor that senders hold, replicas of one piece together.

One invariant: the pieces of a tensor are disjoint, and each holder of a piece holds all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import LayoutError
from engine.layout.cover import prove_disjoint
from engine.plan.layouts import Known, Shelf, first_overlap


class Holder(NamedTuple):
    """A sender's slice of a tensor."""

    sender: int
    slice: int
    known: Known


def by_member(holder: Holder) -> tuple[int, int]:
    """The order of holders."""
    return holder.sender, holder.slice


@dataclass(frozen=True, slots=True)
class Piece:
    """Canonical lanes that the same slices hold; `known`: how the first holder, by sender and slice, lays them out."""

    holders: tuple[Holder, ...]

    @property
    def known(self) -> Known:
        return self.holders[0].known


class Pieces:
    """Sorts the slices of tensors into pieces; tensors that are laid out alike are proven once."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._disjoint: set[tuple[int, ...]] = set()

    def of(self, tensor: str, holders: Sequence[Holder]) -> list[Piece]:
        """The pieces of one tensor by first canonical lane.

        LayoutError, naming range and senders, if two slices share lanes without holding the same ones.
        """
        alike: dict[int, list[Holder]] = {}
        for holder in sorted(holders, key=by_member):
            if holder.known.lanes:
                alike.setdefault(holder.known.number, []).append(holder)
        groups = sorted(alike.values(), key=lambda g: (g[0].known.first, g[0].known.last, g[0][:2]))
        key = tuple(g[0].known.number for g in groups)
        if key not in self._disjoint:
            try:
                prove_disjoint([(f"sender {g[0].sender}", g[0].known.layout) for g in groups], tensor=tensor)
                self._disjoint.add(key)
            except LayoutError:
                groups = self._merged(tensor, groups)
        return [Piece(tuple(g)) for g in groups]

    def _merged(self, tensor: str, groups: list[list[Holder]]) -> list[list[Holder]]:
        """Groups that hold the same lanes in another order, as one; groups sorted by first lane."""
        out: list[list[Holder]] = []
        open_: list[list[Holder]] = []  # those that a later one can still meet
        for group in groups:
            mine = group[0].known
            open_ = [g for g in open_ if g[0].known.last >= mine.first]
            for other in open_:
                theirs = other[0].known
                shared = self._shelf.common(mine, theirs).lanes
                if not shared:
                    continue
                if shared != mine.lanes or shared != theirs.lanes:
                    (start, stop), a, b = first_overlap(mine, theirs), other[0], group[0]
                    raise LayoutError(
                        f"{tensor}: lanes [{start}, {stop}) are in slice {a.slice} of sender {a.sender} and in slice "
                        f"{b.slice} of sender {b.sender}, which do not hold the same lanes.",
                        remedy="Replicas must be cut alike on all senders; leave the others out of the registration.",
                    )
                other.extend(group)
                other.sort(key=by_member)
                break
            else:
                out.append(group)
                open_.append(group)
        return out
