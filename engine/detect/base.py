"""The contract of change detection: what one pass over a range of tiles of one slice reports.

Everything downstream (proof, pending, codec) speaks in *ranks* (flat index in the slice) and 16-bit *lanes*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.bf16 import Rounding
from engine.layout.blocks import Layout
from engine.optimizers.base import Formula, StepContext

TILE = 1 << 16
"""Lanes in a tile: the unit of detection, of the publisher's proof and of dense fallback."""

U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]


def tile_count(lanes: int) -> int:
    """Number of tiles of a slice of `lanes` lanes."""
    return -(-lanes // TILE)


@dataclass(frozen=True, slots=True)
class SliceGeometry:
    """Where a slice lies in its canonical tensor: name (seeds the digest) and layout rank → canonical lane index."""

    tensor: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Detection:
    """What changed in tiles [tile_start, tile_start + T) of one slice since the last read.

    `ranks` (sorted, slice ranks), `old`, `new`: changes whose old bits are certain. Ambiguous elements: `amb_ranks`
    (sorted), `amb_new`, and candidate old bits `amb_old[amb_offsets[j]:amb_offsets[j+1]]`, distinct, at least one; a
    candidate equal to the new bits means "maybe unchanged". `digest_new[t]`: digest of the tile's present bits at
    their canonical indices. `dense[t]`: the old bits of the tile cannot be told (its entries are dropped).
    `mismatched[t]`: at least one element of the tile had no candidate, so the formula is not the optimizer's.
    """

    tile_start: int
    ranks: I64
    old: U16
    new: U16
    amb_ranks: I64
    amb_new: U16
    amb_offsets: I64
    amb_old: U16
    digest_new: U64
    dense: Bool
    mismatched: Bool


class DetectBackend(Protocol):
    """One implementation of certified detection for FP32 θ stored by the receiver as BF16."""

    @property
    def name(self) -> str:
        """`reference`, `cpu`, …"""

    def detect(
        self,
        formula: Formula,
        ctx: StepContext,
        theta: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        geometry: SliceGeometry,
        tile_start: int,
        tile_stop: int,
        *,
        exact_replay: bool,
        first_tile: int = 0,
        rounding: Rounding = "even",
    ) -> Detection:
        """Detect in tiles [tile_start, tile_stop) of the slice.

        `theta`, `m`, `v` are the slice from tile `first_tile` on (at least up to `tile_stop`), 1-D, contiguous, FP32 (m
        and v may be BF16/FP16): the whole slice, or the part of it that was copied to the host. `exact_replay` says the
        formula passed its self-test in this process, so replay may drop elements; otherwise it may only narrow the
        candidates of elements that are kept. `rounding`: how θ became the bits that receivers hold, before and now.
        """
