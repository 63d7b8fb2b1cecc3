"""No change is ever missed, whatever the state, the hyperparameters and the formula."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from engine.detect import kernels
from engine.detect.classify import Verdicts, classify
from engine.detect.cpu import pack_fast, pack_rounding, pack_step
from engine.digest import DigestKey
from engine.optimizers import registry
from engine.optimizers.bounds import HasStepBound, fast_bound_of
from tests.engine.numerics_world import (
    Step,
    adversarial_grad,
    adversarial_theta,
    assert_verdicts_hold,
    random_hyper,
    run_steps,
)

ROUNDING = pack_rounding("even")
FIRST_STEPS = (1, 2, 7, 1000, 200_000)


def check(name: str, step: Step) -> tuple[int, int]:
    """Both replay modes and the fast pass hold for this step; returns (elements judged, of those known)."""
    formula = registry.get(name)
    old, new = step.old_bits, step.new_bits
    known = 0
    for exact in (True, False):
        verdicts = classify(formula, step.ctx, step.theta, step.m, step.v, exact_replay=exact)
        assert_verdicts_hold(verdicts, old, new)
        assert not verdicts.impossible.any(), "replay found no candidate for the right formula"
        known = int((~verdicts.unknown).sum())
    assert isinstance(formula, HasStepBound)
    real = formula.step_bound(step.ctx)
    fast = fast_bound_of(real)
    if fast is not None:
        assert_scan_agrees(step, pack_fast(fast), verdicts.unknown | verdicts.changed, verdicts.ambiguous)
        assert_judge_agrees(step, pack_step(real), verdicts)
    return old.size, known


def assert_scan_agrees(step: Step, constants: kernels.F32, sent: np.ndarray, ambiguous: np.ndarray) -> None:
    """Everything that the exact interval cannot call unchanged is flagged by the fast pass."""
    n = step.theta.numel()
    flagged = np.empty(n, np.int32)
    key = DigestKey.for_tensor("x")
    arrays = (step.theta.numpy(), step.m.numpy(), step.v.numpy())
    digests = np.zeros(1, np.uint64)
    count = kernels.scan(*arrays, constants, ROUNDING, key.a, key.b_words(1), -1, 1 << 16, digests, flagged)
    seen = np.zeros(n, np.bool_)
    seen[flagged[:count]] = True
    assert seen[sent].all()
    assert seen[ambiguous].all()


def assert_judge_agrees(step: Step, constants: kernels.F64, expected: Verdicts) -> None:
    """The compiled exact interval gives the verdicts of the plain one (here without replay) on every element."""
    n = step.theta.numel()
    verdict, old = np.empty(n, np.uint8), np.zeros(n, np.uint16)
    arrays = (step.theta.numpy(), step.m.numpy(), step.v.numpy())
    kernels.judge(*arrays, constants, ROUNDING, np.arange(n, dtype=np.int32), n, verdict, old)
    doubtful = expected.unknown.copy()
    doubtful[expected.ambiguous] = True
    assert np.array_equal(verdict == 2, doubtful)
    assert np.array_equal(verdict == 1, expected.changed)
    assert np.array_equal(old[expected.changed], expected.old[expected.changed])


def sweep(name: str, configurations: int, n: int, seed: int) -> None:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    formula = registry.get(name)
    total = known = 0
    for _ in range(configurations):
        hyper = random_hyper(rng, tensor_lr=name.endswith("tensor-lr") or (rng.random() < 0.3 and "capturable" in name))
        theta = adversarial_theta(n, rng)
        grads = [adversarial_grad(n, rng) for _ in range(3)]
        for step in run_steps(formula, hyper, theta, grads, first_step=int(rng.choice(FIRST_STEPS))):
            judged, told = check(name, step)
            total, known = total + judged, known + told
    assert known > 0.25 * total, "most of the sweep was unknowable: it proves little"


@pytest.mark.parametrize("name", registry.names())
def test_no_change_is_missed(name: str) -> None:
    sweep(name, configurations=20, n=2048, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names())
def test_no_change_is_missed_in_a_large_sweep(name: str) -> None:
    sweep(name, configurations=60, n=8192, seed=2)
