"""The demo's last word: are the receivers' weights the trainer's, bit for bit?

It reads files the receivers wrote from their live parameters with safetensors; nothing of dte's own encoding, digests
or layouts takes part. Invariant: every parameter of the trainer is looked at, and anything missing or extra counts as
a difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Comparison:
    """What one receiver's copy looks like beside the trainer's weights."""

    receiver: str
    tensors: int
    elements: int
    differing_elements: int
    differing_tensors: tuple[str, ...]

    @property
    def bit_exact(self) -> bool:
        return not self.differing_tensors and self.tensors > 0


def compare(receiver: str, file: Path, parameters: Iterable[tuple[str, torch.Tensor]]) -> Comparison:
    """Compare the BF16 tensors in a safetensors `file` with the trainer's parameters as `.bfloat16()` casts them."""
    from safetensors import safe_open

    tensors = elements = differing = 0
    bad: list[str] = []
    with safe_open(file, framework="pt") as held:
        names = set(held.keys())
        for name, parameter in parameters:
            tensors += 1
            elements += parameter.numel()
            if name not in names:
                differing += parameter.numel()
                bad.append(name)
                continue
            names.discard(name)
            theirs = held.get_tensor(name)
            ours = parameter.detach().bfloat16()
            if theirs.dtype != torch.bfloat16 or theirs.shape != ours.shape:
                differing += parameter.numel()
                bad.append(name)
                continue
            count = int((theirs.view(torch.int16) != ours.view(torch.int16)).sum())
            if count:
                differing += count
                bad.append(name)
    bad += sorted(names)
    return Comparison(receiver, tensors, elements, differing, tuple(bad))
