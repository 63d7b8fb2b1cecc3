"""What the proof lets through is the truth, whatever was wrong with the detection that it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detect import backends
from engine.detect.base import TILE, Detection, SliceGeometry, tile_count
from engine.detect.geometry import tile_digests
from engine.errors import InvalidInput
from engine.layout.algebra import from_json
from engine.optimizers import registry
from engine.optimizers.base import Hyper, StepContext
from engine.proof import MAX_COMBINATIONS, Resolved, resolve
from tests.engine.numerics_world import Step, assert_exact_where_sparse, regular_world, slice_geometry

N = 2 * TILE + 1234
HYPER = Hyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
CPU = backends.get("cpu")


def publish(
    name: str, step: Step, ctx: StepContext | None = None, *, digest_of: np.ndarray | None = None, exact: bool = True
) -> Resolved:
    """Detect and resolve as a publisher does, then check the promise."""
    geometry = slice_geometry(step.theta.numel())
    tiles = tile_count(step.theta.numel())
    ctx = ctx or step.ctx
    d = CPU.detect(registry.get(name), ctx, step.theta, step.m, step.v, geometry, 0, tiles, exact_replay=exact)
    known = step.old_bits if digest_of is None else digest_of
    resolved = resolve(d, tile_digests(geometry, known, 0), geometry)
    if digest_of is None:
        assert_exact_where_sparse(resolved, step.old_bits, step.new_bits, tile=TILE)
    return resolved


@pytest.fixture(scope="module")
def step() -> Step:
    return regular_world(
        registry.get("torch-adamw/cpu/foreach"), N, np.random.default_rng(21), hyper=HYPER, steps=2, first_step=1
    )


def test_the_right_description_is_proven_sparse(step: Step) -> None:
    for exact in (True, False):
        resolved = publish("torch-adamw/cpu/foreach", step, exact=exact)
        assert not resolved.dense.any()
        assert resolved.failed_tiles == 0


@pytest.mark.parametrize(
    "wrong",
    [
        replace(HYPER, lr=HYPER.lr * 1.01),
        replace(HYPER, lr=0.0),
        replace(HYPER, weight_decay=1.0),
        replace(HYPER, beta1=0.8),
        replace(HYPER, beta2=0.99),
        replace(HYPER, eps=1e-4),
    ],
    ids=["lr", "lr 0", "weight decay", "beta1", "beta2", "eps"],
)
@pytest.mark.parametrize("exact", [True, False])
def test_a_wrong_hyperparameter_is_caught(step: Step, wrong: Hyper, exact: bool) -> None:
    resolved = publish("torch-adamw/cpu/foreach", step, StepContext(wrong, step.ctx.step), exact=exact)
    assert resolved.dense.all()


@pytest.mark.parametrize("off", [-1, 1])
def test_a_step_counter_off_by_one_is_caught(step: Step, off: int) -> None:
    resolved = publish("torch-adamw/cpu/foreach", step, StepContext(HYPER, step.ctx.step + off))
    assert resolved.dense.all()


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("exact", [True, False])
def test_a_wrong_formula_is_caught_or_harmless(step: Step, name: str, exact: bool) -> None:
    """`publish` checks the promise; formulas of other devices may come out right, then all the better."""
    publish(name, step, exact=exact)


@settings(max_examples=25, deadline=None)
@given(
    lr=st.floats(0, 1e-3),
    weight_decay=st.floats(0, 10),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0.5, 0.9999),
    eps=st.floats(0, 1),
    at=st.integers(1, 1000),
    name=st.sampled_from(registry.names()),
)
def test_no_description_at_all_gets_a_wrong_entry_through(
    step: Step, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float, at: int, name: str
) -> None:
    publish(name, step, StepContext(Hyper(lr, beta1, beta2, eps, weight_decay), at))


def write_outside(step: Step) -> Step:
    theta = step.theta.clone()
    theta[TILE + 5] *= 2  # clipping, merging, …
    return replace(step, theta=theta)


def torn_read(step: Step) -> Step:
    m = step.m.clone()
    m[TILE : 2 * TILE] *= 0.9  # this tile's moments are those of another step
    return replace(step, m=m)


def stale_v(step: Step) -> Step:
    v = step.v.clone()
    v[TILE : 2 * TILE] = 1.0
    return replace(step, v=v)


@pytest.mark.parametrize("damage", [write_outside, torn_read, stale_v])
def test_damage_to_one_tile_makes_that_tile_dense(step: Step, damage: Callable[[Step], Step]) -> None:
    resolved = publish("torch-adamw/cpu/foreach", damage(step))
    assert resolved.dense.tolist() == [False, True, False]


def test_a_wrong_old_value_or_digest_makes_that_tile_dense(step: Step) -> None:
    remembered = step.old_bits.copy()
    remembered[17] ^= 1
    resolved = publish("torch-adamw/cpu/foreach", step, digest_of=remembered)
    assert resolved.dense.tolist() == [True, False, False]
    assert resolved.failed_tiles == 1


def test_one_missing_or_wrong_entry_makes_its_tile_dense(step: Step) -> None:
    geometry = slice_geometry(N)
    f = registry.get("torch-adamw/cpu/foreach")
    d = CPU.detect(f, step.ctx, step.theta, step.m, step.v, geometry, 0, 3, exact_replay=True)
    before = tile_digests(geometry, step.old_bits, 0)
    assert not resolve(d, before, geometry).dense.any()
    missing = replace(d, ranks=d.ranks[1:], old=d.old[1:], new=d.new[1:])
    assert resolve(missing, before, geometry).dense.tolist() == [True, False, False]
    old = d.old.copy()
    old[-1] ^= 4
    assert resolve(replace(d, old=old), before, geometry).dense.tolist() == [False, False, True]


def random_detection(
    rng: np.random.Generator, ambiguous: int, options: int
) -> tuple[Detection, np.ndarray, np.ndarray]:
    """A transposed slice of one tile and a bit, with some certain and some ambiguous changes; returns (…, old, new)."""
    n = 260 * 256
    old = rng.integers(0, 1 << 16, n).astype(np.uint16)
    new = old.copy()
    ranks = np.sort(rng.permutation(n)[: 40 + ambiguous])
    is_ambiguous = np.zeros(ranks.size, np.bool_)
    is_ambiguous[rng.permutation(ranks.size)[:ambiguous]] = True
    sure, doubtful = ranks[~is_ambiguous], ranks[is_ambiguous]
    new[sure] ^= rng.integers(1, 1 << 16, sure.size).astype(np.uint16)
    moves = rng.random(ambiguous) < 0.5
    new[doubtful[moves]] += np.uint16(1)
    candidates = []
    for r in doubtful:
        others = (int(new[r]) + np.arange(-options, options + 1)) & 0xFFFF
        others = rng.permutation(others[(others != old[r]) & (others != new[r])])[: options - 1]
        pool = {int(old[r]), int(new[r]), *(int(x) for x in others)}
        pick = [int(old[r]), *(x for x in pool if x != old[r])][:options]
        candidates.append(rng.permutation(np.array(pick, np.uint16)))
    offsets = np.concatenate([[0], np.cumsum([c.size for c in candidates])]).astype(np.int64)
    d = Detection(
        tile_start=0,
        ranks=sure,
        old=old[sure],
        new=new[sure],
        amb_ranks=doubtful,
        amb_new=new[doubtful],
        amb_offsets=offsets,
        amb_old=np.concatenate([*candidates, np.zeros(0, np.uint16)]).astype(np.uint16),
        digest_new=tile_digests(transposed(), new, 0),
        dense=np.zeros(2, np.bool_),
        mismatched=np.zeros(2, np.bool_),
    )
    return d, old, new


def transposed() -> SliceGeometry:
    return SliceGeometry("model.other", from_json([[[260, 256], 0, [256, 1], 3, [1, 260]]], 260 * 256, 260 * 256 + 3))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 12), st.integers(2, 4))
def test_the_sum_picks_the_true_combination(seed: int, ambiguous: int, options: int) -> None:
    d, old, new = random_detection(np.random.default_rng(seed), ambiguous, options)
    resolved = resolve(d, tile_digests(transposed(), old, 0), transposed())
    assert_exact_where_sparse(resolved, old, new, tile=TILE)
    assert resolved.ambiguous == ambiguous
    if options**ambiguous <= MAX_COMBINATIONS:
        assert not resolved.dense.any()
        assert resolved.resolved == ambiguous


def test_too_many_combinations_go_dense_instead_of_being_tried() -> None:
    d, old, new = random_detection(np.random.default_rng(0), 60, 2)
    resolved = resolve(d, tile_digests(transposed(), old, 0), transposed())
    assert resolved.dense[0]
    assert resolved.failed_tiles >= 1
    assert_exact_where_sparse(resolved, old, new, tile=TILE)


@given(st.integers(0, 2**32))
def test_no_combination_fits_when_the_true_bits_are_no_candidate(seed: int) -> None:
    d, old, _ = random_detection(np.random.default_rng(seed), 5, 2)
    lying = old.copy()
    lying[d.amb_ranks[0]] ^= 0x5A00
    resolved = resolve(d, tile_digests(transposed(), lying, 0), transposed())
    assert resolved.dense[d.amb_ranks[0] // TILE]


def test_dense_tiles_carry_no_entries_and_are_not_failures() -> None:
    d, old, new = random_detection(np.random.default_rng(3), 4, 2)
    resolved = resolve(replace(d, dense=np.array([True, False])), tile_digests(transposed(), old, 0), transposed())
    assert resolved.dense.tolist() == [True, False]
    assert resolved.failed_tiles == 0
    assert_exact_where_sparse(resolved, old, new, tile=TILE)
    with pytest.raises(InvalidInput):
        resolve(d, np.zeros(3, np.uint64), transposed())


def test_swapped_values_do_not_cancel(step: Step) -> None:
    """Two elements that exchange their bits leave every plain sum alone, but not this one."""
    theta = step.theta.clone()
    theta[[100, 200]] = theta[[200, 100]]
    resolved = publish("torch-adamw/cpu/foreach", replace(step, theta=theta))
    assert resolved.dense[0]
    assert torch.equal(theta[TILE:], step.theta[TILE:])
