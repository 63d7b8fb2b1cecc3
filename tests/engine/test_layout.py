"""Layout algebra against brute-force index arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.errors import InvalidInput, LayoutError
from engine.layout import algebra
from engine.layout.blocks import Block, Layout

Pairs = dict[int, int]


def pairs_of(layout: Layout) -> Pairs:
    """source → destination of every element, one by one."""
    out: Pairs = {}
    for b in layout.blocks:
        for k in itertools.product(*(range(n) for n in b.shape)):
            s = b.src_offset + sum(i * x for i, x in zip(k, b.src_strides, strict=True))
            d = b.dst_offset + sum(i * x for i, x in zip(k, b.dst_strides, strict=True))
            assert s not in out
            out[s] = d
    return out


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """A piece of a canonical tensor as some rank might hold it: cut along dimensions, permuted, then cut flat."""
    strides = [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]
    offset, dims = 0, []
    for n, s in zip(shape, strides, strict=True):
        lo = draw(st.integers(0, n - 1))
        hi = draw(st.integers(lo + 1, n))
        step = draw(st.integers(1, 2)) if hi - lo > 2 else 1
        offset += lo * s
        dims.append((len(range(lo, hi, step)), s * step))
    if draw(st.booleans()):
        dims = draw(st.permutations(dims))
    local = np.full((), offset, np.int64)
    for n, s in dims:
        local = np.add.outer(local, np.arange(n) * s)
    src_strides = [int(np.prod([d[0] for d in dims[i + 1 :]], dtype=np.int64)) for i in range(len(dims))]
    block = Block(tuple(d[0] for d in dims), 0, tuple(src_strides), offset, tuple(d[1] for d in dims))
    whole = Layout((block,), local.size, int(np.prod(shape, dtype=np.int64)))
    if draw(st.booleans()):
        lo = draw(st.integers(0, local.size - 1))
        n = draw(st.integers(1, local.size - lo))
        return algebra.compose(algebra.contiguous(lo, n, local.size), whole)
    return whole


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes)
def test_compose_intersect_invert_match_brute_force(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(slices(shape)), data.draw(slices(shape))
    pa, pb = pairs_of(a), pairs_of(b)
    back = {d: s for s, d in pb.items()}
    assert pairs_of(algebra.invert(a)) == {d: s for s, d in pa.items()}
    common = algebra.intersect(a, b)
    assert pairs_of(common) == {s: back[d] for s, d in pa.items() if d in back}
    assert (common.src_numel, common.dst_numel) == (a.src_numel, b.src_numel)
    there_and_back = algebra.compose(common, b)
    assert pairs_of(there_and_back) == {s: d for s, d in pa.items() if d in back}


@settings(max_examples=100, deadline=None)
@given(st.data(), st.tuples(st.integers(2, 9), st.integers(2, 9)), st.tuples(st.integers(2, 9), st.integers(2, 9)))
def test_strides_that_do_not_divide_each_other(data: st.DataObject, x: tuple[int, int], y: tuple[int, int]) -> None:
    """The middle side seen as matrices of different widths falls back to walking, with the same result."""
    a, b = data.draw(slices(x)), data.draw(slices(y))
    numel = max(a.dst_numel, b.dst_numel)
    a, b = Layout(a.blocks, a.src_numel, numel), Layout(b.blocks, b.src_numel, numel)
    back = {d: s for s, d in pairs_of(b).items()}
    assert pairs_of(algebra.intersect(a, b)) == {s: back[d] for s, d in pairs_of(a).items() if d in back}


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes, st.integers(1, 4))
def test_mapping_runs_order_and_scaling(data: st.DataObject, shape: tuple[int, ...], k: int) -> None:
    a = data.draw(slices(shape))
    pa = pairs_of(a)
    assert sorted(pa) == list(range(a.src_numel))
    algebra.validate_slice(a, a.src_numel)
    order = algebra.owned_order(a)
    assert order.tolist() == [pa[s] for s in range(a.src_numel)]
    shuffled = np.array(data.draw(st.permutations(range(a.src_numel))), np.int64)
    assert algebra.map_indices(a, shuffled).tolist() == [pa[int(s)] for s in shuffled]
    inverse = algebra.invert(a)
    back = {d: s for s, d in pa.items()}
    everything = np.arange(-2, a.dst_numel + 2)
    assert algebra.map_partial(inverse, everything).tolist() == [back.get(int(i), -1) for i in everything]

    r = algebra.runs(a)
    assert np.all(r.src_stride == 1)
    assert r.src_start.tolist() == np.concatenate(([0], np.cumsum(r.length)[:-1])).tolist()
    walked = [
        int(d) + i * int(t) for d, n, t in zip(r.dst_start, r.length, r.dst_stride, strict=True) for i in range(n)
    ]
    assert walked == order.tolist()

    wide = algebra.scaled(a, k)
    assert (wide.src_numel, wide.dst_numel) == (a.src_numel * k, a.dst_numel * k)
    assert pairs_of(wide) == {s * k + j: d * k + j for s, d in pa.items() for j in range(k)}


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes)
def test_json_round_trip(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a = data.draw(slices(shape))
    assert algebra.from_json(algebra.to_json(a), a.src_numel, a.dst_numel) == a


def test_runs_are_maximal_and_cross_blocks() -> None:
    two = Layout((Block((2, 5), 0, (5, 1), 10, (5, 1)), Block((4,), 10, (1,), 20, (1,))), 14, 30)
    r = algebra.runs(two)
    assert (r.src_start.tolist(), r.dst_start.tolist(), r.length.tolist()) == ([0], [10], [14])
    empty = algebra.runs(Layout((), 0, 30))
    assert empty.length.size == 0


def test_flat_slice_that_starts_mid_row_of_a_column_split() -> None:
    """A distributed optimizer's flat shard of a TP column-split matrix: head row, whole rows, tail row."""
    tp = Layout((Block((6, 4), 0, (4, 1), 4, (8, 1)),), 24, 48)
    shard = algebra.compose(algebra.contiguous(6, 12, 24), tp)
    assert len(shard.blocks) == 3
    assert algebra.owned_order(shard).tolist() == [14, 15, 20, 21, 22, 23, 28, 29, 30, 31, 36, 37]


def test_qkv_interleaved_by_query_group() -> None:
    """Fused [q q k v] per group against the separate canonical q, k, v: every row is found where it belongs."""
    groups, per_group, head, hidden = 2, 2, 3, 4
    rows = (per_group + 2) * head
    fused = np.arange(groups * rows * hidden).reshape(groups, per_group + 2, head, hidden)
    q = fused[:, :per_group].reshape(-1)
    layout = Layout(
        (Block((groups, per_group * head * hidden), 0, (rows * hidden, 1), 0, (per_group * head * hidden, 1)),),
        fused.size,
        q.size,
    )
    assert algebra.owned_order(algebra.invert(layout)).tolist() == q.tolist()
    k = Layout(
        (Block((groups, head * hidden), per_group * head * hidden, (rows * hidden, 1), 0, (head * hidden, 1)),),
        fused.size,
        groups * head * hidden,
    )
    assert algebra.owned_order(algebra.invert(k)).tolist() == fused[:, per_group].reshape(-1).tolist()
    assert algebra.compose(algebra.invert(layout), k).blocks == ()


def test_huge_tensors_cost_nothing() -> None:
    """Indices beyond 32 bits; no array of the tensor's size is made."""
    rows, cols = 1 << 20, 1 << 14
    a = algebra.compose(
        algebra.contiguous(12345, 1 << 32, rows * cols // 2),
        Layout((Block((rows, cols // 2), 0, (cols // 2, 1), cols // 2, (cols, 1)),), rows * cols // 2, rows * cols),
    )
    at = np.array([0, 1, (1 << 32) - 1], np.int64)
    expected = [(i + 12345) // (cols // 2) * cols + cols // 2 + (i + 12345) % (cols // 2) for i in at.tolist()]
    assert algebra.map_indices(a, at).tolist() == expected
    transposed = Layout((Block((cols, rows), 0, (rows, 1), 0, (1, cols)),), rows * cols, rows * cols)
    common = algebra.intersect(a, transposed)
    i = common.blocks[0].src_offset
    there = algebra.map_indices(common, np.array([i], np.int64))
    assert algebra.map_indices(transposed, there).tolist() == algebra.map_indices(a, np.array([i], np.int64)).tolist()
    assert sum(b.numel for b in common.blocks) == 1 << 32


def test_every_other_column_of_an_odd_width_meets_runs() -> None:
    """Strides of 2 and of an odd row do not divide each other; a few runs are cut without walking the elements."""
    rows, cols = 1 << 14, (1 << 20) + 1
    numel, half = rows * cols, cols // 2
    odd = Layout((Block((rows, half), 0, (half, 1), 1, (cols, 2)),), rows * half, numel)
    whole = algebra.intersect(odd, algebra.identity(numel))
    assert whole.blocks == odd.blocks
    first, count = 3 * cols + 10, 5 * cols
    some = algebra.intersect(odd, algebra.contiguous(first, count, numel))
    want = [i for r in range(3, 9) for i in (r * cols + 1, r * cols + cols - 2) if first <= i < first + count]
    at = algebra.map_partial(
        algebra.invert(algebra.compose(some, algebra.contiguous(first, count, numel))), np.array(want)
    )
    assert at.tolist() == [(i // cols) * half + (i % cols) // 2 for i in want]
    held = sum(b.numel for b in some.blocks)
    assert held == sum(1 for r in range(3, 9) for c in range(1, cols, 2) if first <= r * cols + c < first + count)


@pytest.mark.parametrize("step", [2, 3, 4])
def test_runs_that_lie_apart_on_the_other_side(step: int) -> None:
    """Some columns of an odd width against a transposed tensor: neighbours here are a column's length apart there."""
    rows, cols = 5, 11
    width = len(range(1, cols, step))
    some = Layout((Block((rows, width), 0, (width, 1), 1, (cols, step)),), rows * width, rows * cols)
    transposed = Layout((Block((cols, rows), 0, (rows, 1), 0, (1, cols)),), rows * cols, rows * cols)
    back = {d: s for s, d in pairs_of(transposed).items()}
    expected = {s: back[d] for s, d in pairs_of(some).items()}
    assert pairs_of(algebra.intersect(some, transposed)) == expected
    assert pairs_of(algebra.intersect(transposed, some)) == {d: s for s, d in expected.items()}


def test_uncovered_source_is_named() -> None:
    part = Layout((Block((3,), 2, (1,), 0, (1,)),), 8, 3)
    with pytest.raises(LayoutError, match="source element 1 "):
        algebra.map_indices(part, np.array([2, 1], np.int64))


@pytest.mark.parametrize(
    "blocks",
    [
        None,
        {},
        [[]],
        [[[2], 0, [1], 0]],
        [[[2], 0, [1], 0, [1], 0]],
        [[[2], 0, [1], 0, [1, 1]]],
        [[[0], 0, [1], 0, [1]]],
        [[[-1], 0, [1], 0, [1]]],
        [[[2.0], 0, [1], 0, [1]]],
        [[[True], 0, [1], 0, [1]]],
        [[[2], "0", [1], 0, [1]]],
        [[[2], -1, [1], 0, [1]]],
        [[[2], 0, [0], 0, [1]]],
        [[[2], 0, [1], 0, [0]]],
        [[[11], 0, [1], 0, [1]]],
        [[[2], 9, [1], 0, [1]]],
        [[[2], 0, [1], 9, [1]]],
        [[[2], 1 << 63, [1], 0, [1]]],
        [[[2, 3], 0, [3, 2], 0, [3, 1]]],
        [[[2, 3], 0, [3, 1], 0, [3, 2]]],
        [[[1] * 17, 0, [1] * 17, 0, [1] * 17]],
    ],
)
def test_malformed_blocks_are_refused(blocks: object) -> None:
    with pytest.raises(LayoutError):
        algebra.from_json(blocks, 10, 10)


def test_slices_that_are_not_slices_are_refused() -> None:
    with pytest.raises(LayoutError, match="no owner"):
        algebra.validate_slice(Layout((Block((3,), 0, (1,), 0, (1,)),), 4, 9), 4)
    with pytest.raises(LayoutError, match="belong to both"):
        algebra.validate_slice(Layout((Block((3,), 0, (1,), 0, (1,)), Block((2,), 2, (1,), 5, (1,))), 5, 9), 5)
    blocks = (Block((3,), 0, (1,), 0, (1,)), Block((2,), 3, (1,), 2, (1,)))
    with pytest.raises(LayoutError, match=r"w: elements \[2, 3\) belong to both"):
        algebra.validate_slice(Layout(blocks, 5, 9), 5, tensor="w")
    with pytest.raises(LayoutError):
        algebra.validate_slice(algebra.identity(4), 5)
    algebra.validate_slice(Layout((), 0, 9), 0)


def test_arguments_are_checked() -> None:
    with pytest.raises(LayoutError):
        algebra.contiguous(5, 6, 10)
    with pytest.raises(LayoutError):
        algebra.compose(algebra.identity(3), algebra.identity(4))
    with pytest.raises(InvalidInput):
        algebra.scaled(algebra.identity(3), 0)
    assert algebra.identity(0).blocks == ()


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes)
def test_normalised_keeps_the_pairs(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a = data.draw(slices(shape))
    assume(a.blocks)
    for b in a.blocks:
        one = Layout((b,), a.src_numel, a.dst_numel)
        n = b.normalised()
        assert pairs_of(Layout((n,), a.src_numel, a.dst_numel)) == pairs_of(one)
        assert 1 <= len(n.shape) <= max(1, len(b.shape))
