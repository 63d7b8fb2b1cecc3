"""Collects what a version changes on this rank, in O(changed) memory, against the live weights. Nothing is written.

One invariant: the entries of a tensor are unique local lanes, each with the bits that were live when it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.apply.live import LiveTensor
from engine.apply.pieces import Dense, Reader, Sparse
from engine.apply.target import Target
from engine.detect.base import I64, U16
from engine.digest import DigestKey, delta_digest
from engine.errors import CodecError

Index = npt.NDArray[Any]
"""Local lanes: uint32 where the tensor allows it, else int64."""


@dataclass(frozen=True, slots=True)
class Change:
    """All entries of one tensor. `local[c]` are the lanes of copy c; `old` and `new` belong to them in order."""

    tensor: str
    local: tuple[Index, ...]
    old: U16
    new: U16


@dataclass(slots=True)
class _Pile:
    local: list[list[Index]]
    old: list[U16] = field(default_factory=list)
    new: list[U16] = field(default_factory=list)
    delta: int = 0
    dense_lanes: int = 0


def _narrow(index: I64, lanes: int) -> Index:
    return index.astype(np.uint32) if lanes <= 1 << 32 else index


def check_unique(tensor: str, local: Index) -> None:
    """CodecError if a lane occurs twice in the *sorted* `local`."""
    if local.size > 1 and bool((local[1:] == local[:-1]).any()):
        lane = int(local[1:][local[1:] == local[:-1]][0])
        raise CodecError(
            f"two writers, or one twice, change lane {lane} of {tensor!r}.",
            remedy="The version cannot be installed; the receiver is brought up from another anchor.",
        )


class Collector:
    """Adds up the pieces of one target."""

    def __init__(self, selected: Mapping[str, LiveTensor]) -> None:
        self._selected = selected
        self._piles: dict[str, _Pile] = {}

    def add(self, piece: Sparse | Dense) -> None:
        live = self._selected[piece.tensor]
        pile = self._piles.get(piece.tensor)
        if pile is None:
            pile = self._piles[piece.tensor] = _Pile([[] for _ in live.copies])
        hit, local = live.copies[0].locator.locate(piece.canonical)
        everything = local.size == piece.canonical.size
        canonical = piece.canonical if everything else piece.canonical[hit]
        old = live.copies[0].lanes.gather(local)
        if isinstance(piece, Sparse):
            diffs = piece.diffs if everything else piece.diffs[hit]
            new: U16 = old + diffs
        else:
            new = piece.bits if everything else piece.bits[hit]
            pile.dense_lanes += local.size
        keep = np.flatnonzero(old != new)
        if isinstance(piece, Sparse) and keep.size != new.size:
            raise CodecError(f"a chunk lists lanes of {piece.tensor!r} that do not change.")
        canonical, old, new = canonical[keep], old[keep], new[keep]
        for lanes, copy in zip(pile.local, live.copies, strict=True):
            index = local if copy is live.copies[0] else copy.locator.locate(piece.canonical)[1]
            lanes.append(_narrow(index[keep], live.held))
        pile.old.append(old)
        pile.new.append(new)
        pile.delta += delta_digest(DigestKey.for_tensor(piece.tensor), canonical, old, new)

    def delta(self, tensor: str) -> int:
        """What the entries add to the tensor's digest."""
        pile = self._piles.get(tensor)
        return pile.delta if pile else 0

    def require_dense(self, target: Target) -> None:
        """CodecError unless every lane this rank holds was carried dense (a version without base)."""
        for name, live in self._selected.items():
            pile = self._piles.get(name)
            if (pile.dense_lanes if pile else 0) != live.held:
                raise CodecError(f"version {target.version} has no base and does not carry all of {name!r}.")

    def changes(self) -> list[Change]:
        """The entries per tensor, sorted by the first copy's lanes; CodecError if one occurs twice."""
        out = []
        for name in sorted(self._piles):
            pile = self._piles.pop(name)
            local = [np.concatenate(parts) for parts in pile.local]
            old, new = np.concatenate(pile.old), np.concatenate(pile.new)
            order = np.argsort(local[0], kind="stable")
            local = [index[order] for index in local]
            check_unique(name, local[0])
            if local[0].size:
                out.append(Change(name, tuple(local), old[order], new[order]))
        return out


def collect(target: Target, selected: Mapping[str, LiveTensor]) -> Collector:
    """Read every chunk of the target once."""
    collector, reader = Collector(selected), Reader(target, selected)
    for file in target.chunks:
        for piece in reader.pieces(file):
            collector.add(piece)
    return collector
