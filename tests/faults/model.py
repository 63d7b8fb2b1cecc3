"""The tiny policy that the fault tests train: its tensors, how ranks split them, and its loss."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.nn import functional

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (512, 128),
    "up.weight": (640, 128),
    "up.bias": (640,),
    "down.weight": (128, 640),
    "norm.weight": (128,),
    "head.weight": (512, 128),
}
TOTAL = sum(prod(s) for s in SHAPES.values())
CUTS: dict[int, list[int]] = {1: [0, TOTAL], 2: [0, 161_803, TOTAL], 3: [0, 100_003, 214_013, TOTAL]}


@dataclass(frozen=True)
class Piece:
    """A run of one tensor: `start` in the tensor, `at` in the flat order of all tensors."""

    name: str
    start: int
    at: int
    size: int


def pieces(world: int, rank: int) -> list[Piece]:
    """What a rank owns: a run of the flat order, cut at tensor borders."""
    low, high = CUTS[world][rank : rank + 2]
    out, at = [], 0
    for name, shape in SHAPES.items():
        first, last = max(low, at), min(high, at + prod(shape))
        if first < last:
            out.append(Piece(name, first - at, first, last - first))
        at += prod(shape)
    return out


def initial(seed: int) -> torch.Tensor:
    """FP32 weights in flat order."""
    weights = torch.randn(TOTAL, generator=torch.Generator().manual_seed(seed)) * 0.05
    weights[norm_range()] = 1.0
    return weights


def norm_range() -> slice:
    at = 0
    for name, shape in SHAPES.items():
        if name == "norm.weight":
            return slice(at, at + prod(shape))
        at += prod(shape)
    raise AssertionError


def gradient(flat: torch.Tensor, step: int) -> torch.Tensor:
    """The loss' gradient at `flat` on the batch of `step`."""
    leaf = flat.clone().requires_grad_()
    tensors, at = {}, 0
    for name, shape in SHAPES.items():
        tensors[name] = leaf[at : at + prod(shape)].view(shape)
        at += prod(shape)
    generator = torch.Generator().manual_seed(1000 + step)
    tokens, labels = torch.randint(0, 512, (2, 48), generator=generator)
    x = tensors["embed.weight"][tokens]
    x = x + functional.gelu(x @ tensors["up.weight"].T + tensors["up.bias"]) @ tensors["down.weight"].T
    logits = (x * tensors["norm.weight"]) @ tensors["head.weight"].T
    (found,) = torch.autograd.grad(functional.cross_entropy(logits, labels), leaf)
    return found
