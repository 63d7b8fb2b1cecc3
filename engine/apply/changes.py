"""Collects what a version changes on this rank, in O(changed) memory, against the live weights. Nothing is written.

One invariant: the entries of a tensor are unique local lanes, each with the bits that were live when it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.apply.arrivals import Arrived, arrived
from engine.apply.live import LiveCopy, LiveTensor
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


def select(copy: LiveCopy, canonical: I64, values: U16) -> tuple[I64, I64, U16]:
    """(canonical lanes, local lanes, values) of those that are in this copy."""
    hit, local = copy.locator.locate(canonical)
    return (canonical, local, values) if local.size == canonical.size else (canonical[hit], local, values[hit])


def _differing(copy: LiveCopy, piece: Dense) -> tuple[I64, I64, U16, U16, int]:
    """(canonical, local, old, new) of the tile's lanes that are here and not live already, and how many are here."""
    window = None if piece.start is None else copy.window(piece.start, piece.bits.size)
    if window is None:
        canonical, local, bits = select(copy, piece.canonical, piece.bits)
        old = copy.lanes.gather(local)
        keep = np.flatnonzero(old != bits)
        return canonical[keep], local[keep], old[keep], bits[keep], local.size
    lo, hi, at = window
    bits, old = piece.bits[lo:hi], copy.lanes.run(at, hi - lo)
    keep = np.flatnonzero(old != bits)
    return keep + ((piece.start or 0) + lo), keep + at, old[keep], bits[keep], hi - lo


def _arriving(copy: LiveCopy, piece: Arrived) -> tuple[I64, I64, U16, U16]:
    """(canonical, local, old, new) of the lanes that change; CodecError if one that was sent as changed is live."""
    old = copy.lanes.gather(piece.local)
    same = old == piece.bits
    if not same.any():
        return piece.canonical, piece.local, old, piece.bits
    if not piece.dense:
        raise CodecError(f"what arrived lists lanes of {piece.tensor!r} that do not change.")
    keep = np.flatnonzero(~same)
    return piece.canonical[keep], piece.local[keep], old[keep], piece.bits[keep]


def lanes_here(copy: LiveCopy, piece: Dense) -> int:
    """How many lanes of the tile are in this copy."""
    window = None if piece.start is None else copy.window(piece.start, piece.bits.size)
    return copy.locator.locate(piece.canonical)[1].size if window is None else window[1] - window[0]


def overwrite(copy: LiveCopy, piece: Sparse | Dense) -> None:
    """Write the piece to this copy, whatever is live there."""
    if isinstance(piece, Dense) and piece.start is not None:
        window = copy.window(piece.start, piece.bits.size)
        if window is not None:
            lo, hi, at = window
            copy.lanes.write_run(at, piece.bits[lo:hi])
            return
    values = piece.diffs if isinstance(piece, Sparse) else piece.bits
    _, local, values = select(copy, piece.canonical, values)
    copy.lanes.scatter(local, copy.lanes.gather(local) + values if isinstance(piece, Sparse) else values)


class Collector:
    """Adds up the pieces of one target."""

    def __init__(self, selected: Mapping[str, LiveTensor]) -> None:
        self._selected = selected
        self._piles: dict[str, _Pile] = {}

    def add(self, piece: Sparse | Dense | Arrived) -> None:
        """Keep what the piece changes here; CodecError if something is said to change and does not."""
        live = self._selected[piece.tensor]
        pile = self._piles.get(piece.tensor)
        if pile is None:
            pile = self._piles[piece.tensor] = _Pile([[] for _ in live.copies])
        first = live.copies[0]
        if isinstance(piece, Sparse):
            canonical, local, diffs = select(first, piece.canonical, piece.diffs)
            old = first.lanes.gather(local)
            new: U16 = old + diffs
            if not diffs.all():
                raise CodecError(f"a chunk lists lanes of {piece.tensor!r} that do not change.")
        elif isinstance(piece, Dense):
            canonical, local, old, new, here = _differing(first, piece)
            pile.dense_lanes += here
        else:
            canonical, local, old, new = _arriving(first, piece)
            pile.dense_lanes += piece.local.size if piece.dense else 0
        for lanes, copy in zip(pile.local, live.copies, strict=True):
            lanes.append(_narrow(local if copy is first else copy.locator.locate(canonical)[1], copy.lanes.lanes))
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
    """Read every chunk of the target once, or what arrived in their place."""
    collector = Collector(selected)
    if target.received is not None:
        for one in arrived(target, target.received, selected):
            collector.add(one)
        return collector
    reader = Reader(target, selected)
    for file in target.chunks:
        for piece in reader.pieces(file):
            collector.add(piece)
    return collector
