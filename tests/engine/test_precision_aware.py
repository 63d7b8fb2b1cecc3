"""Split masters and 16-bit moments: whatever a step rounds after use, no change is missed and no old bits are wrong."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.bf16 import U16, Rounding, join_master, round_to_bf16_bits
from engine.detect import backends, kernels
from engine.detect.base import TILE, Detection
from engine.detect.classify import classify
from engine.detect.cpu import pack_fast, pack_rounding, pack_step
from engine.detect.geometry import tile_digests
from engine.digest import DigestKey
from engine.optimizers import registry
from engine.optimizers.base import Hyper, StepContext
from engine.optimizers.bounds import fast_bound_of, moment_bound
from engine.optimizers.fused_adam import FusedAdam
from engine.proof import resolve
from tests.engine.numerics_world import (
    adversarial_grad,
    adversarial_theta,
    assert_exact_where_sparse,
    assert_verdicts_hold,
    random_hyper,
    slice_geometry,
)
from tests.support.fused_adam import joined_master, loaded_moment, split_master, stored_moment

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
MOMENTS = [(F32, F32), (B16, B16), (F16, F16), (F32, B16), (B16, F32), (B16, F16), (F16, B16)]
RULES: list[Rounding] = ["even", "away"]
EDGES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def floats(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.float32))


def words(x: torch.Tensor) -> np.ndarray:
    return x.numpy().view(np.uint32)


# --- the rule ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_a_split_and_its_inverse_agree_on_every_bit_pattern(patterns: list[int]) -> None:
    """NaN, infinities and both zeros too; a remainder of 0x8000 belongs to the weight above."""
    at = np.array(patterns + [(p & 0xFFFF_0000) | low for p in patterns for low in EDGES], np.uint32)
    master = floats(at)
    weight, remainder = split_master(master)
    assert np.array_equal(round_to_bf16_bits(master, "away"), weight.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(words(join_master(weight, remainder)), at)
    assert np.array_equal(words(joined_master(weight, remainder)), at)


def test_every_weight_comes_back_from_every_kind_of_remainder() -> None:
    upper = np.arange(1 << 16, dtype=np.uint16)
    weight = torch.from_numpy(upper.view(np.int16)).view(B16)
    for low in EDGES:
        remainder = torch.full((1 << 16,), low - 0x1_0000 if low >= 0x8000 else low, dtype=torch.int16)
        assert np.array_equal(round_to_bf16_bits(join_master(weight, remainder), "away"), upper)


@given(st.integers(0, 0xFF7F_FFFF).filter(lambda w: w & 0x7FFF_FFFF < 0x7F7F_0000))
def test_half_away_is_the_nearest_and_of_two_the_larger(pattern: int) -> None:
    """Checked in exact arithmetic."""
    value = Fraction(float(floats(np.array([pattern]))[0]))
    got = int(round_to_bf16_bits(floats(np.array([pattern])), "away")[0])
    down = (pattern >> 16) & 0x7FFF  # magnitudes
    around = [Fraction(float(floats(np.array([m << 16]))[0])) for m in (down, down + 1)]
    away = abs(value) - around[0] >= around[1] - abs(value)
    assert got & 0x7FFF == down + away
    assert got >> 15 == pattern >> 31


# --- the world --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One step, and the state as it is stored after it."""

    before: torch.Tensor
    theta: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    ctx: StepContext
    rounding: Rounding

    @property
    def old_bits(self) -> U16:
        return round_to_bf16_bits(self.before, self.rounding)

    @property
    def new_bits(self) -> U16:
        return round_to_bf16_bits(self.theta, self.rounding)


def steps(
    formula: FusedAdam,
    hyper: Hyper,
    theta: torch.Tensor,
    grads: list[torch.Tensor],
    dtypes: tuple[torch.dtype, torch.dtype],
    rounding: Rounding,
    *,
    first_step: int = 1,
    divide: bool = False,
) -> Iterator[Stored]:
    """Each step starts from the moments as they were stored."""
    m, v = (torch.zeros_like(theta, dtype=d) for d in dtypes)
    m_scale, v_scale = torch.ones(1), torch.ones(1)
    for i, g in enumerate(grads):
        used_m = loaded_moment(m, m_scale) * hyper.beta1 + g * (1 - hyper.beta1)
        used_v = loaded_moment(v, v_scale) * hyper.beta2 + g * g * (1 - hyper.beta2)
        ctx = StepContext(hyper, first_step + i)
        after = formula.forward(theta, used_m, used_v, ctx)
        m, m_scale = stored_moment(used_m, dtypes[0], divide=divide)
        v, v_scale = stored_moment(used_v, dtypes[1], divide=divide)
        scales = [float(s) if torch.isfinite(s) else None for s in (m_scale, v_scale)]
        yield Stored(theta, after, m, v, StepContext(hyper, first_step + i, scales[0], scales[1]), rounding)
        theta = after


def scaled_grad(n: int, rng: np.random.Generator) -> torch.Tensor:
    """Gradients whose largest is not so large that everything else is stored as 0."""
    g = rng.normal(0, 1, n) * 10.0 ** rng.uniform(-7, -3, n)
    g[::13] = 0.0
    return torch.from_numpy(g.astype(np.float32))


def half_way_theta(n: int, rng: np.random.Generator, largest: int = 0x3F80) -> torch.Tensor:
    """Exact half-way points between BF16 values and their neighbours, in even and odd cells, of both signs."""
    at = (rng.integers(0x3700, largest, n) << 16) + 0x8000 + rng.integers(-1, 2, n) * rng.integers(0, 2, n)
    return floats(at | (rng.integers(0, 2, n) << 31))


def check(formula: FusedAdam, step: Stored) -> tuple[int, int]:
    """No miss, no wrong old bits, and the compiled passes say what plain torch says. (elements, of those known)"""
    verdicts = classify(formula, step.ctx, step.theta, step.m, step.v, exact_replay=False, rounding=step.rounding)
    assert_verdicts_hold(verdicts, step.old_bits, step.new_bits)
    bound = formula.step_bound(step.ctx)
    first, second = moment_bound(step.m.dtype, step.ctx.m_scale), moment_bound(step.v.dtype, step.ctx.v_scale)
    if not bound.known or first is None or second is None:
        assert verdicts.unknown.all()
        return verdicts.new.size, 0
    n = step.theta.numel()
    arrays = (step.theta.numpy(), step.m.float().numpy(), step.v.float().numpy())
    rounding = pack_rounding(step.rounding)
    verdict, old = np.empty(n, np.uint8), np.zeros(n, np.uint16)
    constants = pack_step(bound, first, second)
    kernels.judge(*arrays, constants, rounding, np.arange(n, dtype=np.int32), n, verdict, old)
    doubtful = verdicts.unknown.copy()
    doubtful[verdicts.ambiguous] = True
    assert not np.any((verdict != 2) & doubtful)
    assert np.array_equal(verdict == 1, verdicts.changed & (verdict != 2))
    assert np.array_equal(old[verdict == 1], verdicts.old[verdict == 1])
    assert np.array_equal(verdict == 2, doubtful)
    if (fast := fast_bound_of(bound, first, second)) is not None:
        flagged, digests, key = np.empty(n, np.int32), np.zeros(1, np.uint64), DigestKey.for_tensor("x")
        count = kernels.scan(*arrays, pack_fast(fast), rounding, key.a, key.b_words(1), -1, 1 << 16, digests, flagged)
        seen = np.zeros(n, np.bool_)
        seen[flagged[:count]] = True
        assert seen[doubtful | verdicts.changed].all()
    return n, int((~verdicts.unknown).sum())


def sweep(name: str, dtypes: tuple[torch.dtype, torch.dtype], configurations: int, n: int, seed: int) -> None:
    rng = np.random.default_rng([seed, zlib.crc32(f"{name}{dtypes}".encode())])
    formula = registry.get(name)
    assert isinstance(formula, FusedAdam)
    total = known = 0
    for number in range(configurations):
        make_theta = half_way_theta if number % 3 == 0 else adversarial_theta
        make_grad = adversarial_grad if number % 2 else scaled_grad
        theta, grads = make_theta(n, rng), [make_grad(n, rng) for _ in range(3)]
        first_step = int(rng.choice((1, 2, 7, 1000, 200_000)))
        for rounding in RULES:
            hyper = random_hyper(rng)
            for step in steps(
                formula, hyper, theta, grads, dtypes, rounding, first_step=first_step, divide=bool(number & 4)
            ):
                judged, told = check(formula, step)
                total, known = total + judged, known + told
    assert known > 0.1 * total, "most of the sweep was unknowable: it proves little"


@pytest.mark.parametrize("dtypes", MOMENTS, ids=str)
@pytest.mark.parametrize("name", ["fused-adam/te", "fused-adam/te-fma"])
def test_no_change_is_missed(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    sweep(name, dtypes, configurations=12, n=2048, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", MOMENTS, ids=str)
@pytest.mark.parametrize("name", ["fused-adam/te", "fused-adam/te-fma"])
def test_no_change_is_missed_in_a_large_sweep(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    sweep(name, dtypes, configurations=60, n=8192, seed=2)


# --- backends ---------------------------------------------------------------------------------------------------------


def regular(dtypes: tuple[torch.dtype, torch.dtype], rounding: Rounding, n: int, seed: int, lr: float) -> Stored:
    """The last of a few steps on ordinary weights, among them exact half-way points."""
    rng = np.random.default_rng(seed)
    size = np.abs(rng.normal(0, 0.02, n)) + 1e-3
    theta = torch.from_numpy((size * rng.choice([-1, 1], n)).astype(np.float32))
    theta[::4001] = half_way_theta(len(theta[::4001]), rng)
    formula = registry.get("fused-adam/te")
    assert isinstance(formula, FusedAdam)
    grads = [torch.from_numpy(rng.normal(0, 1e-3, n).astype(np.float32)) for _ in range(3)]
    hyper = Hyper(lr, 0.9, 0.999, 1e-8, 0.01)
    return list(steps(formula, hyper, theta, grads, dtypes, rounding, first_step=2000))[-1]


def detections(step: Stored, n: int) -> list[Detection]:
    formula, geometry = registry.get("fused-adam/te"), slice_geometry(n)
    return [
        backend.detect(
            formula, step.ctx, step.theta, step.m, step.v, geometry, 0, -(-n // TILE),
            exact_replay=exact, rounding=step.rounding,
        )
        for exact in (False, True)
        for backend in (backends.get("reference"), backends.get("cpu"), backends.get("cpu", threads=2))
    ]  # fmt: skip


@pytest.mark.parametrize("rounding", RULES)
@pytest.mark.parametrize("dtypes", MOMENTS, ids=str)
def test_backends_agree_and_tiles_stay_sparse(dtypes: tuple[torch.dtype, torch.dtype], rounding: Rounding) -> None:
    n = TILE + 777
    step = regular(dtypes, rounding, n, seed=5, lr=1e-7)
    found = detections(step, n)
    for a, b in itertools.pairwise(found[:3]):
        for field in fields(Detection):
            assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name
    before = tile_digests(slice_geometry(n), step.old_bits, 0)
    for detection in found:
        assert not detection.mismatched.any()
        resolved = resolve(detection, before, slice_geometry(n))
        assert not resolved.dense.any()
        assert_exact_where_sparse(resolved, step.old_bits, step.new_bits, tile=TILE)
        assert resolved.ranks.size > 100


def test_the_rule_decides_what_changed() -> None:
    """Masters that come to stand exactly half-way: rounded to even, half of these changes would be missed."""
    n = 4096
    tie = half_way_theta(n, np.random.default_rng(6), 0x3C00)
    tie = floats((words(tie) & 0x7FFF_0000) | 0x8000)  # positive, exactly half-way
    formula = registry.get("fused-adam/te")
    ctx = StepContext(Hyper(1e-6, 0.9, 0.999, 1e-8, 0.0), 2000)
    m, v = -torch.ones(n), torch.ones(n)
    before = tie - 1e-6
    for _ in range(4):  # to a weight whose step ends there
        before = before + (tie - formula.forward(before, m, v, ctx))
    hit = formula.forward(before, m, v, ctx) == tie
    step = Stored(before[hit], tie[hit], m[hit], v[hit], ctx, "away")
    assert hit.sum() > 1000
    assert (step.old_bits != step.new_bits).all()
    right, wrong = (
        classify(formula, ctx, step.theta, step.m, step.v, exact_replay=False, rounding=rounding)
        for rounding in RULES[::-1]
    )
    assert_verdicts_hold(right, step.old_bits, step.new_bits)
    silent = ~wrong.changed & ~wrong.unknown
    silent[wrong.ambiguous] = False
    assert silent.sum() > 400
    assert (wrong.new != step.new_bits).sum() > 400


@pytest.mark.parametrize("dtypes", [(F16, F32), (F32, F16)], ids=str)
def test_a_scale_that_is_not_the_one_of_the_moments_says_nothing_or_is_noticed(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """A scale of 0 with values stored, and a scale that is no number, tell nothing. Another number fails the proof."""
    n = TILE
    step = regular(dtypes, "even", n, seed=7, lr=1e-5)
    formula, geometry = registry.get("fused-adam/te"), slice_geometry(n)
    before = tile_digests(geometry, step.old_bits, 0)
    for scale in (0.0, None, 1e30, 7.0):
        m_scale, v_scale = (scale if d == F16 else 1.0 for d in dtypes)
        ctx = StepContext(step.ctx.hyper, step.ctx.step, m_scale, v_scale)
        for backend in (backends.get("reference"), backends.get("cpu")):
            detection = backend.detect(formula, ctx, step.theta, step.m, step.v, geometry, 0, 1, exact_replay=False)
            assert resolve(detection, before, geometry).dense.all()


def test_moments_that_are_all_zero_are_no_reason_to_send_everything() -> None:
    """An amax of 0 leaves a scale of 0: the step only decays, and that is known."""
    n = 4096
    theta = torch.from_numpy(np.random.default_rng(8).normal(0, 0.02, n).astype(np.float32))
    zero = torch.zeros(n, dtype=F16)
    formula = registry.get("fused-adam/te")
    for scale in (0.0, 1e-20):
        ctx = StepContext(Hyper(1e-3, 0.9, 0.999, 1e-3, 0.1), 9, scale, scale)
        after = formula.forward(theta, zero.float(), zero.float(), ctx)
        verdicts = classify(formula, ctx, after, zero, zero, exact_replay=False)
        assert_verdicts_hold(verdicts, round_to_bf16_bits(theta), round_to_bf16_bits(after))
        assert not verdicts.unknown.any()
        assert verdicts.ambiguous.size < 100
