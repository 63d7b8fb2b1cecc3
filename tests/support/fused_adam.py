"""A FusedAdam for CPUs: what TransformerEngine's and Apex's optimizers look like from outside, and the arithmetic of
their kernels, emulated. Counted per group; parameters without a gradient are left alone while the count goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.optimizers import registry
from engine.optimizers.base import Hyper, StepContext

LARGEST_FP16 = torch.finfo(torch.float16).max / 2


def stored_moment(x: torch.Tensor, dtype: torch.dtype, *, divide: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 `x` as `dtype` stores it, and its scale (FP32, one element): FP16 is scaled to half of its range, by a
    reciprocal or (`divide`) a quotient. A scale of 0, infinity or NaN stores nothing but zeros, as the originals do."""
    if dtype != torch.float16:
        return x.to(dtype), torch.ones(1)
    scale = (x.abs().max() if x.numel() else torch.zeros(())).reshape(1) / LARGEST_FP16
    if divide and bool(scale > 0):
        return (x / scale).to(dtype), scale
    return (x * torch.where(scale > 0, scale.reciprocal(), torch.zeros(1))).to(dtype), scale


def loaded_moment(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The FP32 values that the next step starts from."""
    return stored.float() * scale if stored.dtype == torch.float16 else stored.float()


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 → BF16 weight and int16 remainder, as the kernel does it: 16-bit halves, the upper one counted up where the
    lower one is negative, all of it wrapping."""
    halves = master.contiguous().view(torch.int16).reshape(*master.shape, 2)
    low, high = halves[..., 0].clone(), halves[..., 1].clone()
    high = torch.where(low < 0, high + 1, high)
    return high.view(torch.bfloat16), low


def joined_master(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The master that `split_master` took apart."""
    high = weight.contiguous().view(torch.int16)
    high = torch.where(low < 0, high - 1, high)
    return torch.stack([low, high], dim=-1).view(torch.float32).reshape(weight.shape)


class FusedAdam(torch.optim.Optimizer):
    """`library` is te or apex; `moments` is the dtype exp_avg and exp_avg_sq are stored in, or one for each."""

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
        moments: torch.dtype | tuple[torch.dtype, torch.dtype] = torch.float32,
        bias_correction: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        first, second = moments if isinstance(moments, tuple) else (moments, moments)
        self.name_to_dtype_map = {"exp_avg": first, "exp_avg_sq": second, "master_param": master_weight_dtype}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._formula = registry.get(f"fused-adam/{self.library}{'-fma' if contracted else ''}")

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """What the first step would do."""
        state = self.state[param]
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(param, dtype=self.name_to_dtype_map[key])
            if state[key].dtype != torch.float32:
                self._scales.setdefault(param, {})[key] = torch.ones(1)
        if self.master_weights:
            if store_param_remainders:
                state["master_param"] = torch.zeros_like(param, dtype=torch.int16)
            else:
                state["master_param"] = param.detach().clone().to(self.name_to_dtype_map["master_param"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                split = self.store_param_remainders and p.dtype == torch.bfloat16
                if not self.state[p]:
                    self.initialize_state(p, split)
                assert set(self.state[p]) <= {"exp_avg", "exp_avg_sq", "master_param"}, "a state the original rejects"
                for key in ("exp_avg", "exp_avg_sq"):
                    assert self.state[p][key].dtype == self.name_to_dtype_map[key]
                grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                if grad is not None:
                    self._step(p, grad.float(), group, split=split)

    def _step(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], *, split: bool) -> None:
        state = self.state[p]
        # FP32 parameters are updated in place, whatever else the state holds.
        in_state = self.master_weights and p.dtype != torch.float32
        if in_state:
            master = joined_master(p, state["master_param"]) if split else state["master_param"]
        else:
            master = p.detach().float()
        beta1, beta2 = group["betas"]
        decay = float(group["weight_decay"])
        if not self.adam_w_mode:
            grad, decay = grad + decay * master, 0.0
        scales = self._scales.get(p, {})
        one = torch.ones(1)
        m = loaded_moment(state["exp_avg"], scales.get("exp_avg", one)) * beta1 + (1 - beta1) * grad
        v = loaded_moment(state["exp_avg_sq"], scales.get("exp_avg_sq", one)) * beta2 + (1 - beta2) * grad * grad
        ctx = StepContext(Hyper(float(group["lr"]), beta1, beta2, group["eps"], decay), group["step"])
        new = self._formula.forward(master.reshape(-1), m.reshape(-1), v.reshape(-1), ctx).view_as(p)
        for key, value in (("exp_avg", m), ("exp_avg_sq", v)):  # rounded after use where stored in 16 bits
            kept, scale = stored_moment(value, state[key].dtype)
            state[key].copy_(kept)
            if key in scales:
                scales[key].copy_(scale)
        if split:
            weight, remainder = split_master(new)
            p.copy_(weight)
            state["master_param"].copy_(remainder)
        else:
            p.copy_(new)
            if in_state:
                state["master_param"].copy_(new)


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


def apex_fused_adam() -> type[FusedAdam]:
    """The same as Apex has it."""
    kind = type("FusedAdam", (FusedAdam,), {"library": "apex", "__module__": "apex.optimizers.fused_adam"})
    kind.initialize_state = None  # type: ignore[assignment]
    return kind
