"""The fast detector: a vectorised interval test on every element, the exact rules on the flagged few only.

Invariant: its result equals the reference backend's. Where no cheap bound exists (low-precision moments, ε near 0,
ill-conditioned steps, formulas without one) every element goes through the exact rules, in bounded pieces.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from engine.bf16 import MAX_FINITE_FP32_FOR_BF16, nan_bits, round_to_bf16_bits
from engine.detect import kernels
from engine.detect.assemble import assemble, concatenate, without_entries
from engine.detect.base import I64, TILE, U64, Detection, SliceGeometry
from engine.detect.check import check_state, check_tiles
from engine.detect.classify import classify, join
from engine.detect.geometry import contiguous_start, tile_digests
from engine.digest import DigestKey
from engine.errors import InvalidInput
from engine.optimizers.base import Formula, StepContext
from engine.optimizers.bounds import FastBound, HasFastBound

CHUNK_TILES = 32
"""Tiles one thread works on at a time (2 Mi elements): bounds the memory of a piece and the share of Python in it."""
_EXACT_PIECE = 1 << 17


class CpuBackend:
    """Uses up to `threads` threads for one call; the heavy parts release the GIL."""

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise InvalidInput(f"detection needs at least one thread, not {threads}.")
        self._threads = threads

    @property
    def name(self) -> str:
        """`cpu`."""
        return "cpu"

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
    ) -> Detection:
        """See `DetectBackend.detect`."""
        theta, m, v = theta.detach(), m.detach(), v.detach()
        check_state(theta, m, v, geometry.tensor)
        check_tiles(theta.numel(), geometry, tile_start, tile_stop)
        job = _Job(formula, ctx, theta, m, v, geometry, exact_replay)
        starts = range(tile_start, tile_stop, CHUNK_TILES)
        ranges = [(t, min(t + CHUNK_TILES, tile_stop)) for t in starts]
        if not ranges:
            return without_entries(tile_start, np.zeros(0, np.uint64), np.zeros(0, np.bool_))
        if self._threads == 1 or len(ranges) == 1:
            parts = [job.run(first, last) for first, last in ranges]
        else:
            with ThreadPoolExecutor(self._threads, thread_name_prefix="detect") as pool:
                parts = list(pool.map(lambda r: job.run(*r), ranges))
        return concatenate(parts)


class _Job:
    """One call of `detect`: what its pieces share, all of it read-only."""

    def __init__(
        self,
        formula: Formula,
        ctx: StepContext,
        theta: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        geometry: SliceGeometry,
        exact_replay: bool,
    ) -> None:
        self._formula, self._ctx, self._geometry, self._exact = formula, ctx, geometry, exact_replay
        self._theta, self._m, self._v = theta, m, v
        self._constants = self._fast_constants()
        self._key = DigestKey.for_tensor(geometry.tensor)
        self._start = contiguous_start(geometry.layout)
        self._b_words = self._key.b_words(geometry.layout.dst_numel)
        self._nan_bits = nan_bits()

    def _fast_constants(self) -> kernels.F32 | None:
        if not (self._m.dtype == self._v.dtype == torch.float32) or not isinstance(self._formula, HasFastBound):
            return None
        bound = self._formula.fast_bound(self._ctx)
        return None if bound is None else _pack(bound)

    def run(self, tile_start: int, tile_stop: int) -> Detection:
        """Detect in tiles [tile_start, tile_stop)."""
        first, last = tile_start * TILE, min(tile_stop * TILE, self._theta.numel())
        if self._constants is None:
            ranks, digest = np.arange(first, last, dtype=np.int64), None
        else:
            ranks, digest = self._scan(self._constants, first, last)
        if digest is None:
            digest = tile_digests(self._geometry, round_to_bf16_bits(self._theta[first:last]), tile_start)
        parts = []
        for i in range(0, max(1, ranks.size), _EXACT_PIECE):
            pick = torch.from_numpy(ranks[i : i + _EXACT_PIECE])
            state = (x[pick] for x in (self._theta, self._m, self._v))
            parts.append(classify(self._formula, self._ctx, *state, exact_replay=self._exact))
        return assemble(tile_start, ranks, join(parts), digest)

    def _scan(self, constants: kernels.F32, first: int, last: int) -> tuple[I64, U64 | None]:
        theta, m, v = (x[first:last].numpy() for x in (self._theta, self._m, self._v))
        digest = np.zeros(-(-(last - first) // TILE), np.uint64)
        flagged = np.empty(last - first, np.int32)  # untouched pages cost nothing
        start = -1 if self._start is None else self._start + first
        count = kernels.scan(
            theta, m, v, constants, self._nan_bits, self._key.a, self._b_words, start, TILE, digest, flagged
        )
        return kernels.ranks_of(flagged, count, first), digest if start >= 0 else None


def _pack(bound: FastBound) -> kernels.F32:
    """The constants of `kernels.scan`; the largest magnitude is rounded down, so that it never exceeds the limit."""
    largest = np.nextafter(np.float32(MAX_FINITE_FP32_FOR_BF16), np.float32(0))
    values = (bound.neg_s, bound.inv_b, bound.eps, bound.inv_c, bound.g_theta, bound.g_q, bound.tiny, largest)
    return np.array(values, np.float32)
