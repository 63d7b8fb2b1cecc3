"""FusedAdam of TransformerEngine and Apex, recognised without importing either.

They count steps per parameter group, not per parameter, and go on counting where a parameter had no gradient and was
left as it was. One invariant: a parameter's own counter moves exactly when the step wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

Library = Literal["te", "apex"]

_MODULES: Mapping[str, Library] = {"transformer_engine": "te", "apex": "apex"}
_PLAIN = (torch.float32, torch.bfloat16)
"""What moments may be stored as: FP16 and FP8 ones are scaled by a factor kept elsewhere."""


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
    if getattr(optimizer, "store_param_remainders", False):
        return "store_param_remainders=True keeps masters as 16-bit weights and remainders"
    if getattr(optimizer, "master_weights", False):
        return "master_weights=True keeps the FP32 weights inside the optimizer"
    for name, dtype in (getattr(optimizer, "name_to_dtype_map", None) or {}).items():
        if name in ("exp_avg", "exp_avg_sq") and dtype not in _PLAIN:
            return f"{name} is stored as {str(dtype).removeprefix('torch.')}, with a scale"
    if isinstance(group["lr"], torch.Tensor):
        return "its learning rate is a tensor"
    return None


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
            self._still = {id(p) for p in params if p.grad is None and getattr(p, "decoupled_grad", None) is None}

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
