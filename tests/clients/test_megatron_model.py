"""What a Megatron-Core chunk's parameters are called, without Megatron-Core."""

from __future__ import annotations

import pytest
import torch

from clients.trainer.megatron.model import parameters, unwrap
from engine.errors import InvalidInput


class Layer(torch.nn.Module):
    """Layer `number` (from 1, as Megatron-Core counts) with one parameter under `name`."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__()
        self.layer_number = number
        *path, leaf = name.split(".")
        module: torch.nn.Module = self
        for part in path:
            module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(2)))


def chunk(name: str, *numbers: int) -> torch.nn.Module:
    """A chunk with these layers, in two wrappers."""
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList(Layer(n, name) for n in numbers)
    for _ in range(2):
        outer = torch.nn.Module()
        outer.module = model
        model = outer
    return model


def test_layers_have_the_numbers_of_the_whole_model() -> None:
    found = list(parameters([unwrap(chunk("mlp.linear_fc2.weight", 3, 4))]))
    assert [(n.name, n.layer) for n in found] == [
        ("decoder.layers.0.mlp.linear_fc2.weight", 2),
        ("decoder.layers.1.mlp.linear_fc2.weight", 3),
    ]


@pytest.mark.parametrize("weight", ["weight1", "weight2"])
def test_legacy_grouped_experts_are_refused_by_name(weight: str) -> None:
    with pytest.raises(InvalidInput, match=f"experts.{weight}") as refused:
        list(parameters([unwrap(chunk(f"mlp.experts.{weight}", 1))]))
    assert "moe_grouped_gemm" in refused.value.remedy
