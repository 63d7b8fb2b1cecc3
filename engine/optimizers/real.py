"""`RealAdamW`: steps of `torch.optim.AdamW` over one parameter, for formulas to be compared with.

One invariant: a step is the function that the optimizer's own `step` calls, with the same arguments. The class itself
is not used: making one imports torch's compiler, which would be a third of a worker's start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """Arguments of `torch.optim.AdamW`."""

    lr: float | torch.Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    foreach: bool | None
    fused: bool | None
    capturable: bool = False


class RealAdamW:
    """`exp_avg` and `exp_avg_sq` are of the parameter's shape and dtype, `step_count` a number in FP32."""

    def __init__(self, param: torch.Tensor, options: AdamWOptions, *, earlier_steps: int = 0) -> None:
        """`param` is changed in place. `earlier_steps`: how many came before; nothing but their count stays of them."""
        self.param, self._options = param, options
        on_device = bool(options.capturable or options.fused)
        self.step_count = torch.tensor(float(earlier_steps), device=param.device if on_device else "cpu")
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)

    @torch.no_grad()
    def step(self, grad: torch.Tensor) -> None:
        """One step by `grad`, of the parameter's shape."""
        o = self._options
        adamw(
            [self.param],
            [grad],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.step_count],
            foreach=o.foreach,
            capturable=o.capturable,
            fused=o.fused,
            amsgrad=False,
            beta1=o.betas[0],
            beta2=o.betas[1],
            lr=o.lr,
            weight_decay=o.weight_decay,
            eps=o.eps,
            maximize=False,
        )
