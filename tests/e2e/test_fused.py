"""FusedAdam of TransformerEngine and Apex: recognised, undone, and counted per parameter, not per group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clients.protocol import JobState
from clients.trainer import TorchSource
from engine.errors import UnsupportedOptimizer
from tests.e2e.line import Line
from tests.support.fused_adam import FusedAdam, apex_fused_adam

KINDS: dict[str, dict[str, Any]] = {
    "te": {"lr": 1e-5, "weight_decay": 0.3},
    "te-fma": {"lr": 3e-4, "weight_decay": 0.01, "contracted": True},
    "te-l2": {"lr": 1e-4, "weight_decay": 0.2, "adam_w_mode": False},
    "te-bf16-moments": {"lr": 1e-5, "weight_decay": 0.1, "moments": torch.bfloat16},
    "apex": {"lr": 2e-5, "weight_decay": 0.1, "eps": 1e-15},
}


class Two(torch.nn.Module):
    """One layer that is used in every step, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.always = torch.nn.Linear(301, 257, bias=False)
        self.sometimes = torch.nn.Linear(67, 129, bias=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fused_steps_arrive(url: str, kind: str) -> None:
    torch.manual_seed(3)
    model = Two()
    make = apex_fused_adam() if kind == "apex" else FusedAdam
    optimizer = make(model.parameters(), **KINDS[kind])
    with Line(url, model, optimizer) as line:
        for step in range(1, 6):
            for p in model.parameters():
                p.grad = torch.randn_like(p) * 10.0 ** (step - 4)
            if step in (2, 3):
                model.sometimes.weight.grad = None
            optimizer.step()
            job = line.ship()
            assert job.state is JobState.COMMITTED
            # No real kernel runs here, so replay drops nothing and a tile may stay unresolved; but none is wrong.
            assert job.detail.get("mismatched_tiles", 0) == 0, job.detail
            detected, jumped = job.detail.get("slices_detected", 0), job.detail.get("slices_unjoined", 0)
            assert (detected, jumped) == {2: (1, 0), 3: (1, 0), 4: (1, 1)}.get(step, (2, 0)), (step, job.detail)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bias_correction": False}, "bias_correction"),
        ({"capturable": True}, "capturable"),
        ({"moments": torch.float16}, "float16"),
    ],
)
def test_what_no_formula_covers_is_refused_with_a_way_out(options: dict[str, Any], said: str) -> None:
    model = Two()
    source = TorchSource(model, FusedAdam(model.parameters(), **options), run="fused", daemon="http://127.0.0.1:9")
    with pytest.raises(UnsupportedOptimizer, match=said) as refused:
        source.register()
    assert "snapshot" in refused.value.remedy
