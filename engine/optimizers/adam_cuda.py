"""torch.optim.Adam and AdamW as torch runs them on CUDA, in the order its kernels compute.

Invariant: `invert` holds on CUDA whatever `powf` returned within its documented error; `forward` is an emulation that
is bit-exact except for that, so replay may use it only where a self-test on the device passed.

The `-fma` names are kernels in which the compiler contracted multiply and add; the interval covers both kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.optimizers.arithmetic import f32, fma, ieee_sqrt
from engine.optimizers.base import Hyper, Interval, StepContext
from engine.optimizers.bounds import MIN_STEP, StepBound, U, invert_step
from engine.optimizers.real import AdamWOptions

Implementation = Literal["single", "foreach", "fused", "capturable"]

Q_ROUNDINGS = 24.0
"""As on the CPU, plus a reciprocal multiplication, and up to six roundings of FP32 bias-correction arithmetic."""
POWF_ULPS = 9.0
"""Largest error of CUDA's powf that any toolkit documented, in ulps."""


@dataclass(frozen=True, slots=True)
class _Constants:
    """FP32 scalars of one step. `pow_rel` bounds the relative error of q that comes from powf."""

    decay: float
    step_size: float
    bias_correction1: float
    root_bias_correction2: float
    pow_rel: float


def _pow_term(beta1: float, beta2: float, step: int, ulps: float) -> float:
    """Relative error of q when β₁^t and β₂^t are off by `ulps`; infinite when a correction may be 0."""
    error1, error2 = (ulps * 2.0**-23 * beta**step for beta in (beta1, beta2))
    bias1, bias2 = 1.0 - beta1**step, 1.0 - beta2**step
    if bias1 <= 2 * error1 or bias2 <= 2 * error2:
        return float("inf")
    return error1 / (bias1 - error1) + error2 / (bias2 - error2)


@dataclass(frozen=True, slots=True)
class TorchAdamCuda:
    """One CUDA implementation of torch Adam/AdamW; `contracted`: compiled with multiply-add contraction."""

    implementation: Implementation
    contracted: bool = False

    @property
    def name(self) -> str:
        """`torch-adamw/cuda/<implementation>[-fma]`."""
        return f"torch-adamw/cuda/{self.implementation}{'-fma' if self.contracted else ''}"

    @property
    def device_type(self) -> str:
        """`cuda`."""
        return "cuda"

    @property
    def takes_tensor_lr(self) -> bool:
        """Only where torch takes it there: fused and capturable."""
        return self._device_bias

    @property
    def _device_bias(self) -> bool:
        return self.implementation in ("fused", "capturable")

    def _constants(self, ctx: StepContext) -> _Constants:
        h, step = ctx.hyper, float(ctx.step)
        if not self._device_bias:
            bias1, root2 = 1 - h.beta1**step, (1 - h.beta2**step) ** 0.5
            return _Constants(f32(1 - h.lr * h.weight_decay), f32(h.lr / bias1), f32(bias1), f32(root2), 0.0)
        beta1, beta2, lr = f32(h.beta1), f32(h.beta2), f32(h.lr)
        bias1, bias2 = f32(1 - f32(beta1**step)), f32(1 - f32(beta2**step))
        root2 = f32(bias2**0.5)
        pow_rel = _pow_term(beta1, beta2, ctx.step, POWF_ULPS)
        if self.implementation == "fused":
            decay = f32(lr * f32(h.weight_decay))  # θ loses fl(decay·θ) instead of being multiplied by 1 − decay
            return _Constants(decay, f32(lr / bias1) if bias1 else float("inf"), bias1, root2, pow_rel)
        decay = f32(1 - f32(lr * f32(h.weight_decay))) if h.lr_is_tensor else f32(1 - h.lr * h.weight_decay)
        step_size = f32(1 / f32(bias1 / lr)) if lr and bias1 else 0.0
        return _Constants(decay, step_size, bias1, root2, pow_rel)

    def forward(self, theta_prev: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """θ_t in the order of the CUDA kernels, emulated in FP32 (powf taken as correctly rounded)."""
        k, eps, decays = self._constants(ctx), f32(ctx.hyper.eps), ctx.hyper.weight_decay != 0
        root = ieee_sqrt(v)
        if self.implementation == "fused":
            theta = theta_prev
            if decays:
                theta = fma(-k.decay, theta, theta) if self.contracted else theta - theta * k.decay
            return theta - m * k.step_size / (root / k.root_bias_correction2 + eps)
        theta = theta_prev * k.decay if decays else theta_prev
        if self.implementation == "capturable":
            den = (root / k.root_bias_correction2 + eps) / torch.tensor(-k.step_size)
            return theta + m / den
        if self.implementation == "single":  # a division by a host scalar multiplies by its reciprocal on CUDA
            den = root * f32(1 / k.root_bias_correction2) + eps if k.root_bias_correction2 else root / 0.0 + eps
        else:
            den = root / k.root_bias_correction2 + eps
        if self.implementation == "single" or self.contracted:
            return fma(-k.step_size, m / den, theta)
        return theta + (m / den) * -k.step_size

    def step_bound(self, ctx: StepContext) -> StepBound:
        """The step as real arithmetic, and this implementation's distance from it."""
        k = self._constants(ctx)
        decays = ctx.hyper.weight_decay != 0
        # A step size of 0 that does not come from lr = 0 hides an overflow, which the device may have just missed.
        underflows = ctx.hyper.lr != 0 and abs(ctx.hyper.lr) < MIN_STEP
        if underflows or not (k.step_size < 2.0**60 and k.root_bias_correction2 > 0 and k.pow_rel < 0.01):
            return StepBound(c=1.0, s=0.0, b=1.0, eps=0.0, q_rel=0.0, known=False)
        c, decay_rel = 1.0, 0.0
        if decays and self.implementation == "fused":
            c, decay_rel = 1.0 - k.decay, 1.01 * U * abs(k.decay) + 2.0**-52
        elif decays:
            c = k.decay
        # capturable divides the denominator by the step size: it may leave the normal range at both ends.
        denominator_abs = 2.0**-148 * k.step_size if self.implementation == "capturable" else 0.0
        return StepBound(
            c=c,
            s=k.step_size,
            b=k.root_bias_correction2,
            eps=f32(ctx.hyper.eps),
            q_rel=Q_ROUNDINGS * U + 1.01 * k.pow_rel,
            root_abs=denominator_abs,
            num_abs=2.0**-149 * (1.0 + k.step_size),
            q_abs=2.0**-149 * (1.0 + k.step_size),
            rounds_decay=c != 1.0,
            decay_rel=decay_rel,
        )

    def invert(self, theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> Interval:
        """The interval that provably contains θ_{t-1}, powf's error included."""
        return invert_step(self.step_bound(ctx), theta, m, v, ctx)

    def real_options(self, hyper: Hyper, device: torch.device) -> AdamWOptions:
        """How the optimizer this formula mirrors is made."""
        fused = self.implementation == "fused"
        return AdamWOptions(
            lr=torch.tensor(hyper.lr, dtype=torch.float32, device=device) if hyper.lr_is_tensor else hyper.lr,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            foreach=None if fused else self.implementation != "single",
            fused=True if fused else None,
            capturable=self.implementation == "capturable",
        )
