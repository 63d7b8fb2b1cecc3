"""`make_plan`: who sends what to whom, from both sides' layouts. Every member computes it and compares the digest.

One invariant: each lane that a receiver holds is reached by exactly one part of exactly one operation, and nothing else
is. What is computed does not depend on the order in which a member lists its slices or tensors.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.commit.launch import tensor_lanes
from engine.errors import InvalidInput, LayoutError
from engine.layout.blocks import TILE_LANES
from engine.plan.layouts import Common, Known, Shelf, first_gap, misfit
from engine.plan.operations import Operation, Part, ReceiverTensor, SenderSlice
from engine.plan.pieces import Holder, Piece, Pieces, by_member
from engine.records.models import TensorMeta

FORMAT = 1
"""Changes when the same layouts would be planned, or operations be carried, in another way."""
_ROWS = 1 << 10  # operations in a line of the digest


@dataclass(frozen=True)
class Plan:
    """What `senders` × `receivers` members exchange in every version.

    `operations` by sender, receiver, tensor name; pairs without any have nothing in common. `digest`: SHA-256 in hex of
    all that decides what travels, which every member must have computed alike.
    """

    senders: int
    receivers: int
    operations: tuple[Operation, ...]
    digest: str

    def of_pair(self, sender: int, receiver: int) -> tuple[Operation, ...]:
        """The operations from `sender` to `receiver`, in order."""
        at = (sender, receiver)
        lo = bisect_left(self.operations, at, key=_pair)
        return self.operations[lo : bisect_right(self.operations, at, lo=lo, key=_pair)]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(sender, receiver) of those that have operations, in order."""
        return tuple(dict.fromkeys(_pair(o) for o in self.operations))


def _pair(operation: Operation) -> tuple[int, int]:
    return operation.sender, operation.receiver


class _Task(NamedTuple):
    """What `receiver` needs of `piece` from one of its holders; `common`: how the first of them would send it."""

    tensor: str
    receiver: int
    wanted: Known
    piece: Piece
    common: Common


def make_plan(
    tensors: Sequence[TensorMeta],
    senders: Sequence[Sequence[SenderSlice]],
    receivers: Sequence[Sequence[ReceiverTensor]],
) -> Plan:
    """The plan of a group; `senders` and `receivers` in the order of their numbers.

    Of a piece that several senders hold, one sends to each receiver, so that all send about as many lanes: what has one
    holder is counted first, then the largest shares go to whoever has the least so far. InvalidInput names an unknown
    or repeated tensor, LayoutError the tensor, range and members where layouts do not fit, overlap in part, or leave
    out lanes that a receiver holds.
    """
    catalog = _catalog(tensors)
    shelf = Shelf()
    holders = _holders(catalog, senders, shelf)
    wanted = _wanted(catalog, receivers, shelf)
    pieces = Pieces(shelf)
    tasks: list[_Task] = []
    for tensor in sorted(holders.keys() | wanted.keys()):
        found = pieces.of(tensor, holders.get(tensor, ()))
        tasks.extend(_tasks(tensor, found, wanted.get(tensor, ()), shelf))
    operations, rows = _operations(tasks, len(senders), shelf)
    digest = _digest(catalog, holders, wanted, rows, len(senders), len(receivers))
    return Plan(len(senders), len(receivers), tuple(operations), digest)


def _catalog(tensors: Sequence[TensorMeta]) -> dict[str, TensorMeta]:
    catalog: dict[str, TensorMeta] = {}
    for meta in tensors:
        if catalog.setdefault(meta.name, meta) != meta:
            raise InvalidInput(f"{meta.name!r} is described in two ways: {catalog[meta.name]} and {meta}.")
    return catalog


def _lanes(catalog: dict[str, TensorMeta], tensor: str, who: str) -> int:
    meta = catalog.get(tensor)
    if meta is None:
        raise InvalidInput(
            f"{who} has a tensor {tensor!r} that the version does not have.",
            remedy="Register the model that is being trained on both sides.",
        )
    return tensor_lanes(meta)


def _holders(
    catalog: dict[str, TensorMeta], senders: Sequence[Sequence[SenderSlice]], shelf: Shelf
) -> dict[str, list[Holder]]:
    out: dict[str, list[Holder]] = defaultdict(list)
    for sender, slices in enumerate(senders):
        who, seen = f"sender {sender}", set()
        for s in slices:
            lanes = _lanes(catalog, s.tensor, who)
            if s.layout.dst_numel != lanes:
                raise misfit(s.tensor, who, s.layout, lanes)
            if (s.tensor, s.slice) in seen:
                raise InvalidInput(f"{who} lists slice {s.slice} of {s.tensor!r} twice.")
            seen.add((s.tensor, s.slice))
            try:
                known = shelf.slice(s.layout, s.tensor)
            except LayoutError as error:
                raise LayoutError(f"slice {s.slice} of {who}: {error.message}", remedy=error.remedy) from None
            out[s.tensor].append(Holder(sender, s.slice, known))
    return out


def _wanted(
    catalog: dict[str, TensorMeta], receivers: Sequence[Sequence[ReceiverTensor]], shelf: Shelf
) -> dict[str, list[tuple[int, Known]]]:
    out: dict[str, list[tuple[int, Known]]] = defaultdict(list)
    for receiver, tensors in enumerate(receivers):
        who, seen = f"receiver {receiver}", set()
        for t in tensors:
            lanes = _lanes(catalog, t.tensor, who)
            if t.layout.dst_numel != lanes:
                raise misfit(t.tensor, who, t.layout, lanes)
            if t.tensor in seen:
                raise InvalidInput(f"{who} lists {t.tensor!r} twice; further copies are its own to write.")
            seen.add(t.tensor)
            try:
                known = shelf.local(t.layout, t.tensor)
            except LayoutError as error:
                raise LayoutError(f"{who}: {error.message}", remedy=error.remedy) from None
            out[t.tensor].append((receiver, known))
    return out


def _tasks(tensor: str, pieces: Sequence[Piece], wanted: Sequence[tuple[int, Known]], shelf: Shelf) -> list[_Task]:
    """What each receiver needs of which piece of one tensor; LayoutError if nobody holds some of it."""
    first = np.array([p.known.first for p in pieces], np.int64)
    last = np.array([p.known.last for p in pieces], np.int64)
    out: list[_Task] = []
    for receiver, mine in wanted:
        found = 0
        for k in np.flatnonzero((first <= mine.last) & (last >= mine.first)).tolist():
            common = shelf.common(pieces[k].known, mine)
            if common.lanes:
                out.append(_Task(tensor, receiver, mine, pieces[k], common))
                found += common.lanes
        if found != mine.lanes:
            start, stop = first_gap([p.known for p in pieces], mine)
            raise LayoutError(
                f"{tensor}: receiver {receiver} holds lanes [{start}, {stop}) of {mine.layout.dst_numel}, which no "
                "sender has.",
                remedy="Every lane that a receiver holds must be registered by a trainer rank of the group.",
            )
    return out


class _Given(NamedTuple):
    """A task in the hands of one slice of the sender."""

    slice: int
    common: Common


def _operations(tasks: Sequence[_Task], senders: int, shelf: Shelf) -> tuple[list[Operation], list[list[object]]]:
    """Choose a holder for each task and collect what a sender has for a receiver of a tensor in one operation.

    The operations in order, and what the digest takes in of each.
    """
    load = [0] * senders
    chosen: dict[tuple[int, int, str], list[_Given]] = defaultdict(list)
    spans: dict[tuple[int, str], int] = {}
    open_ = []
    for task in tasks:
        spans[task.receiver, task.tensor] = task.wanted.layout.src_numel
        first, last = task.piece.holders[0], task.piece.holders[-1]  # they are sorted
        if first.sender == last.sender:
            load[first.sender] += task.common.lanes
            chosen[first.sender, task.receiver, task.tensor].append(_Given(first.slice, task.common))
        else:
            open_.append(task)
    # Pieces of a tensor are disjoint, so that the first lane tells them apart and the order is total.
    for task in sorted(open_, key=lambda t: (-t.common.lanes, t.tensor, t.piece.known.first, t.receiver)):
        holder = min(task.piece.holders, key=lambda h: (load[h.sender], h.sender, h.slice))
        load[holder.sender] += task.common.lanes
        common = shelf.common(holder.known, task.wanted)
        chosen[holder.sender, task.receiver, task.tensor].append(_Given(holder.slice, common))
    operations, rows = [], []
    for at in sorted(chosen):
        sender, receiver, tensor = at
        given = chosen[at]
        if len(given) > 1:
            given.sort(key=lambda g: g.slice)
        parts = tuple(Part(g.slice, g.common.layout) for g in given)
        lanes, span = sum(g.common.lanes for g in given), spans[receiver, tensor]
        operations.append(Operation(sender, receiver, tensor, lanes, span, parts))
        rows.append([sender, receiver, tensor, lanes, span, [[g.slice, g.common.sha256] for g in given]])
    return operations, rows


def _digest(
    catalog: dict[str, TensorMeta],
    holders: dict[str, list[Holder]],
    wanted: dict[str, list[tuple[int, Known]]],
    operations: Sequence[list[object]],
    senders: int,
    receivers: int,
) -> str:
    """SHA-256 over JSON lines: one for the group, one for each tensor and how its members hold it, then operations."""
    sha, encode = hashlib.sha256(), json.JSONEncoder(separators=(",", ":")).encode

    def line(value: Sequence[object]) -> None:
        sha.update(encode(value).encode() + b"\n")

    line(["plan", FORMAT, TILE_LANES, senders, receivers])
    for name in sorted(catalog):
        meta = catalog[name]
        held = [[h.sender, h.slice, h.known.sha256] for h in sorted(holders.get(name, ()), key=by_member)]
        local = [[receiver, known.sha256] for receiver, known in wanted.get(name, ())]
        line([name, list(meta.shape), meta.dtype, held, local])
    for start in range(0, len(operations), _ROWS):
        line(operations[start : start + _ROWS])
    return sha.hexdigest()
