"""The proven interval around θ_{t-1} for every optimizer whose step is θ ← c·θ − s·m/(√v/b + ε).

Invariant: the FP32 value that the parameter had before the step lies in the interval, whatever order, fusion or
approximation the implementation used, as long as its errors stay within the `StepBound` its formula states. The
derivation is in docs/numerics.md, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch

from engine.bf16 import MAX_FINITE_FP32_FOR_BF16
from engine.optimizers.base import Interval, StepContext

U = 2.0**-24
"""Unit roundoff of FP32 (half an ulp, relative)."""
ROUND_ABS = 2.0**-150
"""Absolute error of one FP32 rounding in the subnormal range."""
FLUSH_ABS = 2.0**-126
"""Absolute error of one operation that flushes subnormals to zero."""
ROOT_ABS = 2.0**-75
"""Absolute error of √x when x itself was rounded in the subnormal range (√ROUND_ABS)."""
ROOT_FLUSH_ABS = 2.0**-63
"""Absolute error of √x when x was flushed to zero (√FLUSH_ABS)."""
MIN_STEP = 2.0**-100
"""Below this (and above 0) the step size nears the subnormal range and no bound is claimed."""

_HALF_ULP = {torch.bfloat16: (2.0**-8, 2.0**-134), torch.float16: (2.0**-11, 2.0**-25)}
"""Largest rounding error: relative to a stored normal value, and of a stored subnormal one."""
_SCALE_REL = 2.0**-21
"""Relative error of scaling: a reciprocal and a product in FP32, with room."""
_SCALED_TO_NOTHING = 2.0**-134
"""Largest value that a scale of 0 can stand for (the scale is amax/32752, rounded to FP32)."""


@dataclass(frozen=True, slots=True)
class MomentBound:
    """How far the value that a step used may be from `scale` times the stored one, x: max(rel·|x·scale|, floor)."""

    scale: float = 1.0
    rel: float = 0.0
    floor: float = 0.0


EXACT_MOMENT: Final = MomentBound()


def moment_bound(dtype: torch.dtype, scale: float | None) -> MomentBound | None:
    """The bound of moments stored as `dtype` after use; None if nothing can be said of them.

    16-bit ones are rounded to nearest. FP16 ones are divided by `scale` first (docs/numerics.md, section 2).
    """
    if dtype not in _HALF_ULP:
        return EXACT_MOMENT
    rel, floor = _HALF_ULP[dtype]
    if dtype == torch.bfloat16 or scale == 1.0:
        return MomentBound(1.0, rel + _SCALE_REL, floor * (1.0 + 2.0**-10) + _SCALED_TO_NOTHING)
    if scale is None or not 0.0 <= scale < 2.0**100:
        return None
    return MomentBound(scale, rel + _SCALE_REL, scale * floor * (1.0 + 2.0**-10) + _SCALED_TO_NOTHING)


@dataclass(frozen=True, slots=True)
class StepBound:
    """One step as real arithmetic, and how far the implementation may be from it.

    `c`, `s`, `b`, `eps`: the real step is c·θ − s·m/(√v/b + eps). Errors of the implementation against it:
    `q_rel` relative error of the quotient q; `root_abs` absolute error of √v/b; `num_abs` of the numerator; `q_abs` of
    q itself; `out_abs` of each rounding of θ; `rounds_decay`: c·θ is rounded before q is applied; `decay_rel` error of
    the decay relative to |θ_{t-1}|. `known` False: no bound can be given for this step at all.
    """

    c: float
    s: float
    b: float
    eps: float
    q_rel: float
    root_abs: float = 0.0
    num_abs: float = ROUND_ABS
    q_abs: float = ROUND_ABS
    out_abs: float = ROUND_ABS
    rounds_decay: bool = True
    decay_rel: float = 0.0
    known: bool = True


@dataclass(frozen=True, slots=True)
class FastBound:
    """FP32 constants of a cheap interval that contains the exact one, for a vectorised test of every element.

    With q = neg_s·m/(√v·inv_b + eps): h = (θ − q)·inv_c, d = g_theta·|θ| + g_q·|q| + tiny, all in FP32; the exact
    interval lies in [h − d, h + d]. Valid for |θ| <= 3.3e38, and for moments as stored: their scales are in neg_s and
    inv_b, their rounding in g_q and tiny.
    """

    neg_s: float
    inv_b: float
    eps: float
    inv_c: float
    g_theta: float
    g_q: float
    tiny: float


@runtime_checkable
class HasStepBound(Protocol):
    """A formula whose interval is `invert_step` of a `StepBound`; others are tested with `invert` on every element."""

    def step_bound(self, ctx: StepContext) -> StepBound:
        """The step as real arithmetic, and the implementation's distance from it."""


@runtime_checkable
class HasMonotoneForward(Protocol):
    """A formula whose forward step never falls as θ_{t-1} grows, for some steps at least."""

    def is_monotone(self, ctx: StepContext) -> bool:
        """Whether that holds for this step, every rounding included."""


def is_known(step: StepBound) -> bool:
    """Whether any element of this step can be inverted."""
    return (
        step.known
        and step.c != 0.0
        and (step.s == 0.0 or abs(step.s) >= MIN_STEP)
        and step.b > 0.0
        and 0.0 <= step.q_rel < 0.01
        and step.decay_rel / abs(step.c) < 0.01
    )


def unknown(theta: torch.Tensor) -> Interval:
    """The interval that says nothing, for every element."""
    inf = torch.full(theta.shape, torch.inf, dtype=torch.float64, device=theta.device)
    return Interval(-inf, inf)


def invert_step(step: StepBound, theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> Interval:
    """Interval of θ_{t-1}, in FP64, rounded outward. `theta` FP32; `m`, `v` as stored: FP32, BF16 or FP16."""
    first, second = moment_bound(m.dtype, ctx.m_scale), moment_bound(v.dtype, ctx.v_scale)
    if not is_known(step) or first is None or second is None:
        return unknown(theta)
    t, mom, var = theta.double(), m.double() * first.scale, v.double() * second.scale
    root = torch.sqrt(var)
    den = root / step.b + step.eps
    root_slack: torch.Tensor | float = step.root_abs
    if second.rel:
        error = (var * second.rel).clamp_min(second.floor)
        # Downwards the root moves more, except where the stored value is smaller than its own error (0, say).
        move = torch.maximum(root - torch.sqrt((var - error).clamp_min(0.0)), torch.sqrt(var + error) - root)
        root_slack = move / step.b + step.root_abs
    num_slack: torch.Tensor | float = step.num_abs
    if first.rel:
        num_slack = abs(step.s) * (mom.abs() * first.rel).clamp_min(first.floor) + step.num_abs
    q = step.s * mom / den
    room = den - root_slack  # the smallest denominator the implementation can have used
    q_size, t_size = q.abs(), t.abs()
    q_err = q_size * (step.q_rel + 1.01 * root_slack / room) + 1.01 * num_slack / room + step.q_abs
    a = U * t_size + q_err + step.out_abs
    back = t + q
    if step.rounds_decay:
        a = a + U * (back.abs() + a) + step.out_abs
    size = abs(step.c)
    centre, a = back / step.c, a / size
    d = a + 1.05 * (step.decay_rel / size) * (centre.abs() + a)
    d = d * (1.0 + 2.0**-20) + 2.0**-50 * (t_size + q_size) / size
    lo, hi = centre - d, centre + d
    good = torch.isfinite(lo) & torch.isfinite(hi) & (room > 0) & (t_size <= MAX_FINITE_FP32_FOR_BF16)
    for stored, bound in ((m, first), (v, second)):
        if bound.scale == 0.0:  # then everything was stored as 0, or this is not the scale it was stored with
            good &= stored == 0
    return Interval(torch.where(good, lo, -torch.inf), torch.where(good, hi, torch.inf))


def fast_bound_of(
    step: StepBound, first: MomentBound = EXACT_MOMENT, second: MomentBound = EXACT_MOMENT
) -> FastBound | None:
    """The cheap interval of this step and these moments (docs/numerics.md, section 3), or None when it would be useless
    or unsafe."""
    if not is_known(step) or step.eps < 2.0**-64:
        return None
    size = abs(step.c)
    scaled = abs(step.s) * first.scale
    if not 2.0**-100 <= second.scale <= 2.0**100 or first.scale == 0.0:
        return None
    if scaled > 2.0**40 or (step.s != 0 and scaled < MIN_STEP):
        return None
    rounded = first.rel > 0 or second.rel > 0
    # Relative to den >= eps: how far the root may be off, and the smallest denominator.
    root_rel = 0.502 * second.rel + (step.root_abs + second.floor**0.5 / step.b) / step.eps
    room = 1.0 - root_rel
    if room < 0.5:
        return None
    moved = 1.05 * (root_rel + first.rel) / room
    b_term = 1.2 * (1.0 + moved) * step.decay_rel / size
    g_theta = (10.0 * U + b_term) / size
    g_q = (step.q_rel + moved + 32.0 * U + b_term) / size
    numerator = step.num_abs + FLUSH_ABS + abs(step.s) * first.floor
    abs_terms = 1.1 * numerator / (room * step.eps) + 2.0 * (step.q_abs + step.out_abs) + 4.0 * FLUSH_ABS
    tiny = abs_terms / size
    usable = size >= 2.0**-20 and 2.0**-30 <= step.b <= 1.0 and g_theta < 2.0**-10
    usable &= (g_q < 2.0 and tiny < 2.0**-24) if rounded else (g_q < 2.0**-10 and tiny < 2.0**-60)
    if not usable or size > 2.0**20 or abs(step.s) > 2.0**40:
        return None
    widen = 1.0 + 2.0**-10
    return FastBound(
        neg_s=-step.s * first.scale,
        inv_b=second.scale**0.5 / step.b,
        eps=step.eps,
        inv_c=1.0 / step.c,
        g_theta=g_theta * widen,
        g_q=g_q * widen,
        tiny=tiny * widen,
    )
