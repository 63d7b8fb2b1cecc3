"""Does a formula reproduce the real optimizer bit for bit, on this build and machine?

Invariant: `ok` is True only when steps of the *real* optimizer were reproduced bitwise here, for whole tensors as well
as for gathered elements (a vectorised square root may treat the two differently). Only then may replay drop elements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from engine.optimizers import registry
from engine.optimizers.base import Formula, Hyper, StepContext
from engine.optimizers.real import AdamWOptions, RealAdamW

_CASES = (
    (Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1), 0),
    (Hyper(lr=5e-6, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01), 0),
    (Hyper(lr=1e-2, beta1=0.85, beta2=0.9999, eps=1e-15, weight_decay=0.0), 1000),
)
_STEPS = 3
_NUMEL = 4099  # a multiple of no vector width


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """`ok`: bit-exact here. `detail` says what was compared, or why nothing could be."""

    ok: bool
    detail: str


@runtime_checkable
class HasRealOptimizer(Protocol):
    """A formula whose real implementation can run in this process, on devices of the type `device_type`."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""

    @property
    def takes_tensor_lr(self) -> bool:
        """Whether one formula stands for lr as a number and as a FP32 tensor."""

    def real_options(self, hyper: Hyper, device: torch.device) -> AdamWOptions:
        """How the optimizer is made, on this device."""


def passes(formula: Formula, device: str = "cpu") -> SelfTestResult:
    """Run the real optimizer on `device` for known steps and compare `formula.forward` with it, bit for bit."""
    at = torch.device(device)
    if not isinstance(formula, HasRealOptimizer) or formula.device_type != at.type:
        return SelfTestResult(
            False, f"{formula.name} is not verifiable here: its real optimizer does not run on {at.type}."
        )
    cases = [(hyper, earlier) for hyper, earlier in _CASES]
    if at.type != "cpu":  # a tensor lr is no formula of its own there
        cases += [(replace(hyper, lr_is_tensor=True), earlier) for hyper, earlier in _CASES if formula.takes_tensor_lr]
    for hyper, earlier_steps in cases:
        mismatch = _first_mismatch(formula, hyper, earlier_steps, at)
        if mismatch:
            return SelfTestResult(False, f"{formula.name}: {mismatch}")
    return SelfTestResult(True, f"{formula.name} reproduced {len(cases) * _STEPS} steps of torch {torch.__version__}.")


def choose(name: str, cuda_index: int | None) -> tuple[Formula, SelfTestResult]:
    """The formula called `name`, or its twin whose multiplications and additions the compiler contracted, if that is
    the one which reproduces the optimizer; and the result of the test. Their intervals are the same.

    `cuda_index`: the device that formulas of CUDA are tested on; None: there is none.
    """
    formula = registry.get(name)
    there = isinstance(formula, HasRealOptimizer) and formula.device_type == "cuda" and cuda_index is not None
    device = f"cuda:{cuda_index}" if there else "cpu"
    result = passes(formula, device)
    twin = f"{name}-fma"
    if not result.ok and twin in registry.names():
        contracted = registry.get(twin)
        if (second := passes(contracted, device)).ok:
            return contracted, second
    return formula, result


def _first_mismatch(formula: Formula, hyper: Hyper, earlier_steps: int, device: torch.device) -> str:
    """Empty when every step came out bitwise, else where it did not."""
    assert isinstance(formula, HasRealOptimizer)
    generator = torch.Generator().manual_seed(20240229)
    options = formula.real_options(hyper, device)
    is_tensor = isinstance(options.lr, torch.Tensor)
    rounded = replace(hyper, lr=float(torch.tensor(hyper.lr)) if is_tensor else hyper.lr, lr_is_tensor=is_tensor)
    param = (torch.randn(_NUMEL, generator=generator) * 0.02).to(device)
    # Late steps have other bias corrections; nothing else depends on the count.
    optimizer = RealAdamW(param, options, earlier_steps=earlier_steps)
    for _ in range(_STEPS):
        spread = 10.0 ** (torch.rand(_NUMEL, generator=generator) * 12 - 9)
        before = param.clone().cpu()
        optimizer.step((torch.randn(_NUMEL, generator=generator) * spread).to(device))
        ctx = StepContext(rounded, int(optimizer.step_count.item()))
        m, v, after = optimizer.exp_avg.cpu(), optimizer.exp_avg_sq.cpu(), param.cpu()
        if not _same_bits(formula.forward(before, m, v, ctx), after):
            return f"step {ctx.step} of {hyper} is not bit-exact."
        for pick in (torch.randperm(_NUMEL, generator=generator)[:777], torch.arange(5, 6), torch.arange(3, 16)):
            if not _same_bits(formula.forward(before[pick], m[pick], v[pick], ctx), after[pick]):
                return f"step {ctx.step} of {hyper} is not bit-exact for gathered elements."
    return ""


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
