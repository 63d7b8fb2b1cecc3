"""Verdicts on some elements of a tile range → a `Detection`. Shared by every backend.

Invariant: entries of tiles that cannot be told element by element are dropped and the tile is flagged dense.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.detect.base import I64, TILE, U64, Bool, Detection
from engine.detect.classify import Verdicts


def assemble(tile_start: int, ranks: I64, verdicts: Verdicts, digest_new: U64) -> Detection:
    """`ranks[i]` (ascending) is the slice rank that verdict i is about; all others of these tiles are unchanged."""
    tiles = digest_new.size
    tile_of = ranks // TILE - tile_start
    mismatched = np.zeros(tiles, np.bool_)
    mismatched[tile_of[verdicts.impossible]] = True
    dense = mismatched.copy()
    dense[tile_of[verdicts.unknown]] = True

    changed = verdicts.changed & ~dense[tile_of]
    kept = ~dense[tile_of[verdicts.ambiguous]]
    ambiguous = verdicts.ambiguous[kept]
    counts = np.diff(verdicts.amb_offsets)
    return Detection(
        tile_start=tile_start,
        ranks=ranks[changed],
        old=verdicts.old[changed],
        new=verdicts.new[changed],
        amb_ranks=ranks[ambiguous],
        amb_new=verdicts.new[ambiguous],
        amb_offsets=_offsets(counts[kept]),
        amb_old=verdicts.amb_old[np.repeat(kept, counts)],
        digest_new=digest_new,
        dense=dense,
        mismatched=mismatched,
    )


def concatenate(parts: list[Detection]) -> Detection:
    """Join detections of consecutive tile ranges, in order."""
    if len(parts) == 1:
        return parts[0]
    return Detection(
        tile_start=parts[0].tile_start,
        ranks=np.concatenate([p.ranks for p in parts]),
        old=np.concatenate([p.old for p in parts]),
        new=np.concatenate([p.new for p in parts]),
        amb_ranks=np.concatenate([p.amb_ranks for p in parts]),
        amb_new=np.concatenate([p.amb_new for p in parts]),
        amb_offsets=_offsets(np.concatenate([np.diff(p.amb_offsets) for p in parts])),
        amb_old=np.concatenate([p.amb_old for p in parts]),
        digest_new=np.concatenate([p.digest_new for p in parts]),
        dense=np.concatenate([p.dense for p in parts]),
        mismatched=np.concatenate([p.mismatched for p in parts]),
    )


def without_entries(tile_start: int, digest_new: U64, dense: Bool) -> Detection:
    """A detection that lists no element."""
    none = np.zeros(0, np.int64)
    bits = np.zeros(0, np.uint16)
    return Detection(
        tile_start=tile_start,
        ranks=none,
        old=bits,
        new=bits,
        amb_ranks=none,
        amb_new=bits,
        amb_offsets=np.zeros(1, np.int64),
        amb_old=bits,
        digest_new=digest_new,
        dense=dense,
        mismatched=np.zeros(digest_new.size, np.bool_),
    )


def _offsets(counts: npt.NDArray[np.int64]) -> I64:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
