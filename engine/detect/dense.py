"""No detection at all: every tile is dense. For first versions, unread steps, and as a baseline to measure against."""

from __future__ import annotations

import numpy as np

from engine.detect.assemble import without_entries
from engine.detect.base import TILE, U16, Detection, SliceGeometry
from engine.detect.check import check_tiles
from engine.detect.geometry import tile_digests


def detect_dense(cur_bits: U16, geometry: SliceGeometry, tile_start: int, tile_stop: int) -> Detection:
    """All of tiles [tile_start, tile_stop) dense; `cur_bits` holds the lanes of the whole slice."""
    check_tiles(cur_bits.size, geometry, tile_start, tile_stop)
    first, last = tile_start * TILE, min(tile_stop * TILE, cur_bits.size)
    digest = tile_digests(geometry, cur_bits[first:last], tile_start)
    return without_entries(tile_start, digest, np.ones(digest.size, np.bool_))
