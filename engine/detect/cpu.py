"""The fast detector: a vectorised interval test on everything, the exact one on the flagged, replay on the rest.

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
from engine.detect.classify import Verdicts, classify, join, scatter
from engine.detect.geometry import contiguous_start, tile_digests
from engine.digest import DigestKey
from engine.errors import InvalidInput
from engine.optimizers.base import Formula, StepContext
from engine.optimizers.bounds import FastBound, HasStepBound, StepBound, fast_bound_of

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
        self._plan = self._compiled_plan()
        self._key = DigestKey.for_tensor(geometry.tensor)
        self._start = contiguous_start(geometry.layout)
        self._b_words = self._key.b_words(geometry.layout.dst_numel)
        self._nan_bits = nan_bits()

    def _compiled_plan(self) -> tuple[kernels.F32, kernels.F64] | None:
        """Constants of both compiled passes, or None where every element must take the exact rules."""
        if not (self._m.dtype == self._v.dtype == torch.float32) or not isinstance(self._formula, HasStepBound):
            return None
        step = self._formula.step_bound(self._ctx)
        fast = fast_bound_of(step)
        return None if fast is None else (pack_fast(fast), pack_step(step))

    def run(self, tile_start: int, tile_stop: int) -> Detection:
        """Detect in tiles [tile_start, tile_stop)."""
        first, last = tile_start * TILE, min(tile_stop * TILE, self._theta.numel())
        if self._plan is not None:
            return self._run_compiled(*self._plan, tile_start, first, last)
        ranks = np.arange(first, last, dtype=np.int64)
        return assemble(tile_start, ranks, self._exact_rules(ranks), self._digest(tile_start, first, last))

    def _run_compiled(self, fast: kernels.F32, step: kernels.F64, tile_start: int, first: int, last: int) -> Detection:
        theta, m, v = (x[first:last].numpy() for x in (self._theta, self._m, self._v))
        digest = np.zeros(-(-(last - first) // TILE), np.uint64)
        flagged = np.empty(last - first, np.int32)  # untouched pages cost nothing
        start = -1 if self._start is None else self._start + first
        count = kernels.scan(
            theta, m, v, fast, self._nan_bits, self._key.a, self._b_words, start, TILE, digest, flagged
        )
        if start < 0:
            digest = self._digest(tile_start, first, last)
        verdict, old = np.empty(count, np.uint8), np.zeros(count, np.uint16)
        kernels.judge(theta, m, v, step, flagged, count, verdict, old)
        sent = np.flatnonzero(verdict)
        verdict, old, chosen = verdict[sent], old[sent], flagged[sent]
        ranks = chosen.astype(np.int64) + first
        closer = np.flatnonzero(verdict == 2)
        new = round_to_bf16_bits(torch.from_numpy(theta[chosen]))
        verdicts = scatter(self._exact_rules(ranks[closer]), closer, new, verdict == 1, old)
        return assemble(tile_start, ranks, verdicts, digest)

    def _exact_rules(self, ranks: I64) -> Verdicts:
        """The rules of `classify` for these ranks, in bounded pieces."""
        parts = []
        for i in range(0, max(1, ranks.size), _EXACT_PIECE):
            pick = torch.from_numpy(ranks[i : i + _EXACT_PIECE])
            state = (x[pick] for x in (self._theta, self._m, self._v))
            parts.append(classify(self._formula, self._ctx, *state, exact_replay=self._exact))
        return join(parts)

    def _digest(self, tile_start: int, first: int, last: int) -> U64:
        return tile_digests(self._geometry, round_to_bf16_bits(self._theta[first:last]), tile_start)


def pack_fast(bound: FastBound) -> kernels.F32:
    """The constants of `kernels.scan`; the largest magnitude is rounded down, so that it never exceeds the limit."""
    largest = np.nextafter(np.float32(MAX_FINITE_FP32_FOR_BF16), np.float32(0))
    values = (bound.neg_s, bound.inv_b, bound.eps, bound.inv_c, bound.g_theta, bound.g_q, bound.tiny, largest)
    return np.array(values, np.float32)


def pack_step(step: StepBound) -> kernels.F64:
    """The constants of `kernels.judge`."""
    sizes = (
        step.q_rel,
        step.root_abs,
        step.num_abs,
        step.q_abs,
        step.out_abs,
        float(step.rounds_decay),
        step.decay_rel,
    )
    return np.array((step.c, step.s, step.b, step.eps, *sizes, MAX_FINITE_FP32_FOR_BF16))
