"""torch.optim.Adam and AdamW as torch runs them on the CPU: single tensor, foreach and fused, lr as float or tensor.

Invariant: `forward` makes the same torch calls in the same order as the installed optimizer (fused: the order of its
kernel), so it gives the same bits; `selftest` proves that on the running machine before replay may rely on it.
AMSGrad: pass `max_exp_avg_sq` as v. Coupled Adam: weight decay 0, the gradient already carried it into m and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.optimizers.arithmetic import f32, ieee_sqrt
from engine.optimizers.base import Hyper, Interval, StepContext
from engine.optimizers.bounds import StepBound, U, invert_step
from engine.optimizers.real import AdamWOptions

Implementation = Literal["single", "foreach", "fused"]

Q_ROUNDINGS = 16.0
"""Bound on the roundings in q, in units of U: constants s, b, ε 3, product 1, √v 2 (1 ulp), two quotients and a sum 3;
the rest is room for any other order of the same operations."""


@dataclass(frozen=True, slots=True)
class _Constants:
    """Scalars of one step exactly as the optimizer computes them. `decay` None: no decay multiplication at all."""

    decay: float | None
    step_size: float
    root_bias_correction2: float


@dataclass(frozen=True, slots=True)
class TorchAdamCpu:
    """One CPU implementation of torch Adam/AdamW; `tensor_lr`: lr was a FP32 tensor (a FP64 one acts like a float)."""

    implementation: Implementation
    tensor_lr: bool = False

    @property
    def name(self) -> str:
        """`torch-adamw/cpu/<implementation>[-tensor-lr]`."""
        return f"torch-adamw/cpu/{self.implementation}{'-tensor-lr' if self.tensor_lr else ''}"

    @property
    def device_type(self) -> str:
        """`cpu`."""
        return "cpu"

    @property
    def takes_tensor_lr(self) -> bool:
        """A tensor lr has formulas of its own."""
        return False

    def _constants(self, ctx: StepContext) -> _Constants:
        h = ctx.hyper
        step = float(ctx.step)
        bias1 = 1 - h.beta1**step
        root2 = (1 - h.beta2**step) ** 0.5
        if self.tensor_lr and self.implementation != "fused":
            # The optimizer does this arithmetic on a 0-dim FP32 tensor; so do we.
            lr = torch.tensor(h.lr, dtype=torch.float32)
            decay = float(1 - lr * h.weight_decay) if h.weight_decay != 0 else None
            return _Constants(decay, float(lr / bias1), root2)
        # The fused kernel takes lr.item(), so there a tensor is just a double that FP32 holds.
        lr64 = f32(h.lr) if self.tensor_lr else h.lr
        decay = 1 - lr64 * h.weight_decay if h.weight_decay != 0 else None
        return _Constants(decay, lr64 / bias1, root2)

    def forward(self, theta_prev: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """θ_t from θ_{t-1} and the moments after the step, bit for bit."""
        k = self._constants(ctx)
        theta = theta_prev.clone() if k.decay is None else theta_prev * k.decay
        root = ieee_sqrt(v) if self.implementation == "fused" else v.sqrt()
        den = root.div_(k.root_bias_correction2).add_(ctx.hyper.eps)
        return theta.addcdiv_(m, den, value=-k.step_size)

    def step_bound(self, ctx: StepContext) -> StepBound:
        """The step as real arithmetic, and this implementation's distance from it."""
        k = self._constants(ctx)
        c = 1.0 if k.decay is None else f32(k.decay)
        return StepBound(
            c=c,
            s=k.step_size,
            b=k.root_bias_correction2,
            eps=f32(ctx.hyper.eps),
            q_rel=Q_ROUNDINGS * U,
            rounds_decay=c != 1.0,
        )

    def invert(self, theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> Interval:
        """The interval that provably contains θ_{t-1}."""
        return invert_step(self.step_bound(ctx), theta, m, v, ctx)

    def is_monotone(self, ctx: StepContext) -> bool:
        """θ ↦ fl(fl(θ·c) + q) never falls when c >= 0: each rounding is monotone and q does not depend on θ."""
        decay = self._constants(ctx).decay
        return decay is None or decay >= 0

    def real_options(self, hyper: Hyper, device: torch.device) -> AdamWOptions:
        """How the optimizer this formula mirrors is made."""
        lr = torch.tensor(hyper.lr, dtype=torch.float32) if self.tensor_lr else hyper.lr
        # torch refuses foreach with a tensor lr on the CPU and falls back to the single-tensor code.
        foreach = self.implementation == "foreach" and not self.tensor_lr
        return AdamWOptions(
            lr=lr,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            foreach=None if self.implementation == "fused" else foreach,
            fused=True if self.implementation == "fused" else None,
        )
