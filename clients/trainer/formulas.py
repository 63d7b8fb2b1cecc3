"""Which formula a torch optimizer's group runs, and the hyperparameters its last step used.

One invariant: the answer is the one torch itself would give. Where torch picks an implementation by default (single
tensor, foreach or fused), the same torch function is asked, not a copy of its rule.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from clients.protocol import HyperSpec
from clients.trainer.fused import begin_fused_state, fused_library, fused_reason
from engine.errors import InvalidInput, UnsupportedOptimizer

Group = dict[str, Any]
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

_REMEDY = (
    "Pass detector='snapshot' (keeps the previous BF16 weights in the daemon) or detector='dense' (sends everything), "
    "for all tensors or as a mapping from tensor name; both work with any optimizer."
)


def unsupported_reason(optimizer: torch.optim.Optimizer, group: Group) -> str | None:
    """Why no formula covers this group, or None when one does."""
    if fused_library(optimizer) is not None:
        return fused_reason(optimizer, group)
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return f"{kind.__module__}.{kind.__qualname__} is not torch.optim.Adam or AdamW"
    base = torch.optim.AdamW if isinstance(optimizer, torch.optim.AdamW) else torch.optim.Adam
    if inspect.unwrap(kind.step) is not inspect.unwrap(base.step):
        return f"{kind.__module__}.{kind.__qualname__} overrides step()"
    if group.get("differentiable"):
        return "differentiable=True computes the step in another order"
    if device_type(group) == "cuda":
        return _cuda_reason(group)
    if group.get("capturable"):
        return "capturable=True is not run on the CPU by torch"
    if isinstance(group["lr"], torch.Tensor) and group["lr"].dtype not in (torch.float32, torch.float64):
        return f"its learning rate is a tensor of {group['lr'].dtype}"
    if any(isinstance(b, torch.Tensor) for b in group["betas"]):
        return "its betas are tensors"
    if device_type(group) == "mixed":
        return "its parameters lie on several kinds of devices"
    return None


def device_type(group: Group) -> str:
    """Where the group's parameters lie: `cpu`, `cuda`, or `mixed`."""
    kinds = {p.device.type for p in group["params"]}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "cpu"


def _cuda_reason(group: Group) -> str | None:
    """Why no formula covers this group on a CUDA device, or None."""
    how, lr = implementation(group), group["lr"]
    if any(isinstance(b, torch.Tensor) for b in group["betas"]):
        return "its betas are tensors"
    if group.get("capturable") and how == "single":
        return "capturable=True with foreach=False computes the step in another order"
    if isinstance(lr, torch.Tensor) and not (how == "fused" or group.get("capturable")):
        return "its learning rate is a tensor, but it is neither fused nor capturable"
    if isinstance(lr, torch.Tensor) and lr.dtype != torch.float32:
        return f"its learning rate is a tensor of {lr.dtype}"
    return None


def formula_name(optimizer: torch.optim.Optimizer, group: Group) -> str:
    """The registry name of the group's formula, for example `torch-adamw/cpu/single`.

    Adam and AdamW, coupled decay, AMSGrad and `maximize` share formulas: they differ in how m and v come about and in
    `HyperSpec.weight_decay`, not in how θ follows from m and v. UnsupportedOptimizer if there is none.
    """
    reason = unsupported_reason(optimizer, group)
    if reason is not None:
        raise UnsupportedOptimizer(f"no formula undoes this optimizer's step: {reason}.", remedy=_REMEDY)
    if (library := fused_library(optimizer)) is not None:
        return f"fused-adam/{library}"
    kind = device_type(group)
    if kind == "cuda":
        how = implementation(group)
        return f"torch-adamw/cuda/{'capturable' if group.get('capturable') and how != 'fused' else how}"
    suffix = "-tensor-lr" if _computes_in_fp32(group["lr"]) else ""
    return f"torch-adamw/cpu/{implementation(group)}{suffix}"


def _computes_in_fp32(lr: float | torch.Tensor) -> bool:
    """Whether torch does the arithmetic on `lr` in FP32. A 0-dim FP64 tensor gives what a float gives."""
    return isinstance(lr, torch.Tensor) and lr.dtype != torch.float64


def implementation(group: Group) -> str:
    """`single`, `foreach` or `fused`: what torch runs for this group."""
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        params = [p for p in group["params"] if p.requires_grad]
        _, foreach = _default_to_fused_or_foreach(params, bool(group.get("differentiable")), use_fused=False)
        if foreach and isinstance(group["lr"], torch.Tensor) and not group.get("capturable"):
            foreach = False
    if fused:
        return "fused"
    return "foreach" if foreach else "single"


def is_decoupled(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Whether weight decay acts on θ directly (AdamW) and not through the gradient."""
    if fused_library(optimizer) is not None:
        return bool(getattr(optimizer, "adam_w_mode", True))
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def hyper_of(optimizer: torch.optim.Optimizer, group: Group) -> HyperSpec:
    """The group's hyperparameters as they stand now. Call it inside `step()`, before a scheduler changes them.

    A tensor lr is reported as the FP32 value it holds, a FP64 one as a float. InvalidInput for values no step can be
    undone with: lr·wd >= 1 with decoupled decay, or anything not finite.
    """
    lr_raw = group["lr"]
    lr_is_tensor = _computes_in_fp32(lr_raw)
    lr = float(lr_raw.detach().to(torch.float32)) if lr_is_tensor else float(lr_raw)
    beta1, beta2 = (float(b) for b in group["betas"])
    decay = float(group["weight_decay"])
    if not math.isfinite(lr) or lr < 0:
        raise InvalidInput(
            f"learning rate {lr} is not a number a step can be undone with.", remedy="Check the schedule."
        )
    if is_decoupled(optimizer, group):
        if not lr * decay < 1:
            raise InvalidInput(
                f"lr·weight_decay = {lr * decay:g} is 1 or more: the step wipes out or flips the old weights, so it "
                "cannot be undone.",
                remedy="Lower the learning rate or the weight decay, or pass detector='dense' for these tensors.",
            )
    else:
        decay = 0.0
    return HyperSpec(
        lr=lr, beta1=beta1, beta2=beta2, eps=float(group["eps"]), weight_decay=decay, lr_is_tensor=lr_is_tensor
    )


def begin_state(optimizer: torch.optim.Optimizer, group: Group, param: torch.Tensor) -> None:
    """Create the state of a parameter that had no step yet, as the optimizer would at the first one.

    Same keys in the same order, same dtypes: only earlier. A parameter without gradient keeps step 0 and zeros, which
    is what the formula of "not advanced" and torch's own later start both mean.
    """
    state = optimizer.state[param]
    if state:
        return
    if fused_library(optimizer) is not None:
        begin_fused_state(optimizer, param)
        return
    state["step"] = new_step_counter(group, param)
    for key in MOMENTS[: 3 if group.get("amsgrad") else 2]:
        state[key] = torch.zeros_like(param.detach(), memory_format=torch.preserve_format)


def new_step_counter(group: Group, param: torch.Tensor) -> torch.Tensor:
    """The `step` tensor torch would create at the first step of `param`."""
    if group.get("fused"):
        return torch.zeros((), dtype=torch.float32, device=param.device)
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.zeros((), dtype=dtype, device=param.device if group.get("capturable") else "cpu")
