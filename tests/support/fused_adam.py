"""A FusedAdam for CPUs: what TransformerEngine's and Apex's optimizers look like from outside, and the arithmetic of
their kernels, emulated. Counted per group; parameters without a gradient are left alone while the count goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.optimizers import registry
from engine.optimizers.base import Hyper, StepContext


class FusedAdam(torch.optim.Optimizer):
    """`library` is te or apex; `moments` is the dtype exp_avg and exp_avg_sq are stored in."""

    library = "te"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        contracted: bool = False,
        moments: torch.dtype = torch.float32,
        bias_correction: bool = True,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self.name_to_dtype_map = {"exp_avg": moments, "exp_avg_sq": moments}
        self._formula = registry.get(f"fused-adam/{self.library}{'-fma' if contracted else ''}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    for key, dtype in self.name_to_dtype_map.items():
                        state[key] = torch.zeros_like(p, dtype=dtype)
                self._step(p, group, state)

    def _step(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        grad, decay = p.grad, float(group["weight_decay"])
        assert grad is not None
        if not self.adam_w_mode:
            grad, decay = grad + decay * p, 0.0
        m = state["exp_avg"].float() * beta1 + (1 - beta1) * grad
        v = state["exp_avg_sq"].float() * beta2 + (1 - beta2) * grad * grad
        ctx = StepContext(Hyper(float(group["lr"]), beta1, beta2, group["eps"], decay), group["step"])
        new = self._formula.forward(p.reshape(-1), m.reshape(-1), v.reshape(-1), ctx)
        p.copy_(new.view_as(p))
        state["exp_avg"].copy_(m)  # rounded after use where moments are stored in 16 bits
        state["exp_avg_sq"].copy_(v)


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


def apex_fused_adam() -> type[FusedAdam]:
    """The same as Apex has it."""
    kind = type("FusedAdam", (FusedAdam,), {"library": "apex", "__module__": "apex.optimizers.fused_adam"})
    return kind
