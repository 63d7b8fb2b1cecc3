"""FusedAdam of TransformerEngine and Apex (AdamW mode, FP32 masters).

Invariant: `invert` holds for both libraries' kernels, contracted or not; Apex is built with fast math, so its bound
allows approximate division and square root and flushes subnormals. `forward` is an emulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.optimizers.adam_cuda import _pow_term
from engine.optimizers.arithmetic import f32, flush, fma, ieee_sqrt
from engine.optimizers.base import Interval, StepContext
from engine.optimizers.bounds import (
    FLUSH_ABS,
    ROOT_ABS,
    ROOT_FLUSH_ABS,
    ROUND_ABS,
    StepBound,
    U,
    invert_step,
)

HOST_POWF_ULPS = 2.0
"""Error allowed for β^t: the host computes it in FP32, or in FP64 and rounds, depending on the build."""


@dataclass(frozen=True, slots=True)
class FusedAdam:
    """`library`: te or apex; `contracted`: compiled with multiply-add contraction."""

    library: Literal["te", "apex"]
    contracted: bool = False

    @property
    def name(self) -> str:
        """`fused-adam/<library>[-fma]`."""
        return f"fused-adam/{self.library}{'-fma' if self.contracted else ''}"

    def _bias(self, ctx: StepContext) -> tuple[float, float]:
        """FP32 bias corrections 1 − β₁^t and 1 − β₂^t."""
        beta1, beta2 = f32(ctx.hyper.beta1), f32(ctx.hyper.beta2)
        return f32(1 - f32(beta1**ctx.step)), f32(1 - f32(beta2**ctx.step))

    def forward(self, theta_prev: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """θ_t in the kernels' order, every operation rounded to FP32 (Apex: subnormals flushed)."""
        h = ctx.hyper
        lr, wd, eps = f32(h.lr), f32(h.weight_decay), f32(h.eps)
        bias1, bias2 = self._bias(ctx)
        z = flush if self.library == "apex" else _keep
        theta, m, v = z(theta_prev), z(m), z(v)
        den = z(ieee_sqrt(z(v / bias2)) + eps)
        ratio = z(z(m / bias1) / den)
        update = z(fma(wd, theta, ratio)) if self.contracted else z(ratio + z(theta * wd))
        return z(fma(-lr, update, theta)) if self.contracted else z(theta - z(update * lr))

    def step_bound(self, ctx: StepContext) -> StepBound:
        """The step as real arithmetic, and this implementation's distance from it."""
        h = ctx.hyper
        lr, wd = f32(h.lr), f32(h.weight_decay)
        bias1, bias2 = self._bias(ctx)
        pow_rel = _pow_term(f32(h.beta1), f32(h.beta2), ctx.step, HOST_POWF_ULPS)
        if not (pow_rel < 0.01 and bias1 > 0 and bias2 > 0):
            return StepBound(c=1.0, s=0.0, b=1.0, eps=0.0, q_rel=0.0, known=False)
        flushes = self.library == "apex"
        tiny, root_tiny = (FLUSH_ABS, ROOT_FLUSH_ABS) if flushes else (ROUND_ABS, ROOT_ABS)
        s = lr / bias1
        return StepBound(
            c=1.0 - lr * wd,
            s=s,
            b=bias2**0.5,
            eps=f32(h.eps),
            q_rel=(40.0 if flushes else 16.0) * U + 1.01 * pow_rel,
            root_abs=2.0 * root_tiny / bias2**0.5,
            num_abs=2.0 * (s + lr + 1.0) * tiny,
            q_abs=2.0 * (lr + 1.0) * tiny,
            out_abs=2.0 * (lr * (1.0 + wd) + 2.0) * tiny,
            rounds_decay=False,
            decay_rel=3.1 * U * lr * wd + 2.0**-52 * (1.0 + lr * wd),
        )

    def invert(self, theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> Interval:
        """The interval that provably contains θ_{t-1}."""
        return invert_step(self.step_bound(ctx), theta, m, v, ctx)


def _keep(x: torch.Tensor) -> torch.Tensor:
    return x
