"""Detection by comparing with the bits of the last read, for tensors whose optimizer no formula covers.

It keeps a second copy of the tensor's lanes, so callers count and show its use; it works for every dtype.
"""

from __future__ import annotations

import numpy as np

from engine.detect.assemble import without_entries
from engine.detect.base import TILE, U16, Detection, SliceGeometry
from engine.detect.check import check_tiles
from engine.detect.geometry import tile_digests
from engine.errors import InvalidInput


def detect_snapshot(
    prev_bits: U16, cur_bits: U16, geometry: SliceGeometry, tile_start: int, tile_stop: int
) -> Detection:
    """Exact difference of the lanes of tiles [tile_start, tile_stop); both arrays hold the whole slice."""
    if prev_bits.shape != cur_bits.shape:
        raise InvalidInput(f"snapshot of {geometry.tensor!r} has {prev_bits.size} lanes, the tensor {cur_bits.size}.")
    check_tiles(cur_bits.size, geometry, tile_start, tile_stop)
    first, last = tile_start * TILE, min(tile_stop * TILE, cur_bits.size)
    before, now = prev_bits[first:last], cur_bits[first:last]
    differs = np.flatnonzero(before != now)
    digest = tile_digests(geometry, now, tile_start)
    blank = without_entries(tile_start, digest, np.zeros(digest.size, np.bool_))
    return Detection(
        tile_start=tile_start,
        ranks=differs + first,
        old=before[differs],
        new=now[differs],
        amb_ranks=blank.amb_ranks,
        amb_new=blank.amb_new,
        amb_offsets=blank.amb_offsets,
        amb_old=blank.amb_old,
        digest_new=digest,
        dense=blank.dense,
        mismatched=blank.mismatched,
    )
