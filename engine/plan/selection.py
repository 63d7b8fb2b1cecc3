"""What of a version belongs to one operation: on the sender from its slices, on the receiver from what arrived.

One invariant: sender and receiver walk the lanes of a tile in the same order, that of ranks. Work and memory are
O(changed) for entries and O(tile) for dense tiles, whatever the size of the slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from engine.layout.blocks import TILE_LANES
from engine.plan.operations import I64, U16, Counts, Delivery, Operation, Part


class SliceChanges(NamedTuple):
    """What a version changes in one slice: `ranks` I64 strictly rising, `tiles` I64 strictly rising dense tiles, in
    which no rank lies."""

    ranks: I64
    tiles: I64


class DenseTile(NamedTuple):
    """One dense tile that arrived: place of its part, tile number, receiver-local lanes and their bits, by rank."""

    part: int
    tile: int
    local: I64
    bits: U16


def select_entries(part: Part, ranks: I64) -> tuple[I64 | slice, I64]:
    """(positions in `ranks`, local lanes) of the ranks that the receiver has; `ranks` I64 strictly rising."""
    return part.route.select(ranks)


def dense_counts(part: Part, tiles: I64) -> I64:
    """Lanes of each tile that the receiver has, I64 of the length of `tiles`."""
    return part.route.reached(tiles)


def dense_tiles(part: Part, tiles: I64) -> I64:
    """Those of `tiles` of which the receiver has a lane: the ones that are sent to it."""
    return tiles[dense_counts(part, tiles) > 0]


def dense_lanes(part: Part, tile: int) -> tuple[I64, I64]:
    """(ranks, receiver-local lanes) of one tile of the slice that the receiver has, by rank."""
    start, stop = tile * TILE_LANES, min((tile + 1) * TILE_LANES, part.layout.src_numel)
    ranks = np.arange(start, stop, dtype=np.int64)
    positions, local = select_entries(part, ranks)
    return ranks[positions], local


def dense_ranks(part: Part, tile: int) -> I64:
    """Ranks of one tile of the slice that the receiver has, rising."""
    return dense_lanes(part, tile)[0]


def count(operation: Operation, changes: Mapping[int, SliceChanges]) -> Counts:
    """What the operation carries of a version; `changes` by slice number, a slice that is missing does not change."""
    entries = tiles = lanes = 0
    for part in operation.parts:
        change = changes.get(part.slice)
        if change is None:
            continue
        entries += part.route.count(change.ranks)
        if change.tiles.size:
            reached = dense_counts(part, change.tiles)
            tiles += int(np.count_nonzero(reached))
            lanes += int(reached.sum())
    return Counts(entries, tiles, lanes)


def arrived_tiles(delivery: Delivery) -> Iterator[DenseTile]:
    """The dense tiles of a delivery with the local lanes they belong to; its numbers must have been checked."""
    at = 0
    for place, tile in delivery.tiles.tolist():
        _, local = dense_lanes(delivery.operation.parts[place], tile)
        yield DenseTile(place, tile, local, delivery.dense[at : at + local.size])
        at += local.size
