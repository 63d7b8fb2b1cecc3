"""The obvious detector: plain torch, FP64, the exact interval for every element. The yardstick of the others."""

from __future__ import annotations

import numpy as np
import torch

from engine.bf16 import Rounding, round_to_bf16_bits
from engine.detect.assemble import assemble, concatenate, without_entries
from engine.detect.base import TILE, Detection, SliceGeometry
from engine.detect.check import check_state, check_window
from engine.detect.classify import classify
from engine.detect.geometry import tile_digests
from engine.optimizers.base import Formula, StepContext


class ReferenceBackend:
    """Tile by tile; extra memory is a few FP64 arrays of one tile."""

    @property
    def name(self) -> str:
        """`reference`."""
        return "reference"

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
        """See `DetectBackend.detect`."""
        theta, m, v = theta.detach(), m.detach(), v.detach()
        check_state(theta, m, v, geometry.tensor)
        check_window(theta.numel(), geometry, first_tile, tile_start, tile_stop)
        parts, before = [], first_tile * TILE
        for tile in range(tile_start, tile_stop):
            lanes = slice(tile * TILE - before, min((tile + 1) * TILE - before, theta.numel()))
            state = (theta[lanes], m[lanes], v[lanes])
            verdicts = classify(formula, ctx, *state, exact_replay=exact_replay, rounding=rounding)
            digest = tile_digests(geometry, round_to_bf16_bits(theta[lanes], rounding), tile)
            parts.append(assemble(tile, np.arange(lanes.start, lanes.stop, dtype=np.int64) + before, verdicts, digest))
        return (
            concatenate(parts) if parts else without_entries(tile_start, np.zeros(0, np.uint64), np.zeros(0, np.bool_))
        )
