"""Run a BF16 model in FP32 arithmetic without a second copy of it, for CPUs that have no fast BF16 matrix product.

Invariant: the parameters stay the model's own BF16 tensors (the ones a receiver writes into); each layer widens its
weight for the moment it is used, so what is computed always comes from what is installed.
"""

from __future__ import annotations

import torch
from torch import nn


class WideningLinear(nn.Module):
    """A linear layer that shares another's BF16 parameters and computes in FP32."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight = inner.weight
        self.bias = inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x, self.weight.float(), bias)


class WideningEmbedding(nn.Module):
    """An embedding that shares another's BF16 weight and returns FP32 vectors."""

    def __init__(self, inner: nn.Embedding) -> None:
        super().__init__()
        self.weight = inner.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight).float()


def widen_compute(model: nn.Module) -> None:
    """Replace, in place, every Linear and Embedding by its widening twin. Parameter names and storage do not change."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, WideningLinear(child))
            elif isinstance(child, nn.Embedding):
                setattr(parent, name, WideningEmbedding(child))
