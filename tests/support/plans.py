"""Layouts of both sides of a plan for tests, and the exchange of a version without any transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from engine.apply import Target
from engine.layout.algebra import map_indices
from engine.layout.blocks import TILE_LANES, Block, Layout
from engine.layout.mapping import map_partial
from engine.plan.operations import Delivery, Operation, ReceiverTensor, SenderSlice
from engine.plan.planning import Plan
from engine.plan.selection import SliceChanges, count, dense_lanes, dense_tiles, select_entries
from engine.records import TensorDigest, TensorMeta
from tests.support.versions import State, digest_of

I64 = npt.NDArray[np.int64]
U16 = npt.NDArray[np.uint16]
Senders = Sequence[Sequence[SenderSlice]]
Receivers = Sequence[Sequence[ReceiverTensor]]


def box(shape: Sequence[int], ranges: Sequence[range], order: Sequence[int] | None = None) -> Layout:
    """The elements at `ranges`, one a dimension, in memory with the dimensions in `order` (outermost first)."""
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    offset = sum(r.start * s for r, s in zip(ranges, strides, strict=True))
    dims = [(len(r), r.step * s) for r, s in zip(ranges, strides, strict=True)]
    dims = [dims[i] for i in (order or range(len(dims)))]
    here = [prod(n for n, _ in dims[i + 1 :]) for i in range(len(dims))]
    block = Block(tuple(n for n, _ in dims), 0, tuple(here), offset, tuple(s for _, s in dims))
    return Layout((block,), block.numel, prod(shape))


def joined(layouts: Sequence[Layout], pad: int = 0, tail: int = 0) -> Layout:
    """One local tensor of several pieces, `pad` elements of nothing before each and `tail` behind the last."""
    blocks, at = [], 0
    for layout in layouts:
        at += pad
        blocks += [Block(b.shape, b.src_offset + at, b.src_strides, b.dst_offset, b.dst_strides) for b in layout.blocks]
        at += layout.src_numel
    return Layout(tuple(blocks), at + tail, layouts[0].dst_numel)


def split(shape: Sequence[int], dim: int, parts: int, part: int) -> Layout:
    """Equal share `part` of `parts` along `dim`."""
    n = shape[dim]
    ranges = [range(size) for size in shape]
    ranges[dim] = range(n * part // parts, n * (part + 1) // parts)
    return box(shape, ranges)


def where(layout: Layout) -> I64:
    """Canonical lane of each local lane, −1 for padding."""
    return map_partial(layout, np.arange(layout.src_numel, dtype=np.int64))


def covered(plan: Plan, senders: Senders, receivers: Receivers) -> bool:
    """Whether each lane that a receiver holds is reached once, from the same canonical lane, and no other one is."""
    slices = {(s, x.tensor, x.slice): x.layout for s, mine in enumerate(senders) for x in mine}
    reached = {(r, t.tensor): np.full(t.layout.src_numel, -1) for r, mine in enumerate(receivers) for t in mine}
    for o in plan.operations:
        total = 0
        for part in o.parts:
            local = where(part.layout)
            ranks = np.flatnonzero(local >= 0)
            at = reached[o.receiver, o.tensor]
            if bool((at[local[ranks]] != -1).any()) or at.size != o.span:
                return False
            at[local[ranks]] = map_indices(slices[o.sender, o.tensor, part.slice], ranks)
            total += ranks.size
        if total != o.lanes:
            return False
    return all(np.array_equal(reached[r, t.tensor], where(t.layout)) for r, mine in enumerate(receivers) for t in mine)


def changes_of(layout: Layout, old: U16, new: U16, dense: I64) -> SliceChanges:
    """What a slice has to send when `dense` are its dense tiles."""
    at = where(layout)
    ranks = np.flatnonzero(old[at] != new[at])
    return SliceChanges(ranks[~np.isin(ranks // TILE_LANES, dense)], dense)


def deliver(operation: Operation, changes: Mapping[int, SliceChanges], lanes: Mapping[int, U16]) -> Delivery:
    """What the operation's receiver gets; all by slice number, `lanes` the new bits of a slice by rank."""
    local, bits, tiles, dense = [], [], [], []
    for place, part in enumerate(operation.parts):
        change, new = changes[part.slice], lanes[part.slice]
        positions, at = select_entries(part, change.ranks)
        local.append(at)
        bits.append(new[change.ranks[positions]])
        for tile in dense_tiles(part, change.tiles).tolist():
            tiles.append((place, tile))
            dense.append(new[dense_lanes(part, tile)[0]])
    out = Delivery(
        operation,
        np.concatenate(local).astype(operation.index_dtype),
        np.concatenate(bits),
        np.array(tiles, np.int64).reshape(-1, 2),
        np.concatenate([np.empty(0, np.uint16), *dense]),
    )
    counts = count(operation, changes)
    assert (counts.entries, counts.tiles, counts.dense_lanes) == (out.local.size, len(tiles), out.dense.size)
    return out


def exchange(plan: Plan, senders: Senders, old: State, new: State, dense: Callable[[int], I64]) -> list[list[Delivery]]:
    """The deliveries of every receiver for a step from `old` to `new`. `dense`: which of that many tiles are dense."""
    out: list[list[Delivery]] = [[] for _ in range(plan.receivers)]
    changes: dict[tuple[int, str], dict[int, SliceChanges]] = {}
    lanes: dict[tuple[int, str], dict[int, U16]] = {}
    picks: dict[tuple[str, Layout], I64] = {}
    for sender, mine in enumerate(senders):
        for s in mine:
            tiles = -(-s.layout.src_numel // TILE_LANES)
            pick = picks.setdefault((s.tensor, s.layout), dense(tiles))
            key = (sender, s.tensor)
            changes.setdefault(key, {})[s.slice] = changes_of(s.layout, old[s.tensor], new[s.tensor], pick)
            lanes.setdefault(key, {})[s.slice] = new[s.tensor][where(s.layout)]
    for o in plan.operations:
        out[o.receiver].append(deliver(o, changes[o.sender, o.tensor], lanes[o.sender, o.tensor]))
    return out


def target_of(metas: Sequence[TensorMeta], old: State | None, new: State, received: Sequence[Delivery]) -> Target:
    """Version 1 on base 0 (or on none), as it arrived."""
    return Target(
        run="r",
        version=1,
        step=10,
        base=None if old is None else 0,
        tensors=tuple(
            TensorDigest(name=m.name, shape=m.shape, dtype=m.dtype, digest=digest_of(m.name, new[m.name]))
            for m in metas
        ),
        base_digests=None if old is None else {m.name: digest_of(m.name, old[m.name]) for m in metas},
        chunks=(),
        received=tuple(received),
    )
