"""The fast detector: a vectorised interval test on everything, the exact one on the flagged, replay on the rest.

Invariant: its result equals the reference backend's. Where no cheap bound exists (low-precision moments, ε near 0,
ill-conditioned steps, formulas without one) every element goes through the exact rules, in bounded pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from engine.bf16 import MAX_FINITE_FP32_FOR_BF16, nan_bits, round_to_bf16_bits
from engine.detect import kernels
from engine.detect.assemble import assemble, without_entries
from engine.detect.base import I64, TILE, U16, U64, Bool, Detection, SliceGeometry
from engine.detect.check import check_state, check_window
from engine.detect.classify import Verdicts, classify, join, scatter
from engine.detect.geometry import contiguous_start, tile_digests
from engine.digest import DigestKey
from engine.errors import InvalidInput
from engine.optimizers.base import Formula, StepContext
from engine.optimizers.bounds import FastBound, HasStepBound, StepBound, fast_bound_of

CHUNK_TILES = 32
"""Tiles one thread sweeps at a time (2 Mi elements)."""
_EXACT_PIECE = 1 << 17
"""Elements that plain torch judges at a time: bounds the memory of its FP64 intermediates (some 20 MiB)."""
_KEPT_PLANS = 64


_In = TypeVar("_In")
_Out = TypeVar("_Out")


class _Map(Protocol):
    """`map`, or a pool's."""

    def __call__(self, function: Callable[[_In], _Out], items: Iterable[_In], /) -> Iterable[_Out]: ...


class CpuBackend:
    """Uses up to `threads` threads for one call; the heavy parts release the GIL."""

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise InvalidInput(f"detection needs at least one thread, not {threads}.")
        self._threads = threads
        self._plans: dict[tuple[int, StepContext], tuple[Formula, _Plan | None]] = {}

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
        first_tile: int = 0,
    ) -> Detection:
        """See `DetectBackend.detect`."""
        theta, m, v = theta.detach(), m.detach(), v.detach()
        check_state(theta, m, v, geometry.tensor)
        check_window(theta.numel(), geometry, first_tile, tile_start, tile_stop)
        plan = self._compiled_plan(formula, ctx) if m.dtype == v.dtype == torch.float32 else None
        job = _Job(formula, ctx, plan, theta, m, v, geometry, exact_replay, first_tile * TILE)
        ranges = [(t, min(t + CHUNK_TILES, tile_stop)) for t in range(tile_start, tile_stop, CHUNK_TILES)]
        if not ranges:
            return without_entries(tile_start, np.zeros(0, np.uint64), np.zeros(0, np.bool_))
        if self._threads == 1 or len(ranges) == 1:
            return job.run(ranges, map)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="detect") as pool:
            return job.run(ranges, pool.map)

    def _compiled_plan(self, formula: Formula, ctx: StepContext) -> _Plan | None:
        """Constants of both compiled passes, or None where every element must take the exact rules.

        Kept for a while: all tensors of a group share them, and small tensors are many.
        """
        key = (id(formula), ctx)
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            step = formula.step_bound(ctx) if isinstance(formula, HasStepBound) else None
            fast = None if step is None else fast_bound_of(step)
            plan = None if step is None or fast is None else _Plan(pack_fast(fast), pack_step(step), nan_bits())
            known = self._plans[key] = (formula, plan)  # with the formula, so that its id stays its own
        return known[1]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Constants of the compiled passes of one step, and the bits this backend's cast gives NaN."""

    fast: kernels.F32
    step: kernels.F64
    nan_bits: int


@dataclass(frozen=True, slots=True)
class _Swept:
    """Elements of one tile range that may have changed: `certain` ones with their old bits; and the tiles' digests."""

    ranks: I64
    certain: Bool
    old: U16
    digest: U64


class _Job:
    """One call of `detect`: what its pieces share, all of it read-only."""

    def __init__(
        self,
        formula: Formula,
        ctx: StepContext,
        plan: _Plan | None,
        theta: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        geometry: SliceGeometry,
        exact_replay: bool,
        before: int,
    ) -> None:
        """`before`: lanes of the slice in front of those that `theta`, `m` and `v` hold."""
        self._formula, self._ctx, self._geometry, self._exact = formula, ctx, geometry, exact_replay
        self._theta, self._m, self._v = theta, m, v
        self._plan, self._before = plan, before
        self._key = DigestKey.for_tensor(geometry.tensor)
        self._start = contiguous_start(geometry.layout)
        self._b_words = self._key.b_words(geometry.layout.dst_numel)

    def run(self, ranges: list[tuple[int, int]], run_all: _Map) -> Detection:
        """Detect in consecutive tile ranges; `run_all` maps a function over pieces of the work, in order.

        What the compiled passes leave open is judged for all ranges together: it is a handful, and plain torch costs
        the same for one element as for a thousand.
        """
        swept = list(run_all(self._sweep, ranges))
        ranks, certain, old, digest = (
            np.concatenate([getattr(part, field) for part in swept]) for field in ("ranks", "certain", "old", "digest")
        )
        closer = np.flatnonzero(~certain)
        pieces = [ranks[closer[i : i + _EXACT_PIECE]] for i in range(0, closer.size, _EXACT_PIECE)]
        judged = join(list(run_all(self._exact_rules, pieces)))
        new = round_to_bf16_bits(self._theta[torch.from_numpy(ranks - self._before)])
        return assemble(ranges[0][0], ranks, scatter(judged, closer, new, certain, old), digest)

    def _exact_rules(self, ranks: I64) -> Verdicts:
        pick = torch.from_numpy(ranks - self._before)
        return classify(
            self._formula, self._ctx, self._theta[pick], self._m[pick], self._v[pick], exact_replay=self._exact
        )

    def _sweep(self, tiles: tuple[int, int]) -> _Swept:
        first, last = tiles[0] * TILE, min(tiles[1] * TILE, self._before + self._theta.numel())
        if self._plan is None:
            ranks = np.arange(first, last, dtype=np.int64)
            nothing = np.zeros(ranks.size, np.uint16)
            return _Swept(ranks, nothing != 0, nothing, self._digest(tiles[0], first, last))
        plan = self._plan
        n = last - first
        digest = np.zeros(-(-n // TILE), np.uint64)
        # Room for every element; pages that stay untouched cost nothing.
        sent, verdict, old = np.empty(n, np.int32), np.empty(n, np.uint8), np.empty(n, np.uint16)
        start = -1 if self._start is None else self._start + first
        theta, m, v = (x[first - self._before : last - self._before].numpy() for x in (self._theta, self._m, self._v))
        found = kernels.sweep(
            theta, m, v, plan.fast, plan.step, plan.nan_bits, self._key.a, self._b_words, start, TILE,
            digest, sent, verdict, old,
        )  # fmt: skip
        if start < 0:
            digest = self._digest(tiles[0], first, last)
        return _Swept(sent[:found].astype(np.int64) + first, verdict[:found] == 1, old[:found].copy(), digest)

    def _digest(self, tile_start: int, first: int, last: int) -> U64:
        return tile_digests(
            self._geometry, round_to_bf16_bits(self._theta[first - self._before : last - self._before]), tile_start
        )


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
