"""Trainers for the numerics tests: adversarial states, real torch steps, and emulated steps of devices not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.bf16 import U16, round_to_bf16_bits
from engine.detect.base import SliceGeometry
from engine.detect.classify import Verdicts
from engine.layout.algebra import contiguous
from engine.optimizers.base import Formula, Hyper, StepContext
from engine.optimizers.selftest import HasRealOptimizer
from engine.proof import Resolved


@dataclass(frozen=True)
class Step:
    """One optimizer step: the weights before it, and the state after it."""

    before: torch.Tensor
    theta: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    ctx: StepContext

    @property
    def old_bits(self) -> U16:
        return round_to_bf16_bits(self.before)

    @property
    def new_bits(self) -> U16:
        return round_to_bf16_bits(self.theta)


def adversarial_theta(n: int, rng: np.random.Generator, *, finite: bool = False) -> torch.Tensor:
    """Normal weights, every exponent, ±3 ulp around BF16 rounding boundaries, subnormals, ±0, |θ| ≈ lr, BF16 values."""
    k = n // 8

    def near_boundary(low: int, high: int, size: int) -> np.ndarray:
        bits = (rng.integers(low, high, size) << 16) + 0x8000 + rng.integers(-3, 4, size)
        return bits.astype(np.uint32).view(np.float32) * rng.choice([-1, 1], size).astype(np.float32)

    parts = [
        rng.normal(0, 0.02, k),
        np.ldexp(rng.uniform(1, 2, k), rng.integers(-126, 127, k)) * rng.choice([-1, 1], k),
        near_boundary(0x0001, 0x7F7F, k),
        near_boundary(0x3000, 0x4100, k),
        rng.integers(0, 1 << 23, k).astype(np.uint32).view(np.float32) * rng.choice([-1, 1], k),
        np.where(rng.random(k) < 0.5, 0.0, -0.0),
        rng.normal(0, 1e-5, k),
        (rng.integers(0x3800, 0x3F80, n - 7 * k) << 16).astype(np.uint32).view(np.float32),
    ]
    x = np.concatenate([p.astype(np.float32) for p in parts])
    if finite:
        x = np.where(np.abs(x) > 1e30, np.float32(0.5), x)
    else:
        at = rng.integers(0, n, 12)
        x[at] = np.repeat(np.array([np.inf, -np.inf, np.nan], np.float32), 4)
    return torch.from_numpy(x[rng.permutation(n)].astype(np.float32))


def adversarial_grad(n: int, rng: np.random.Generator, *, finite: bool = False) -> torch.Tensor:
    """Fifteen decades of gradients, ±0, subnormals, huge ones; every 11th element is never touched (m = v = 0)."""
    g = rng.normal(0, 1, n) * 10.0 ** rng.uniform(-12, 3, n)
    pick = rng.random(n)
    for low, high, value in ((0, 0.15, 0.0), (0.15, 0.2, -0.0), (0.2, 0.25, 1e-42), (0.25, 0.28, 3e-20)):
        g = np.where((pick >= low) & (pick < high), value, g)
    if not finite:
        g = np.where((pick >= 0.28) & (pick < 0.30), 1e18 * rng.normal(0, 1, n), g)
        g = np.where((pick >= 0.30) & (pick < 0.3005), np.inf, np.where((pick >= 0.3005) & (pick < 0.301), np.nan, g))
    g[::11] = 0.0
    return torch.from_numpy(g.astype(np.float32))


def random_hyper(rng: np.random.Generator, *, tensor_lr: bool = False) -> Hyper:
    """One point of the adversarial grid."""
    lr = float(rng.choice([0.0, 1e-12, 1e-6, 1e-5, 1e-3, 0.5, 10.0]))
    return Hyper(
        lr=float(np.float32(lr)) if tensor_lr else lr,
        beta1=float(rng.choice([0.0, 0.8, 0.9, 0.95])),
        beta2=float(rng.choice([0.9, 0.95, 0.99, 0.999, 0.9999])),
        eps=float(rng.choice([0.0, 1e-15, 1e-8, 1e-6, 1e-3, 1.0])),
        weight_decay=float(rng.choice([0.0, 0.01, 0.1, 1.0, 50.0])),
        lr_is_tensor=tensor_lr,
    )


def run_steps(
    formula: Formula,
    hyper: Hyper,
    theta: torch.Tensor,
    grads: list[torch.Tensor],
    *,
    first_step: int = 1,
) -> Iterator[Step]:
    """Steps of the real optimizer where it runs here, else of the formula's own emulation of it."""
    if isinstance(formula, HasRealOptimizer) and formula.device_type == "cpu":
        yield from _real_steps(formula, hyper, theta, grads, first_step)
        return
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    for i, g in enumerate(grads):
        m = m * hyper.beta1 + g * (1 - hyper.beta1)
        v = v * hyper.beta2 + g * g * (1 - hyper.beta2)
        ctx = StepContext(hyper, first_step + i)
        after = formula.forward(theta, m, v, ctx)
        yield Step(theta, after, m, v, ctx)
        theta = after


def _real_steps(
    formula: HasRealOptimizer, hyper: Hyper, theta: torch.Tensor, grads: list[torch.Tensor], first_step: int
) -> Iterator[Step]:
    param = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.AdamW([param], **dataclasses.asdict(formula.real_options(hyper, param.device)))
    param.grad = torch.zeros_like(param)
    optimizer.state[param] = {
        "step": torch.tensor(float(first_step - 1)),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
    }
    for i, g in enumerate(grads):
        before = param.detach().clone()
        param.grad = g.clone()
        optimizer.step()
        state = optimizer.state[param]
        assert int(state["step"].item()) == first_step + i
        yield Step(
            before,
            param.detach().clone(),
            state["exp_avg"].clone(),
            state["exp_avg_sq"].clone(),
            StepContext(hyper, first_step + i),
        )


def regular_world(
    formula: Formula,
    n: int,
    rng: np.random.Generator,
    *,
    hyper: Hyper | None = None,
    steps: int = 3,
    first_step: int = 2000,
) -> Step:
    """The last of a few steps on ordinary weights, none so near 0 that the step swallows it: nothing is unknowable.

    Late steps, because early ones leave formulas with an uncertain bias correction too many ambiguous elements.
    """
    hyper = hyper or Hyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
    size = np.abs(rng.normal(0, 0.02, n)) + 1e-4
    theta = torch.from_numpy((size * rng.choice([-1, 1], n)).astype(np.float32))
    grads = [torch.from_numpy(rng.normal(0, 1e-3, n).astype(np.float32)) for _ in range(steps)]
    return list(run_steps(formula, hyper, theta, grads, first_step=first_step))[-1]


def slice_geometry(n: int, *, name: str = "model.weight", offset: int = 0) -> SliceGeometry:
    """A contiguous slice."""
    return SliceGeometry(name, contiguous(offset, n, offset + n))


def assert_verdicts_hold(verdicts: Verdicts, old: U16, new: U16) -> None:
    """The zero-miss property, element by element."""
    assert np.array_equal(verdicts.new, new)
    known = ~(verdicts.unknown | verdicts.impossible)
    ambiguous = np.zeros(old.size, np.bool_)
    ambiguous[verdicts.ambiguous] = True
    silent = known & ~verdicts.changed & ~ambiguous
    missed = np.flatnonzero(silent & (old != new))
    assert missed.size == 0, f"{missed.size} changes missed, first at {missed[:5]}"
    told = known & verdicts.changed
    assert np.array_equal(verdicts.old[told], old[told]), "wrong old bits told as certain"
    assert not np.any(old[told] == new[told])
    for j, i in enumerate(verdicts.ambiguous):
        options = verdicts.amb_old[verdicts.amb_offsets[j] : verdicts.amb_offsets[j + 1]]
        assert old[i] in options, f"true old bits {old[i]:#06x} of element {i} are not among {options}"
        assert len(set(options.tolist())) == len(options) >= 2


def assert_exact_where_sparse(resolved: Resolved, old: U16, new: U16, *, tile: int, tile_start: int = 0) -> None:
    """In every tile that is not dense, the entries are exactly the true (rank, old, new)."""
    ranks = np.flatnonzero(old != new)
    inside = (ranks // tile >= tile_start) & (ranks // tile < tile_start + resolved.dense.size)
    ranks = ranks[inside]
    ranks = ranks[~resolved.dense[ranks // tile - tile_start]]
    assert np.array_equal(resolved.ranks, ranks)
    assert np.array_equal(resolved.old, old[ranks])
    assert np.array_equal(resolved.new, new[ranks])
