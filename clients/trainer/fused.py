"""FusedAdam of TransformerEngine and Apex, recognised without importing either.

They count steps per parameter group, not per parameter, and go on counting where a parameter had no gradient and was
left as it was. One invariant: a parameter's own counter moves exactly when the step wrote it.

TransformerEngine's can keep the FP32 masters of 16-bit parameters in its own state: whole, or as the lower 16 bits, of
which the BF16 parameter is the upper half. FP32 parameters it steps themselves, whatever the state holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from clients.trainer.home import local_of
from engine.errors import InvalidInput

Library = Literal["te", "apex"]

_MODULES: Mapping[str, Library] = {"transformer_engine": "te", "apex": "apex"}
MASTER = "master_param"
"""Where the state has masters, or what the parameter lacks of them."""
Held = Literal["whole", "remainder"]
_MOMENTS = ("exp_avg", "exp_avg_sq")
_READABLE = (torch.float32, torch.bfloat16, torch.float16)


def fused_library(optimizer: torch.optim.Optimizer) -> Library | None:
    """Whose FusedAdam this is, if it is one (or of a class derived from it)."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ == "FusedAdam":
            return _MODULES.get(kind.__module__.partition(".")[0])
    return None


def fused_reason(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str | None:
    """Why no formula covers this group of a FusedAdam, or None when one does."""
    if not group.get("bias_correction", True):
        return "bias_correction=False is not covered"
    if getattr(optimizer, "capturable", False):
        return "capturable=True computes the step in another order"
    dtypes = _dtypes(optimizer)
    if getattr(optimizer, "master_weights", False):
        if fused_library(optimizer) != "te" or MASTER not in dtypes:
            return "master_weights=True keeps the FP32 weights inside the optimizer, where they are not found"
        if dtypes[MASTER] != torch.float32:
            return (
                f"master_weight_dtype={dtypes[MASTER]} leaves no FP32 weights whose step could be undone "
                "(with torch.float32 it is)"
            )
    for name in _MOMENTS:
        if dtypes.get(name, torch.float32) not in _READABLE:
            return (
                f"{name} is stored as {str(dtypes[name]).removeprefix('torch.')}, and FP8 states are not read "
                f"({name}_dtype=torch.bfloat16 or torch.float16 are)"
            )
    if isinstance(group["lr"], torch.Tensor):
        return "its learning rate is a tensor"
    return None


def held_master(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Held | None:
    """What of `param`'s FP32 master the optimizer keeps in its state: all of it, or the lower half."""
    if fused_library(optimizer) != "te" or not getattr(optimizer, "master_weights", False):
        return None
    if _dtypes(optimizer).get(MASTER) != torch.float32 or param.dtype not in (torch.bfloat16, torch.float16):
        return None
    split = getattr(optimizer, "store_param_remainders", False) and param.dtype == torch.bfloat16
    return "remainder" if split else "whole"


def begin_fused_state(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> None:
    """Create the state of a parameter that had no step yet, by the optimizer's own means where it has any."""
    begin = getattr(optimizer, "initialize_state", None)
    if begin is None:
        for key in _MOMENTS:
            optimizer.state[param][key] = torch.zeros_like(param.detach(), dtype=torch.float32)
    elif "store_param_remainders" in inspect.signature(begin).parameters:
        begin(param, held_master(optimizer, param) == "remainder")
    else:
        begin(param)


def moment_scales(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, keys: Sequence[str]
) -> list[torch.Tensor | None]:
    """Of each moment that is stored divided by a factor, the factor: a FP32 tensor of one element. InvalidInput if it
    is not where TransformerEngine keeps it."""
    found: list[torch.Tensor | None] = []
    for key in keys:
        scale = None
        if fused_library(optimizer) == "te" and local_of(optimizer.state[param][key]).dtype == torch.float16:
            scales = getattr(optimizer, "_scales", {})
            scale = scales[param].get(key) if param in scales else None
            if not isinstance(scale, torch.Tensor) or scale.numel() != 1:
                raise InvalidInput(
                    f"{key} is stored in FP16, and its scale is not in the optimizer's _scales.",
                    remedy=f"Pass detector='snapshot', or store it otherwise ({key}_dtype=torch.bfloat16).",
                )
        found.append(scale)
    return found


def _dtypes(optimizer: torch.optim.Optimizer) -> Mapping[str, torch.dtype]:
    """What the states are stored as, where the optimizer says so."""
    return getattr(optimizer, "name_to_dtype_map", None) or {}


class GroupSteps:
    """Per-parameter step counters of optimizers that count per group."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = [o if fused_library(o) is not None else None for o in optimizers]
        self._counters: dict[int, int] = {}
        self._still: set[int] = set()
        for optimizer in self._optimizers:
            if optimizer is not None:
                self._count(optimizer)

    def counts(self, number: int) -> bool:
        """Whether optimizer `number` counts per group."""
        return self._optimizers[number] is not None

    def of(self, param: torch.Tensor) -> int:
        """The group's count at the last step that wrote `param`."""
        return self._counters.get(id(param), 0)

    def before(self, number: int) -> None:
        """In front of the optimizer's step: which parameters it will leave alone."""
        optimizer = self._optimizers[number]
        if optimizer is not None:
            params = (p for g in optimizer.param_groups for p in g["params"])
            gradient = "decoupled_grad" if getattr(optimizer, "use_decoupled_grad", False) else "grad"
            self._still = {id(p) for p in params if getattr(p, gradient, None) is None}

    def after(self, number: int) -> None:
        """Behind the optimizer's step."""
        optimizer = self._optimizers[number]
        if optimizer is not None:
            self._count(optimizer)
            self._still = set()

    def loaded(self, number: int) -> None:
        """The optimizer's state was loaded: every parameter may be at another step."""
        self._still = set()
        self.after(number)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            step = int(group.get("step", 0))
            for param in group["params"]:
                if id(param) not in self._still:
                    self._counters[id(param)] = step
