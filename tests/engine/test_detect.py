"""Backends agree with each other and with the truth; digests fit every layout; bad arguments are refused."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bf16 import lanes_of, round_to_bf16_bits
from engine.detect import backends
from engine.detect.assemble import concatenate
from engine.detect.base import TILE, DetectBackend, Detection, SliceGeometry, tile_count
from engine.detect.classify import classify, float_keys, key_floats, outward_keys
from engine.detect.dense import detect_dense
from engine.detect.geometry import canonical_of, contiguous_start, tile_digests
from engine.detect.snapshot import detect_snapshot
from engine.digest import DigestKey
from engine.errors import InvalidInput, LayoutError
from engine.layout.algebra import contiguous, from_json, identity
from engine.layout.blocks import Layout
from engine.layout.mapping import owned_order
from engine.optimizers import registry
from engine.optimizers.base import Formula, Hyper, Interval, StepContext
from engine.proof import resolve
from tests.engine.numerics_world import (
    Step,
    adversarial_grad,
    adversarial_theta,
    assert_exact_where_sparse,
    random_hyper,
    regular_world,
    run_steps,
    slice_geometry,
)

BACKENDS = [backends.get("reference"), backends.get("cpu"), backends.get("cpu", threads=3)]


def detect(
    backend: DetectBackend, formula: Formula, step: Step, geometry: SliceGeometry, *, exact: bool = True
) -> Detection:
    tiles = tile_count(step.theta.numel())
    return backend.detect(formula, step.ctx, step.theta, step.m, step.v, geometry, 0, tiles, exact_replay=exact)


def assert_same(a: Detection, b: Detection) -> None:
    for field in fields(Detection):
        assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", registry.names())
def test_ordinary_steps_come_out_exactly_and_backends_agree(name: str, exact: bool) -> None:
    """With and without replay: every tile is proven sparse, and its entries are the true ones."""
    formula = registry.get(name)
    n = 2 * TILE + 777
    step = regular_world(formula, n, np.random.default_rng(5))
    geometry = slice_geometry(n, offset=4321)
    results = [detect(b, formula, step, geometry, exact=exact) for b in BACKENDS]
    for other in results[1:]:
        assert_same(results[0], other)
    resolved = resolve(results[0], tile_digests(geometry, step.old_bits, 0), geometry)
    assert not resolved.dense.any()
    assert resolved.resolved == resolved.ambiguous
    assert resolved.ranks.size > 100
    assert_exact_where_sparse(resolved, step.old_bits, step.new_bits, tile=TILE)
    if exact:
        assert resolved.ambiguous < 10


@pytest.mark.parametrize("name", registry.names())
def test_backends_agree_on_adversarial_states(name: str) -> None:
    rng = np.random.default_rng(8)
    formula = registry.get(name)
    geometry = slice_geometry(3000)
    for trial in range(4):
        hyper = random_hyper(rng, tensor_lr=name.endswith("tensor-lr"))
        finite = trial % 2 == 0
        theta = adversarial_theta(3000, rng, finite=finite)
        grads = [adversarial_grad(3000, rng, finite=finite) for _ in range(2)]
        for step in run_steps(formula, hyper, theta, grads, first_step=1 + 700 * (trial % 2)):
            for exact in (True, False):
                first, *others = (detect(b, formula, step, geometry, exact=exact) for b in BACKENDS)
                for other in others:
                    assert_same(first, other)
                resolved = resolve(first, tile_digests(geometry, step.old_bits, 0), geometry)
                assert_exact_where_sparse(resolved, step.old_bits, step.new_bits, tile=TILE)


def test_tiles_can_be_detected_in_any_pieces() -> None:
    formula = registry.get("torch-adamw/cpu/foreach")
    n = 4 * TILE + 5
    step = regular_world(formula, n, np.random.default_rng(6), steps=1)
    geometry = slice_geometry(n)
    whole = detect(BACKENDS[1], formula, step, geometry)
    for backend in BACKENDS:
        cuts = [(0, 1), (1, 4), (4, 5)]
        parts = [
            backend.detect(formula, step.ctx, step.theta, step.m, step.v, geometry, a, b, exact_replay=True)
            for a, b in cuts
        ]
        assert [p.tile_start for p in parts] == [0, 1, 4]
        assert_same(concatenate(parts), whole)
        empty = backend.detect(formula, step.ctx, step.theta, step.m, step.v, geometry, 2, 2, exact_replay=True)
        assert empty.tile_start == 2
        assert empty.dense.size == empty.ranks.size == 0


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_a_part_of_the_slice_says_what_the_whole_says(backend: DetectBackend) -> None:
    """Memory of a device comes to the host tile group by tile group."""
    formula = registry.get("torch-adamw/cpu/foreach")
    n = 4 * TILE + 55
    step = regular_world(formula, n, np.random.default_rng(9))
    step.v[2 * TILE + 5] = 0.0  # what the compiled passes leave open
    for geometry in (slice_geometry(n, offset=77), SliceGeometry("w", identity(n))):
        whole = detect(backend, formula, step, geometry)
        parts = []
        for first, stop in ((0, 2), (2, 3), (3, 5)):
            held = slice(first * TILE, min(stop * TILE, n))
            state = (step.theta[held].clone(), step.m[held].clone(), step.v[held].clone())
            for a, b in ((first, first + 1), (first + 1, stop)):
                parts.append(
                    backend.detect(formula, step.ctx, *state, geometry, a, b, exact_replay=True, first_tile=first)
                )
        assert_same(whole, concatenate(parts))
    state = (step.theta[TILE : 2 * TILE], step.m[TILE : 2 * TILE], step.v[TILE : 2 * TILE])
    for first, a, b in ((1, 0, 1), (1, 1, 3), (4, 4, 5), (0, 1, 2)):
        with pytest.raises(InvalidInput):
            backend.detect(formula, step.ctx, *state, geometry, a, b, exact_replay=True, first_tile=first)


def test_one_bad_element_makes_its_tile_dense_and_no_other() -> None:
    formula = registry.get("torch-adamw/cpu/foreach")
    n = 3 * TILE
    step = regular_world(formula, n, np.random.default_rng(7))
    geometry = slice_geometry(n)
    for poison in (float("nan"), float("inf"), 3.35e38):
        theta = step.theta.clone()
        theta[TILE + 17] = poison
        changed = Step(step.before, theta, step.m, step.v, step.ctx)
        for backend in BACKENDS:
            d = detect(backend, formula, changed, geometry)
            assert d.dense.tolist() == [False, True, False]
            assert not d.mismatched.any()
            assert not np.any(d.ranks // TILE == 1)
            assert np.array_equal(d.digest_new, tile_digests(geometry, changed.new_bits, 0))


def test_a_value_the_formula_cannot_reach_is_a_mismatch() -> None:
    """With c = 3 and q = 0 every third value in [1.5, 2) has no preimage; near a BF16 boundary replay must see that."""
    formula = registry.get("torch-adamw/cpu/single")
    ctx = StepContext(Hyper(lr=10.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=-0.2), 3)
    theta = torch.from_numpy((np.arange(TILE) + 0x3FC0_0000).astype(np.uint32).view(np.float32))
    zeros, ones = torch.zeros(TILE), torch.ones(TILE)
    for backend in BACKENDS:
        d = backend.detect(formula, ctx, theta, zeros, ones, slice_geometry(TILE), 0, 1, exact_replay=True)
        assert d.mismatched.all()
        assert d.dense.all()
        unsure = backend.detect(formula, ctx, theta, zeros, ones, slice_geometry(TILE), 0, 1, exact_replay=False)
        assert not unsure.mismatched.any()


def test_weights_that_the_step_swallowed_are_narrowed_by_bisection() -> None:
    """|θ| far below one ulp of the step: thousands of FP32 candidates, yet few BF16 ones, and no tile goes dense."""
    formula = registry.get("torch-adamw/cpu/foreach")
    rng = np.random.default_rng(17)
    before = torch.from_numpy((rng.choice([-1, 1], TILE) * 10.0 ** rng.uniform(-10.3, -8, TILE)).astype(np.float32))
    m = torch.from_numpy(rng.choice([-1, 1], TILE).astype(np.float32))
    ctx = StepContext(Hyper(1e-5, 0.9, 0.999, 1e-8, 0.01), 50)
    theta = formula.forward(before, m, m * m, ctx)
    old, new = round_to_bf16_bits(before), round_to_bf16_bits(theta)
    for backend in BACKENDS:
        d = backend.detect(formula, ctx, theta, m, m * m, slice_geometry(TILE), 0, 1, exact_replay=True)
        assert not d.dense.any()
        assert np.array_equal(d.old, old[d.ranks])
        assert np.array_equal(np.union1d(d.ranks, d.amb_ranks), np.flatnonzero(old != new))
    wide = classify(formula, ctx, theta, m, m * m, exact_replay=False)
    assert wide.unknown.any()


def test_without_an_exact_mirror_replay_drops_nothing() -> None:
    """A mirror that is wrong in the last bit must not decide: all BF16 values of the interval stay candidates."""
    real = registry.get("torch-adamw/cpu/foreach")
    step = regular_world(real, TILE, np.random.default_rng(9))

    class OffByAnUlp:
        name = "off"
        invert = staticmethod(real.invert)

        @staticmethod
        def forward(prev: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> torch.Tensor:
            return torch.nextafter(real.forward(prev, m, v, ctx), torch.tensor(torch.inf))

    geometry = slice_geometry(TILE)
    for backend in BACKENDS:
        d = detect(backend, OffByAnUlp(), step, geometry, exact=False)
        assert_same(d, detect(backend, real, step, geometry, exact=False))
        resolved = resolve(d, tile_digests(geometry, step.old_bits, 0), geometry)
        assert not resolved.dense.any()
        assert_exact_where_sparse(resolved, step.old_bits, step.new_bits, tile=TILE)


def test_any_object_with_a_formulas_methods_is_enough() -> None:
    """SGD with momentum, without a cheap bound: θ_t = θ − lr·buffer, and the buffer travels as m."""

    class Momentum:
        name = "sgd-momentum"

        @staticmethod
        def forward(prev: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> torch.Tensor:
            return prev.add(m, alpha=-ctx.hyper.lr)

        @staticmethod
        def invert(theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> Interval:
            move = ctx.hyper.lr * m.double()
            centre = theta.double() + move
            d = 2.0**-23 * (theta.double().abs() + move.abs()) + 2.0**-149
            return Interval(centre - d, centre + d)

    rng = np.random.default_rng(4)
    param = torch.nn.Parameter(torch.from_numpy(rng.normal(0, 0.02, TILE).astype(np.float32)))
    optimizer = torch.optim.SGD([param], lr=1e-3, momentum=0.9)
    geometry = slice_geometry(TILE)
    for t in range(1, 4):
        before = param.detach().clone()
        param.grad = torch.from_numpy(rng.normal(0, 1e-2, TILE).astype(np.float32))
        optimizer.step()
        buffer = optimizer.state[param]["momentum_buffer"]
        ctx = StepContext(Hyper(1e-3, 0.9, 0.0, 0.0, 0.0), t)
        step = Step(before, param.detach(), buffer, torch.zeros(TILE), ctx)
        for backend in BACKENDS:
            resolved = resolve(
                detect(backend, Momentum(), step, geometry), tile_digests(geometry, step.old_bits, 0), geometry
            )
            assert not resolved.dense.any()
            assert_exact_where_sparse(resolved, step.old_bits, step.new_bits, tile=TILE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_moments_miss_nothing(dtype: torch.dtype) -> None:
    formula = registry.get("torch-adamw/cuda/fused")
    rng = np.random.default_rng(2)
    ctx = StepContext(Hyper(1e-5, 0.9, 0.999, 1e-8, 0.01), 20)
    before = torch.from_numpy(rng.normal(0, 0.02, TILE).astype(np.float32))
    m, v = (torch.from_numpy(np.abs(rng.normal(0, 0.1, TILE)).astype(np.float32)) for _ in range(2))
    theta = formula.forward(before, m, v, ctx)
    geometry = slice_geometry(TILE)
    old, new = round_to_bf16_bits(before), round_to_bf16_bits(theta)
    for backend in BACKENDS:
        d = backend.detect(formula, ctx, theta, m.to(dtype), v.to(dtype), geometry, 0, 1, exact_replay=True)
        assert not d.mismatched.any()
        assert not d.dense.any()
        sent = np.union1d(d.ranks, d.amb_ranks)
        assert np.isin(np.flatnonzero(old != new), sent).all()
        assert np.array_equal(d.old, old[d.ranks])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_keys_order_all_numbers_and_come_back(bits: list[int]) -> None:
    x = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    x = x[~x.isnan()]
    keys = float_keys(x)
    assert torch.equal(key_floats(keys).view(torch.int32), x.view(torch.int32))
    ordered = x[torch.argsort(keys)]
    assert (ordered[1:] >= ordered[:-1]).all()


@given(st.floats(-3e38, 3e38), st.floats(0, 1e-3))
def test_outward_keys_hold_every_fp32_value_between(centre: float, width: float) -> None:
    lo, hi = centre - abs(centre) * width, centre + abs(centre) * width
    low, high = outward_keys(Interval(torch.tensor([lo], dtype=torch.float64), torch.tensor([hi], dtype=torch.float64)))
    inside = [x for x in np.array([lo, centre, hi], np.float32) if lo <= float(x) <= hi]
    inside += [np.float32(0.0), np.float32(-0.0)] if lo <= 0 <= hi else []
    for x in inside:
        assert low.item() <= float_keys(torch.tensor([x])).item() <= high.item()
    for end, limit in ((low, lo), (high, hi)):  # and hardly more
        assert abs(float(key_floats(end)[0]) - limit) <= max(2.0**-22 * abs(limit), 2.0**-148)


def layouts() -> st.SearchStrategy[Layout]:
    """Contiguous, column-split and transposed slices of 1–3 tiles."""

    def build(kind: str, rows: int, columns: int, offset: int) -> Layout:
        n = rows * columns
        if kind == "contiguous":
            return contiguous(offset, n, n + offset)
        if kind == "columns":  # a column block of a matrix three times as wide
            block = [[rows, columns], 0, [columns, 1], offset, [3 * columns, 1]]
            return from_json([block], n, offset + 3 * n)
        return from_json([[[rows, columns], 0, [columns, 1], offset, [1, rows]]], n, offset + n)

    return st.builds(
        build,
        st.sampled_from(["contiguous", "columns", "transposed"]),
        st.integers(1, 400),
        st.integers(1, 400),
        st.integers(0, 9999),
    )


@settings(max_examples=40, deadline=None)
@given(layouts(), st.data())
def test_tile_digests_follow_their_definition_in_every_layout(layout: Layout, data: st.DataObject) -> None:
    geometry = SliceGeometry("t", layout)
    n = layout.src_numel
    bits = np.random.default_rng(n).integers(0, 1 << 16, n).astype(np.uint16)
    first = data.draw(st.integers(0, tile_count(n) - 1))
    last = data.draw(st.integers(first + 1, tile_count(n)))
    got = tile_digests(geometry, bits[first * TILE : last * TILE], first)
    terms = DigestKey.for_tensor("t").weights(owned_order(layout)) * (bits.astype(np.uint64) + np.uint64(1))
    expected = [terms[t * TILE : (t + 1) * TILE].sum(dtype=np.uint64) for t in range(first, last)]
    assert got.tolist() == expected
    ranks = np.unique(np.random.default_rng(1).integers(0, n, 50))
    assert np.array_equal(canonical_of(geometry, ranks), owned_order(layout)[ranks])


def test_detection_works_on_strided_slices() -> None:
    formula = registry.get("torch-adamw/cpu/fused")
    rows, columns = 300, 500
    n = rows * columns
    step = regular_world(formula, n, np.random.default_rng(1))
    layout = from_json([[[rows, columns], 0, [columns, 1], 7, [4 * columns, 1]]], n, 4 * n + 7)
    assert contiguous_start(layout) is None
    geometry = SliceGeometry("w", layout)
    results = [detect(b, formula, step, geometry) for b in BACKENDS]
    for other in results[1:]:
        assert_same(results[0], other)
    resolved = resolve(results[0], tile_digests(geometry, step.old_bits, 0), geometry)
    assert not resolved.dense.any()
    assert_exact_where_sparse(resolved, step.old_bits, step.new_bits, tile=TILE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64", "uint8"])
def test_snapshot_finds_the_exact_difference_in_any_dtype(dtype: str) -> None:
    rng = np.random.default_rng(12)
    before = torch.from_numpy(rng.integers(0, 100, 100_001)).to(getattr(torch, dtype))
    after = before.clone()
    after[torch.from_numpy(rng.integers(0, 100_001, 500))] += 1
    old, new = lanes_of(before, dtype), lanes_of(after, dtype)
    geometry = slice_geometry(old.size)
    d = detect_snapshot(old, new, geometry, 0, tile_count(old.size))
    resolved = resolve(d, tile_digests(geometry, old, 0), geometry)
    assert not resolved.dense.any()
    assert_exact_where_sparse(resolved, old, new, tile=TILE)
    assert resolved.ranks.size > 0
    last = tile_count(old.size) - 1
    part = detect_snapshot(old, new, geometry, last, last + 1)
    assert np.array_equal(part.ranks, d.ranks[d.ranks // TILE == last])


def test_dense_says_nothing_but_the_digest() -> None:
    bits = np.arange(70_000, dtype=np.uint16)
    geometry = slice_geometry(bits.size)
    d = detect_dense(bits, geometry, 0, 2)
    assert d.dense.all()
    assert not d.mismatched.any()
    assert d.ranks.size == d.amb_ranks.size == 0
    assert np.array_equal(d.digest_new, tile_digests(geometry, bits, 0))


def test_bad_arguments_are_refused_before_memory_is_touched() -> None:
    formula = registry.get("torch-adamw/cpu/fused")
    x = torch.zeros(100)
    ctx = StepContext(Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0), 1)
    geometry = slice_geometry(100)
    wrong: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, SliceGeometry, int]] = [
        (x.double(), x, x, geometry, 1),
        (x, x[:50], x, geometry, 1),
        (x, x, x.int(), geometry, 1),
        (x.reshape(10, 10), x, x, geometry, 1),
        (torch.zeros(200)[::2], x, x, geometry, 1),
        (x, x, x, slice_geometry(99), 1),
        (x, x, x, geometry, 2),
    ]
    for backend in BACKENDS:
        for theta, m, v, where, stop in wrong:
            with pytest.raises(InvalidInput):
                backend.detect(formula, ctx, theta, m, v, where, 0, stop, exact_replay=True)
    with pytest.raises(InvalidInput):
        backends.get("gpu")
    with pytest.raises(InvalidInput):
        backends.get("cpu", threads=0)
    with pytest.raises(InvalidInput):
        detect_snapshot(np.zeros(3, np.uint16), np.zeros(4, np.uint16), slice_geometry(4), 0, 1)
    with pytest.raises(LayoutError):
        tile_digests(geometry, np.zeros(101, np.uint16), 0)


def test_too_many_candidates_make_an_element_unknown() -> None:
    formula = registry.get("torch-adamw/cpu/fused")

    class Wide:
        name = "wide"
        forward = staticmethod(formula.forward)

        def __init__(self, reach: float) -> None:
            self.reach = reach

        def invert(self, theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, ctx: StepContext) -> Interval:
            return Interval(theta.double() - self.reach, theta.double() + self.reach)

    ctx = StepContext(Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0), 1)
    x, z = torch.ones(3), torch.zeros(3)
    few = classify(Wide(0.02), ctx, x, z, z + 1, exact_replay=True)
    assert few.ambiguous.tolist() == [0, 1, 2]
    assert 2 < np.diff(few.amb_offsets).max() <= 16
    assert classify(Wide(0.2), ctx, x, z, z + 1, exact_replay=True).unknown.all()
