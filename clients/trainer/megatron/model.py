"""What the ranks' model chunks hold: parameters and buffers under the names that layout tables know.

One invariant: a name never depends on the wrappers around a chunk, and a layer's number is the whole model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.errors import InvalidInput

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_NOT_WEIGHTS = frozenset({"local_tokens_per_expert", "global_tokens_per_expert", "_extra_state"})


@dataclass(frozen=True)
class Named:
    """A parameter or buffer. `layer`: its layer's number in the whole model from 0, None outside the layers."""

    name: str
    tensor: torch.Tensor
    layer: int | None


@dataclass(frozen=True)
class BufferHome:
    """A buffer of a module, which may be another tensor tomorrow, and of another dtype: Megatron-Core holds a router's
    bias in 16 bits until the first forward pass. `dtype` is what is published."""

    module: torch.nn.Module
    key: str
    dtype: torch.dtype

    @property
    def param(self) -> torch.Tensor:
        return self.memory()

    def memory(self) -> torch.Tensor:
        buffer = self.module._buffers[self.key]
        assert buffer is not None
        return buffer if buffer.dtype == self.dtype else buffer.to(self.dtype)

    def replace(self, memory: torch.Tensor) -> None:
        self.module._buffers[self.key] = memory


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside the wrappers for data parallelism and 16-bit weights."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[Named]:
    """Every parameter of every chunk, shared ones once per chunk."""
    for chunk in chunks:
        numbers = _layer_numbers(chunk)
        for name, param in chunk.named_parameters():
            refuse_interleaved(name)
            yield Named(name, param, _layer_of(name, numbers))


def refuse_interleaved(name: str) -> None:
    """InvalidInput for the legacy form of grouped experts, hidden-major with all experts of a rank side by side: each
    of its elements' runs is so short that a slice for each would be too many."""
    if name.endswith((".experts.weight1", ".experts.weight2")):
        raise InvalidInput(
            f"{name}: experts in the legacy grouped form are not supported.",
            remedy="Train with moe_use_legacy_grouped_gemm=False (grouped experts of Transformer Engine), or with "
            "moe_grouped_gemm=False.",
        )


def buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[Named, torch.nn.Module, str]]:
    """Persistent buffers that are weights, with their module and key there. What only counts is left out."""
    for chunk in chunks:
        numbers = _layer_numbers(chunk)
        for prefix, module in chunk.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                if key in module._non_persistent_buffers_set or key in _NOT_WEIGHTS:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                yield Named(name, buffer, _layer_of(name, numbers)), module, key


def _layer_numbers(chunk: torch.nn.Module) -> dict[int, int]:
    """Number inside the chunk → number in the model, from what each layer says of itself."""
    layers = getattr(getattr(chunk, "decoder", None), "layers", ())
    return {i: int(layer.layer_number) - 1 for i, layer in enumerate(layers)}


def _layer_of(name: str, numbers: dict[int, int]) -> int | None:
    found = _LAYER.match(name)
    if found is None:
        return None
    local = int(found[1])
    if local not in numbers:
        raise InvalidInput(f"{name} belongs to a layer that does not say its number.")
    return numbers[local]
