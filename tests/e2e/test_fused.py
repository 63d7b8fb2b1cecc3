"""FusedAdam of TransformerEngine and Apex: recognised, undone, and counted per parameter, not per group; with masters
split or in the optimizer's state, and moments of 16 bits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from clients.protocol import JobState
from clients.trainer import TorchSource
from clients.trainer.binding import Binding
from engine.errors import InvalidInput, UnsupportedOptimizer
from tests.e2e.line import Line
from tests.support.fused_adam import FusedAdam, apex_fused_adam

KINDS: dict[str, dict[str, Any]] = {
    "te": {"lr": 1e-5, "weight_decay": 0.3},
    "te-fma": {"lr": 3e-4, "weight_decay": 0.01, "contracted": True},
    "te-l2": {"lr": 1e-4, "weight_decay": 0.2, "adam_w_mode": False},
    "te-bf16-moments": {"lr": 1e-5, "weight_decay": 0.1, "moments": torch.bfloat16},
    "apex": {"lr": 2e-5, "weight_decay": 0.1, "eps": 1e-15},
}


_B16, _F16 = torch.bfloat16, torch.float16
AWARE: dict[str, dict[str, Any]] = {
    "split": {"store_param_remainders": True},
    "split-fma-l2": {"store_param_remainders": True, "contracted": True, "adam_w_mode": False, "weight_decay": 0.1},
    "split-bf16": {"store_param_remainders": True, "moments": _B16},
    "split-fp16": {"store_param_remainders": True, "moments": _F16},
    "split-fp16-bf16-decoupled": {
        "store_param_remainders": True, "moments": (_F16, _B16), "use_decoupled_grad": True, "weight_decay": 0.2,
    },
    "whole": {},
    "whole-bf16-fp16": {"moments": (_B16, _F16), "weight_decay": 0.01},
}  # fmt: skip
"""Options of FusedAdam with master_weights=True."""


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


class Aware(Two):
    """16-bit weights, and one FP32 parameter among them in the same group."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()
        self.norm = torch.nn.Parameter(1 + torch.randn(997) * 0.1)


def give(p: torch.nn.Parameter, grad: torch.Tensor | None, *, decoupled: bool) -> None:
    if decoupled:
        p.decoupled_grad = grad  # type: ignore[attr-defined]
    else:
        p.grad = None if grad is None else grad.to(p.dtype)


def half_way(optimizer: FusedAdam, model: torch.nn.Module) -> None:
    """Put masters on, and next to, the points half-way between two weights."""
    for p in model.parameters():
        low = optimizer.state[p].get("master_param")
        if low is not None and low.dtype == torch.int16:
            low.copy_(torch.randint(-1, 2, low.shape, dtype=torch.int16) + -0x8000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", AWARE)
def test_precision_aware_steps_arrive(url: str, kind: str) -> None:
    """Bit for bit the model's own weights, version by version; also those that come from several steps."""
    torch.manual_seed(11)
    model, options = Aware(), AWARE[kind]
    optimizer = FusedAdam(model.parameters(), **{"lr": 3e-6, "weight_decay": 0.05, "master_weights": True} | options)
    decoupled = options.get("use_decoupled_grad", False)
    exact = not {_B16, _F16} & set(optimizer.name_to_dtype_map.values())
    with Line(url, model, optimizer) as line:
        for step in range(1, 9):
            for p in model.parameters():
                grad = torch.randn(p.shape) * 10.0 ** (-1 - step % 2)
                give(p, None if step == 3 and p is model.sometimes.weight else grad, decoupled=decoupled)
            if step == 5:
                with line.source.mutating():
                    half_way(optimizer, model)
            optimizer.step()
            job = line.ship(publish=step not in (4, 6))
            assert job.state is (JobState.ACCUMULATED if step in (4, 6) else JobState.COMMITTED)
            assert job.detail.get("mismatched_tiles", 0) == 0, job.detail
            detected, jumped = job.detail.get("slices_detected", 0), job.detail.get("slices_unjoined", 0)
            if step > 1:  # before the second step it is not known yet whether a counter moves
                assert (detected, jumped) == {3: (2, 0), 4: (2, 1)}.get(step, (3, 0)), (step, job.detail)
            if step > 6 and exact:  # the tiles are told element by element
                assert job.detail["entries_found"] > 0, job.detail
                assert job.detail.get("dense_tiles", 0) < 3, job.detail


@pytest.mark.parametrize("remainders", [True, False])
def test_state_made_early_is_the_state_of_the_first_step(remainders: bool) -> None:
    """Training computes what it computes without us, from registration on."""
    runs = []
    for watched in (False, True):
        torch.manual_seed(5)
        model = Aware()
        optimizer = FusedAdam(
            model.parameters(), moments=(_B16, _F16), master_weights=True, store_param_remainders=remainders
        )
        source = TorchSource(model, optimizer, run="fused", daemon="http://127.0.0.1:9")
        plan = source._make_plan()
        binding = Binding(plan, [optimizer], [model])
        if watched:
            binding.move_in(lambda k: f"dte-fused-{os.getpid()}-{k}")
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        if watched:
            assert {(s.theta.dtype, s.remainder and s.remainder.dtype) for s in binding.specs()} == (
                {("bfloat16", "int16"), ("float32", None)} if remainders else {("float32", None)}
            )
            assert len(binding.scales()) == 3
            assert all(m == 1.0 and v not in (None, 1.0) for m, v in binding.scales())
            binding.move_out()
        runs.append([*model.parameters(), *(x for s in optimizer.state.values() for x in s.values())])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_masters_in_the_optimizer_that_are_stale_are_said(url: str) -> None:
    """Loading only the model's weights leaves whole masters behind; split ones have nothing to be stale."""
    for remainders in (False, True):
        model = Aware()
        optimizer = FusedAdam(model.parameters(), lr=1e-5, master_weights=True, store_param_remainders=remainders)
        with Line(url, model, optimizer) as line:
            loaded = {k: v * 2 for k, v in model.state_dict().items()}
            model.load_state_dict(loaded)
            if remainders:
                assert line.ship().state is JobState.COMMITTED
                continue
            with pytest.raises(InvalidInput, match="stale"):
                line.source.sync(1)
            with line.source.mutating():
                for p in model.parameters():
                    if p.dtype == _B16:
                        optimizer.state[p]["master_param"].copy_(p)
            assert line.ship(2).state is JobState.COMMITTED


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bias_correction": False}, "bias_correction"),
        ({"capturable": True}, "capturable"),
        ({"moments": torch.uint8}, "FP8"),
        ({"master_weights": True, "master_weight_dtype": torch.float16}, "master_weight_dtype=torch.float16"),
    ],
)
def test_what_no_formula_covers_is_refused_with_a_way_out(options: dict[str, Any], said: str) -> None:
    model = Two()
    source = TorchSource(model, FusedAdam(model.parameters(), **options), run="fused", daemon="http://127.0.0.1:9")
    with pytest.raises(UnsupportedOptimizer, match=said) as refused:
        source.register()
    assert "snapshot" in refused.value.remedy
