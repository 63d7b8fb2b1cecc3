"""The contract of an optimizer formula: forward, inverse and a proven bound, all in one operation order.

A formula is the exact operation order of one optimizer on one (device, implementation, capturable, kind of lr). It is
stateless; everything that changes from step to step is in `StepContext`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of one parameter group exactly as the step used them.

    `lr` is the Python double, or the FP32-rounded value when `lr_is_tensor`. `weight_decay` is the decoupled one;
    for coupled (L2) decay it is 0, because the gradient already carried it into m and v.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    lr_is_tensor: bool = False


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step of one parameter: its group's hyperparameters, its own step counter after the step (1 is the first).

    `m_scale`, `v_scale`: what stored FP16 moments are to be multiplied with; None: they cannot be told from what is
    stored. Moments of other dtypes have none (1).
    """

    hyper: Hyper
    step: int
    m_scale: float | None = 1.0
    v_scale: float | None = 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    """FP64 tensors, shape of θ: every FP32 value the parameter may have had before the step lies in [lo, hi].

    Elements where nothing can be said (non-finite state, c = 0, |θ| > 3.3e38) have lo = -inf, hi = +inf.
    """

    lo: torch.Tensor
    hi: torch.Tensor


@runtime_checkable
class Formula(Protocol):
    """What detection needs of an optimizer. All tensors are 1-D FP32 of one shape unless said otherwise."""

    @property
    def name(self) -> str:
        """Stable registry name, for example `torch-adamw/cpu/foreach`."""

    def forward(self, theta_prev: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """θ_t from θ_{t-1} and the moments *after* the step, bit for bit as the optimizer computes it."""

    def invert(self, theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> Interval:
        """The interval that provably contains θ_{t-1} (DESIGN section 3)."""
