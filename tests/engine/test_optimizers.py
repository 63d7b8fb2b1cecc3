"""Formulas mirror the optimizers, and their intervals hold for every implementation they claim to cover."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidInput, UnsupportedOptimizer
from engine.optimizers import registry, selftest
from engine.optimizers.arithmetic import f32, flush, fma, ieee_sqrt
from engine.optimizers.base import Formula, Hyper, StepContext
from engine.optimizers.real import RealAdamW
from tests.engine.numerics_world import adversarial_grad, adversarial_theta, random_hyper, run_steps

CPU = [n for n in registry.names() if n.startswith("torch-adamw/cpu/")]
ELSEWHERE = [n for n in registry.names() if n not in CPU]
single = st.integers(0, 2**32 - 1).map(lambda b: np.array([b], np.uint32).view(np.float32)[0])
finite = single.filter(lambda x: bool(np.isfinite(x)))


def nearest_f32(x: Fraction) -> np.float32:
    """The FP32 value nearest to an exact number, ties to even, by definition."""
    guess = np.float32(float(x)) if abs(x) < Fraction(2) ** 200 else np.float32(math.copysign(np.inf, x))
    if not np.isfinite(guess):
        guess = np.float32(math.copysign(np.finfo(np.float32).max, x))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]

    def rank(c: np.float32) -> tuple[Fraction, int]:
        value = Fraction(float(c)) if np.isfinite(c) else Fraction(2) ** 128 * (1 if c > 0 else -1)
        return abs(value - x), int(c.view(np.uint32)) & 1

    return min(around, key=rank)


@settings(max_examples=400, deadline=None)
@given(finite, finite, finite)
def test_fma_rounds_the_exact_result_once(a: np.float32, b: np.float32, c: np.float32) -> None:
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    got = fma(torch.tensor([a]), torch.tensor([b]), torch.tensor([c])).numpy()[0]
    if exact == 0:
        assert got == 0
    else:
        assert got.view(np.uint32) == nearest_f32(exact).view(np.uint32)


@given(st.integers(0, 2**24 - 1), st.integers(0, 2**24 - 1), st.sampled_from([-1, 1]), st.integers(-30, 30))
def test_fma_survives_double_rounding_traps(a: int, b: int, sign: int, shift: int) -> None:
    """An addend far below the product decides a tie that FP64 alone would have rounded away."""
    x, y = np.float32(a), np.float32(b)
    z = np.float32(sign * math.ldexp(1, -60 + shift))
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    got = fma(torch.tensor([x]), torch.tensor([y]), torch.tensor([z])).numpy()[0]
    assert got == nearest_f32(exact)


@given(st.lists(st.integers(0, 0x7F7FFFFF), min_size=1, max_size=50))
def test_square_root_is_the_ieee_one(bits: list[int]) -> None:
    x = np.array(bits, np.uint32).view(np.float32)
    assert np.array_equal(ieee_sqrt(torch.from_numpy(x)).numpy(), np.sqrt(x))


def test_flush_keeps_signs_and_normals() -> None:
    x = torch.tensor([1e-40, -1e-40, 2.0**-126, -0.0, 1.0, float("inf")])
    y = flush(x)
    assert y.tolist() == [0.0, 0.0, 2.0**-126, 0.0, 1.0, float("inf")]
    assert torch.signbit(y).tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize("name", CPU)
def test_cpu_formulas_reproduce_torch_bit_for_bit(name: str) -> None:
    result = selftest.passes(registry.get(name))
    assert result.ok, result.detail


@pytest.mark.parametrize("name", CPU)
def test_forward_is_bit_exact_on_adversarial_steps(name: str) -> None:
    rng = np.random.default_rng(11)
    formula = registry.get(name)
    for first_step in (1, 5, 1000):
        hyper = random_hyper(rng, tensor_lr=name.endswith("tensor-lr"))
        theta, grads = adversarial_theta(1003, rng), [adversarial_grad(1003, rng) for _ in range(3)]
        for s in run_steps(formula, hyper, theta, grads, first_step=first_step):
            again = formula.forward(s.before, s.m, s.v, s.ctx)
            same = again.view(torch.int32) == s.theta.view(torch.int32)
            assert (same | (again.isnan() & s.theta.isnan())).all()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_formulas_of_other_devices_are_never_called_exact_here(name: str) -> None:
    result = selftest.passes(registry.get(name))
    assert not result.ok
    assert "not verifiable" in result.detail


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("earlier", [0, 700])
def test_the_self_test_takes_the_steps_that_the_optimizer_takes(name: str, earlier: int) -> None:
    formula = registry.get(name)
    assert isinstance(formula, selftest.HasRealOptimizer)
    options = formula.real_options(Hyper(3e-4, 0.9, 0.95, 1e-8, 0.1), torch.device("cpu"))
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(1001))
    ours = RealAdamW(param.detach().clone(), options, earlier_steps=earlier)
    optimizer = torch.optim.AdamW([param], **dataclasses.asdict(options))
    for number in range(3):
        param.grad = torch.randn(1001)
        if number == 0:
            optimizer.state[param] = {
                "step": torch.tensor(float(earlier)),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
        optimizer.step()
        ours.step(param.grad)
        state = optimizer.state[param]
        assert int(ours.step_count) == int(state["step"]) == earlier + number + 1
        pairs = [(ours.param, param.detach()), (ours.exp_avg, state["exp_avg"]), (ours.exp_avg_sq, state["exp_avg_sq"])]
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


@pytest.mark.parametrize("wrong", [n for n in CPU if "fused" not in n])
def test_the_self_test_notices_a_wrong_mirror(wrong: str) -> None:
    """The fused kernel takes IEEE roots, the others the vector library's: their formulas are not interchangeable."""
    if torch.equal(torch.sqrt(torch.arange(1, 99999).float()), ieee_sqrt(torch.arange(1, 99999).float())):
        pytest.skip("this build's square root is correctly rounded, so both mirrors are right")

    class Mixed:
        name = "mixed"
        device_type = "cpu"
        takes_tensor_lr = False
        forward = staticmethod(registry.get(wrong).forward)
        invert = staticmethod(registry.get(wrong).invert)
        real_options = staticmethod(registry.get("torch-adamw/cpu/fused").real_options)  # type: ignore[attr-defined]

    result = selftest.passes(Mixed())
    assert not result.ok
    assert "bit-exact" in result.detail


class AsCompiledElsewhere:
    """An independent FP32 emulation whose bias corrections and single operations may be off as the hardware's may."""

    def __init__(self, name: str, rng: np.random.Generator, *, pow_ulps: int, op_ulps: int) -> None:
        self.kind, self.fma = name.removesuffix("-fma"), name.endswith("-fma")
        self.rng, self.pow_ulps, self.op_ulps = rng, pow_ulps, op_ulps

    def powf(self, beta: float, step: int) -> np.float32:
        x = np.float32(np.float64(np.float32(beta)) ** step)
        for _ in range(abs(self.pow_ulps)):
            x = np.nextafter(x, np.float32(np.inf if self.pow_ulps > 0 else 0), dtype=np.float32)
        return x

    def loose(self, x: np.ndarray) -> np.ndarray:
        """An approximate division or root: up to `op_ulps` away."""
        shift = self.rng.integers(-self.op_ulps, self.op_ulps + 1, x.shape)
        bits = x.astype(np.float32).view(np.int32).astype(np.int64)
        usable = np.isfinite(x) & (np.abs(x) > 1e-30)
        return np.where(usable, bits + shift, bits).astype(np.int32).view(np.float32)

    def step(self, theta: np.ndarray, m: np.ndarray, v: np.ndarray, ctx: StepContext) -> np.ndarray:
        h, f = ctx.hyper, np.float32
        lr, wd, eps = f(h.lr), f(h.weight_decay), f(h.eps)
        bias1, bias2 = f(1) - self.powf(h.beta1, ctx.step), f(1) - self.powf(h.beta2, ctx.step)
        double_bias1, double_root2 = 1 - h.beta1**ctx.step, (1 - h.beta2**ctx.step) ** 0.5
        if self.kind.startswith("fused-adam"):
            r = self.loose(self.loose(m / bias1) / (self.loose(np.sqrt(self.loose(v / bias2))) + eps))
            if self.fma:
                return self.fused(-lr, self.fused(wd, theta, r), theta)
            return theta - lr * (r + wd * theta)
        if self.kind == "torch-adamw/cuda/fused":
            decayed = theta
            if h.weight_decay:
                decayed = self.fused(-(lr * wd), theta, theta) if self.fma else theta - lr * wd * theta
            return decayed - lr / bias1 * m / (np.sqrt(v) / np.sqrt(bias2) + eps)
        decayed = theta * f(1 - h.lr * h.weight_decay) if h.weight_decay else theta
        if self.kind == "torch-adamw/cuda/capturable":
            den = (np.sqrt(v) / np.sqrt(bias2) + eps) / (f(1) / ((self.powf(h.beta1, ctx.step) - f(1)) / lr))
            return decayed + m / den
        s, root2 = f(h.lr / double_bias1), f(double_root2)
        den = np.sqrt(v) * (f(1) / root2) + eps if self.kind.endswith("single") else np.sqrt(v) / root2 + eps
        if self.fma or self.kind.endswith("single"):
            return self.fused(-s, m / den, decayed)
        return decayed + -s * (m / den)

    @staticmethod
    def fused(a: np.float32, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (np.float64(a) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def emulated_step(
    name: str, seed: int, *, pow_ulps: int = 0, op_ulps: int = 0
) -> tuple[Formula, StepContext, list[torch.Tensor], torch.Tensor]:
    rng = np.random.default_rng([seed, len(name)])
    hyper = Hyper(
        lr=float(rng.choice([1e-6, 1e-5, 1e-3, 0.1])),
        beta1=0.9,
        beta2=float(rng.choice([0.95, 0.999, 0.9999])),
        eps=float(rng.choice([1e-8, 1e-6])),
        weight_decay=float(rng.choice([0.0, 0.01, 1.0])),
    )
    n = 4096
    theta = adversarial_theta(n, rng, finite=True).numpy()
    m = (rng.normal(0, 1, n) * 10.0 ** rng.uniform(-9, 0, n)).astype(np.float32)
    v = (m.astype(np.float64) ** 2 * 10.0 ** rng.uniform(-1, 3, n)).astype(np.float32)
    ctx = StepContext(hyper, int(rng.choice([1, 2, 9, 300, 5000])))
    device = AsCompiledElsewhere(name, rng, pow_ulps=pow_ulps, op_ulps=op_ulps)
    with np.errstate(all="ignore"):
        after = device.step(theta, m, v, ctx).astype(np.float32)
    return registry.get(name), ctx, [torch.from_numpy(x) for x in (after, m, v)], torch.from_numpy(theta)


@pytest.mark.parametrize("name", [n for n in ELSEWHERE if "apex" not in n])
def test_forward_agrees_with_an_independent_emulation(name: str) -> None:
    for seed in range(6):
        formula, ctx, (after, m, v), before = emulated_step(name, seed)
        mirrored = formula.forward(before, m, v, ctx)
        # NumPy's FP64 emulation of FMA rounds twice, which may differ once in some 2^29 operations.
        assert (mirrored.view(torch.int32) != after.view(torch.int32)).sum() <= 1


@pytest.mark.parametrize("pow_ulps", [-9, -1, 1, 9])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_interval_covers_inexact_powers_and_approximate_operations(name: str, pow_ulps: int) -> None:
    known = 0
    on_host = name.startswith("fused-adam")
    for seed in range(8):
        ulps = max(-2, min(2, pow_ulps)) if on_host else pow_ulps
        op_ulps = 2 if "apex" in name else 0
        formula, ctx, (after, m, v), before = emulated_step(name, seed, pow_ulps=ulps, op_ulps=op_ulps)
        interval = formula.invert(after, m, v, ctx)
        truth = before.double()
        assert ((interval.lo <= truth) & (truth <= interval.hi)).all()
        known += int(torch.isfinite(interval.lo).sum())
    assert known > 3 * 4096


def test_the_step_term_is_needed() -> None:
    """With β₂ = .9999 at step 1 the interval of the CPU order does not contain the truth of a fused CUDA step."""
    rng = np.random.default_rng(0)
    device = AsCompiledElsewhere("torch-adamw/cuda/fused", rng, pow_ulps=0, op_ulps=0)
    ctx = StepContext(Hyper(1e-3, 0.9, 0.9999, 1e-8, 0.01), 1)
    theta, m = rng.normal(0, 0.02, 4096).astype(np.float32), rng.normal(0, 1e-3, 4096).astype(np.float32)
    v = m * m
    after = torch.from_numpy(device.step(theta, m, v, ctx))
    state = (after, torch.from_numpy(m), torch.from_numpy(v))
    truth = torch.from_numpy(theta).double()

    def missed(name: str) -> int:
        interval = registry.get(name).invert(*state, ctx)
        return int(((truth < interval.lo) | (truth > interval.hi)).sum())

    assert missed("torch-adamw/cuda/fused") == 0
    assert missed("torch-adamw/cpu/fused") > 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_interval_covers_moments_stored_in_low_precision(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    formula = registry.get("torch-adamw/cpu/fused")
    ctx = StepContext(Hyper(1e-3, 0.9, 0.999, 1e-3, 0.1), 4)
    theta = torch.from_numpy(rng.normal(0, 0.02, 8192).astype(np.float32))
    m = torch.from_numpy((rng.normal(0, 1, 8192) * 10.0 ** rng.uniform(-6, 0, 8192)).astype(np.float32))
    v = m * m * 3
    interval = formula.invert(formula.forward(theta, m, v, ctx), m.to(dtype), v.to(dtype), ctx)
    truth = theta.double()
    assert ((interval.lo <= truth) & (truth <= interval.hi)).all()
    assert torch.isfinite(interval.lo).float().mean() > 0.3


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize(
    "hyper",
    [Hyper(0.1, 0.9, 0.999, 1e-8, 10.0), Hyper(1e-3, 0.9, 1.0, 1e-8, 0.0), Hyper(1e-40, 0.9, 0.999, 1e-8, 0.0)],
    ids=["lr·wd = 1", "no second bias correction", "subnormal step"],
)
def test_steps_that_cannot_be_undone_say_so(name: str, hyper: Hyper) -> None:
    x = torch.full((4,), 0.5)
    interval = registry.get(name).invert(x, x, x, StepContext(hyper, 3))
    width = interval.hi - interval.lo
    assert ((width > 1) | torch.isinf(interval.lo)).all()


def test_a_formula_of_ones_own_joins_its_own_registry_only() -> None:
    class Mine:
        name = "mine"
        forward = staticmethod(lambda theta_prev, m, v, ctx: theta_prev)
        invert = staticmethod(registry.get("fused-adam/te").invert)

    mine = registry.new_registry()
    formula = Mine()
    mine.register(formula)
    assert mine.get("mine") is formula
    assert isinstance(formula, Formula)
    with pytest.raises(InvalidInput):
        mine.register(formula)
    with pytest.raises(UnsupportedOptimizer) as refusal:
        registry.get("mine")
    assert "snapshot" in refusal.value.remedy


def test_names_are_the_documented_ones() -> None:
    expected = [f"torch-adamw/cpu/{i}{s}" for i in ("single", "foreach", "fused") for s in ("", "-tensor-lr")]
    expected += [f"torch-adamw/cuda/{i}{s}" for i in ("foreach", "fused", "capturable") for s in ("", "-fma")]
    expected += ["torch-adamw/cuda/single", *(f"fused-adam/{i}{s}" for i in ("te", "apex") for s in ("", "-fma"))]
    assert registry.names() == sorted(expected)
    assert f32(0.1) == float(np.float32(0.1))
