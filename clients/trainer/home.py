"""Where training keeps a tensor: how to see its memory, and how to put other memory under it.

One invariant: the object that the optimizer and the model know (`Home.param`) stays the same; only the memory under it
changes, and it holds the same bits before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Home(Protocol):
    """One tensor of the trainer. Pieces of it count its elements in memory order."""

    @property
    def param(self) -> torch.Tensor:
        """What the optimizer keys its state by; a DTensor where training shards with those."""

    def memory(self) -> torch.Tensor:
        """The plain dense tensor on this rank that holds the bits now, padding included."""

    def replace(self, memory: torch.Tensor) -> None:
        """Let training go on in `memory`: same shape, strides, dtype and bits as `memory()`."""


@dataclass(frozen=True)
class PlainHome:
    """A tensor or parameter whose own storage is the memory."""

    param: torch.Tensor

    def memory(self) -> torch.Tensor:
        return self.param

    def replace(self, memory: torch.Tensor) -> None:
        self.param.data = memory


@dataclass(frozen=True)
class StateHome:
    """A tensor in an optimizer's state of `param`: masters that the optimizer keeps itself."""

    optimizer: torch.optim.Optimizer
    param: torch.Tensor
    key: str

    def memory(self) -> torch.Tensor:
        """Empty where the state is gone."""
        value = self.optimizer.state[self.param].get(self.key)
        return torch.empty(0) if value is None else local_of(value)

    def replace(self, memory: torch.Tensor) -> None:
        put_local(self.optimizer.state[self.param], self.key, memory)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """This rank's plain tensor of an optimizer state entry, which is a DTensor where parameters are."""
    local: torch.Tensor = getattr(value, "_local_tensor", value)
    return local


def put_local(state: dict[str, Any], key: str, memory: torch.Tensor) -> None:
    """Make `memory` what `local_of(state[key])` is."""
    value = state[key]
    if local_of(value) is value:
        state[key] = memory
    else:
        value._local_tensor = memory
