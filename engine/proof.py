"""The publisher's proof: the delta found must explain the whole difference between two digests, tile by tile.

Invariant: for every tile that is not dense, D_prev + Σ w·(new − old) over the returned entries equals D_new mod 2^64.
Ambiguous elements have few candidates each; the sum picks the combination. What cannot be proven is sent dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from engine.detect.base import I64, TILE, U16, U64, Bool, Detection, SliceGeometry
from engine.detect.geometry import canonical_of
from engine.digest import DigestKey, delta_digest_tiles
from engine.errors import InvalidInput

MAX_COMBINATIONS = 1 << 24
"""Combinations of candidates considered in one tile: 24 elements with two each, as many as 16-bit moments leave."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Resolved:
    """Entries with proven old bits, ranks ascending, none with old == new, none in a dense tile.

    `dense[t]`: tile `tile_start + t` must be sent dense. `failed_tiles`: those that became dense because no combination
    fits. `ambiguous`, `resolved`: ambiguous elements met, and those whose old bits the proof settled.
    """

    ranks: I64
    old: U16
    new: U16
    dense: Bool
    failed_tiles: int
    ambiguous: int
    resolved: int


def resolve(d: Detection, digest_prev: U64, geometry: SliceGeometry) -> Resolved:
    """Choose old bits of the ambiguous so that every tile's digest comes out, or make the tile dense.

    `digest_prev` [T]: digest of the bits at the last read of the same tiles.
    """
    tiles = d.dense.size
    if digest_prev.shape != (tiles,):
        raise InvalidInput(f"{digest_prev.size} previous digests for {tiles} tiles of {geometry.tensor!r}.")
    key = DigestKey.for_tensor(geometry.tensor)
    explained = delta_digest_tiles(key, d.ranks, canonical_of(geometry, d.ranks), d.old, d.new, tiles, d.tile_start)
    missing: U64 = d.digest_new - digest_prev.astype(np.uint64) - explained  # what the ambiguous must still add

    chosen = d.amb_new.copy()  # old bits; equal to the new ones means unchanged
    weights = key.weights(canonical_of(geometry, d.amb_ranks))
    tile_of = d.amb_ranks // TILE - d.tile_start
    bounds = np.searchsorted(tile_of, np.arange(tiles + 1))
    dense = d.dense.copy()
    failed = settled = 0
    for t in np.flatnonzero(~d.dense & ((missing != 0) | (np.diff(bounds) > 0))):
        first, last = int(bounds[t]), int(bounds[t + 1])
        options = [d.amb_old[d.amb_offsets[j] : d.amb_offsets[j + 1]] for j in range(first, last)]
        pick = _choose(int(missing[t]), weights[first:last], d.amb_new[first:last], options)
        if pick is None:
            dense[t] = True
            failed += 1
        else:
            chosen[first:last] = pick
            settled += last - first
    ranks, old, new = d.ranks, d.old, d.new
    if d.amb_ranks.size:
        ranks = np.concatenate([ranks, d.amb_ranks])
        order = np.argsort(ranks, kind="stable")
        ranks, old, new = ranks[order], np.concatenate([old, chosen])[order], np.concatenate([new, d.amb_new])[order]
    keep = (old != new) & ~dense[ranks // TILE - d.tile_start]
    return Resolved(ranks[keep], old[keep], new[keep], dense, failed, int(d.amb_ranks.size), settled)


def _choose(missing: int, weights: U64, new: U16, options: list[U16]) -> U16 | None:
    """Old bits, one of each element's options, with Σ w·(new − old) = missing mod 2^64; None if none or too many.

    All sums of the first half are sorted and the second half looks up its complements, so 2^24 combinations cost about
    2^13 steps.
    """
    sizes = [len(o) for o in options]
    if prod(sizes) > MAX_COMBINATIONS:
        return None
    gains = [w * (n.astype(np.uint64) - o.astype(np.uint64)) for w, n, o in zip(weights, new, options, strict=True)]
    half = _balanced_cut(sizes)
    left, right = _sums(gains[:half]), _sums(gains[half:])
    order = np.argsort(left, kind="stable")
    wanted = np.uint64(missing & _MASK) - right
    at = np.minimum(np.searchsorted(left[order], wanted), left.size - 1)
    fits = np.flatnonzero(left[order[at]] == wanted)
    if fits.size == 0:
        return None
    picks = [*_digits(int(order[at[fits[0]]]), sizes[:half]), *_digits(int(fits[0]), sizes[half:])]
    return np.array([o[i] for o, i in zip(options, picks, strict=True)], np.uint16)


def _sums(gains: list[U64]) -> U64:
    """The sum of every choice of one gain each, mod 2^64; the last one's choice varies fastest."""
    sums = np.zeros(1, np.uint64)
    for gain in gains:
        sums = np.add.outer(sums, gain).reshape(-1)
    return sums


def _digits(number: int, sizes: list[int]) -> list[int]:
    """Which choices make up the `number`-th of `_sums`."""
    picks = []
    for size in reversed(sizes):
        number, pick = divmod(number, size)
        picks.append(pick)
    return picks[::-1]


def _balanced_cut(sizes: list[int]) -> int:
    """Where to cut so that both sides have about √(product) combinations."""
    total, left = prod(sizes), 1
    for cut, size in enumerate(sizes):
        if left * left >= total:
            return cut
        left *= size
    return len(sizes)
