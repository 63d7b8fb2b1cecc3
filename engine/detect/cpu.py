"""The fast detector: a vectorised interval test on everything, the exact one on the flagged, replay on the rest.

Invariant: its result equals the reference backend's. Where the cheap interval is useless (ε near 0, say) the exact one
is computed for every element, still compiled. Where a formula has no `StepBound`, or the step none that is known, plain
torch judges every element, in bounded pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from engine.bf16 import MAX_FINITE_FP32_FOR_BF16, Rounding, nan_bits, round_to_bf16_bits
from engine.detect import kernels
from engine.detect.assemble import assemble, without_entries
from engine.detect.base import I64, TILE, U16, U64, Bool, Detection, SliceGeometry
from engine.detect.check import check_state, check_window
from engine.detect.classify import Verdicts, classify, join, scatter
from engine.detect.geometry import contiguous_start, tile_digests
from engine.digest import DigestKey
from engine.errors import InvalidInput
from engine.optimizers.base import Formula, StepContext
from engine.optimizers.bounds import (
    EXACT_MOMENT,
    FastBound,
    HasStepBound,
    MomentBound,
    StepBound,
    fast_bound_of,
    is_known,
    moment_bound,
)

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
        self._plans: dict[_PlanKey, tuple[Formula, _Plan | None]] = {}

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
        rounding: Rounding = "even",
    ) -> Detection:
        """See `DetectBackend.detect`."""
        theta, m, v = theta.detach(), m.detach(), v.detach()
        check_state(theta, m, v, geometry.tensor)
        check_window(theta.numel(), geometry, first_tile, tile_start, tile_stop)
        plan = self._compiled_plan(formula, ctx, m.dtype, v.dtype)
        job = _Job(formula, ctx, plan, theta, m, v, geometry, exact_replay, first_tile * TILE, rounding)
        ranges = [(t, min(t + CHUNK_TILES, tile_stop)) for t in range(tile_start, tile_stop, CHUNK_TILES)]
        if not ranges:
            return without_entries(tile_start, np.zeros(0, np.uint64), np.zeros(0, np.bool_))
        if self._threads == 1 or len(ranges) == 1:
            return job.run(ranges, map)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="detect") as pool:
            return job.run(ranges, pool.map)

    def _compiled_plan(
        self, formula: Formula, ctx: StepContext, m_dtype: torch.dtype, v_dtype: torch.dtype
    ) -> _Plan | None:
        """Constants of both compiled passes, or None where every element must take the exact rules.

        Kept for a while: all tensors of a group share them, and small tensors are many.
        """
        key = (id(formula), ctx, m_dtype, v_dtype)
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            step = formula.step_bound(ctx) if isinstance(formula, HasStepBound) else None
            first, second = moment_bound(m_dtype, ctx.m_scale), moment_bound(v_dtype, ctx.v_scale)
            plan = None
            if step is not None and is_known(step) and first is not None and second is not None:
                fast = fast_bound_of(step, first, second) or _FLAG_ALL
                plan = _Plan(pack_fast(fast), pack_step(step, first, second))
            known = self._plans[key] = (formula, plan)  # with the formula, so that its id stays its own
        return known[1]


_PlanKey = tuple[int, StepContext, torch.dtype, torch.dtype]
_FLAG_ALL = FastBound(neg_s=0.0, inv_b=1.0, eps=1.0, inv_c=1.0, g_theta=0.0, g_q=0.0, tiny=float("nan"))
"""NaN is never inside of a BF16 value's cell."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Constants of the compiled passes of one step."""

    fast: kernels.F32
    step: kernels.F64


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
        rounding: Rounding,
    ) -> None:
        """`before`: lanes of the slice in front of those that `theta`, `m` and `v` hold."""
        self._formula, self._ctx, self._geometry, self._exact = formula, ctx, geometry, exact_replay
        self._theta, self._m, self._v = theta, m, v
        self._plan, self._before, self._rounding = plan, before, rounding
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
        new = round_to_bf16_bits(self._theta[torch.from_numpy(ranks - self._before)], self._rounding)
        return assemble(ranges[0][0], ranks, scatter(judged, closer, new, certain, old), digest)

    def _exact_rules(self, ranks: I64) -> Verdicts:
        pick = torch.from_numpy(ranks - self._before)
        return classify(
            self._formula,
            self._ctx,
            self._theta[pick],
            self._m[pick],
            self._v[pick],
            exact_replay=self._exact,
            rounding=self._rounding,
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
        held = slice(first - self._before, last - self._before)
        theta, m, v = (x[held].float().numpy() for x in (self._theta, self._m, self._v))  # FP32 is not copied
        found = kernels.sweep(
            theta, m, v, plan.fast, plan.step, pack_rounding(self._rounding), self._key.a, self._b_words, start, TILE,
            digest, sent, verdict, old,
        )  # fmt: skip
        if start < 0:
            digest = self._digest(tiles[0], first, last)
        return _Swept(sent[:found].astype(np.int64) + first, verdict[:found] == 1, old[:found].copy(), digest)

    def _digest(self, tile_start: int, first: int, last: int) -> U64:
        theta = self._theta[first - self._before : last - self._before]
        return tile_digests(self._geometry, round_to_bf16_bits(theta, self._rounding), tile_start)


def pack_fast(bound: FastBound) -> kernels.F32:
    """The constants of `kernels.scan`; the largest magnitude is rounded down, so that it never exceeds the limit."""
    largest = np.nextafter(np.float32(MAX_FINITE_FP32_FOR_BF16), np.float32(0))
    values = (bound.neg_s, bound.inv_b, bound.eps, bound.inv_c, bound.g_theta, bound.g_q, bound.tiny, largest)
    return np.array(values, np.float32)


def pack_rounding(rounding: Rounding) -> kernels.U32:
    """What is added to FP32 bits, and whether the parity of the upper half is; above which magnitude bits are NaN that
    get these bits. NaN of split masters are rounded like numbers."""
    if rounding == "away":
        return np.array((0x8000, 0, 0xFFFF_FFFF, 0), np.uint32)
    return np.array((0x7FFF, 1, 0x7F80_0000, nan_bits()), np.uint32)


def pack_step(step: StepBound, first: MomentBound = EXACT_MOMENT, second: MomentBound = EXACT_MOMENT) -> kernels.F64:
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
    moments = (x for bound in (first, second) for x in (bound.scale, bound.rel, bound.floor))
    return np.array((step.c, step.s, step.b, step.eps, *sizes, MAX_FINITE_FP32_FOR_BF16, *moments))
