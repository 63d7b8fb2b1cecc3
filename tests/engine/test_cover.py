"""The exact-cover proof: it accepts what covers, and names gap or overlap, range and owners otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import LayoutError
from engine.layout import algebra
from engine.layout.blocks import Block, Layout
from engine.layout.cover import prove_exact_cover

ROWS, COLS = 12, 16
NUMEL = ROWS * COLS


def columns(lo: int, hi: int) -> Layout:
    n = hi - lo
    return Layout((Block((ROWS, n), 0, (n, 1), lo, (COLS, 1)),), ROWS * n, NUMEL)


def rows(lo: int, hi: int) -> Layout:
    return algebra.contiguous(lo * COLS, (hi - lo) * COLS, NUMEL)


def flat(whole: Layout, lo: int, hi: int) -> Layout:
    return algebra.compose(algebra.contiguous(lo, hi - lo, whole.src_numel), whole)


def test_tensor_parallel_with_flat_optimizer_shards() -> None:
    owners = []
    for tp in range(4):
        part = columns(tp * 4, tp * 4 + 4)
        for dp, (lo, hi) in enumerate([(0, 7), (7, 30), (30, 48)]):
            owners.append((f"tp{tp} dp{dp}", flat(part, lo, hi)))
    prove_exact_cover(NUMEL, owners, tensor="w")
    for missing in range(len(owners)):
        with pytest.raises(LayoutError, match=r"w: elements .* no owner"):
            prove_exact_cover(NUMEL, owners[:missing] + owners[missing + 1 :], tensor="w")
        with pytest.raises(LayoutError, match=rf"belong to both (tp. dp. and again|again and {owners[missing][0]})"):
            prove_exact_cover(NUMEL, [*owners, ("again", owners[missing][1])], tensor="w")


def test_gap_is_named_with_its_neighbours() -> None:
    with pytest.raises(LayoutError) as caught:
        prove_exact_cover(NUMEL, [("rank 0", rows(0, 3)), ("rank 7", rows(5, 12))], tensor="model.w")
    assert "model.w: elements [48, 80) of 192 have no owner" in caught.value.message
    assert "rank 0 before it and rank 7 after it" in caught.value.message
    with pytest.raises(LayoutError, match=r"elements \[0, 192\) of 192 have no owner \(beside the gap: nobody\)"):
        prove_exact_cover(NUMEL, [], tensor="model.w")
    with pytest.raises(LayoutError, match=r"\[176, 192\).*rank 0 before it\)"):
        prove_exact_cover(NUMEL, [("rank 0", rows(0, 11))])
    with pytest.raises(LayoutError, match=r"\[10, 11\).*a before it and b after it"):
        prove_exact_cover(NUMEL, [("a", columns(0, 10)), ("b", columns(11, 16))])


def test_overlap_is_named() -> None:
    with pytest.raises(LayoutError, match=r"w: elements \[48, 64\) belong to both rank 0 and rank 1"):
        prove_exact_cover(NUMEL, [("rank 0", rows(0, 4)), ("rank 1", rows(3, 12))], tensor="w")
    with pytest.raises(LayoutError, match=r"elements \[8, 10\) belong to both a and b"):
        prove_exact_cover(NUMEL, [("a", columns(0, 10)), ("b", columns(8, 16))])
    replica = [("rank 0", algebra.identity(NUMEL)), ("rank 1", algebra.identity(NUMEL))]
    with pytest.raises(LayoutError, match="rank 0 and rank 1") as caught:
        prove_exact_cover(NUMEL, replica)
    assert "replicas" in caught.value.remedy


def test_gap_and_overlap_of_equal_size_do_not_cancel() -> None:
    with pytest.raises(LayoutError, match="belong to both"):
        prove_exact_cover(NUMEL, [("a", rows(0, 4)), ("b", rows(3, 11))])


def test_transposed_and_interleaved_owners() -> None:
    transposed = Layout((Block((COLS, 5), 0, (5, 1), 0, (1, COLS)),), 5 * COLS, NUMEL)
    prove_exact_cover(NUMEL, [("t", transposed), ("r", rows(5, ROWS))])
    even = Layout((Block((NUMEL // 2,), 0, (1,), 0, (2,)),), NUMEL // 2, NUMEL)
    odd = Layout((Block((NUMEL // 2,), 0, (1,), 1, (2,)),), NUMEL // 2, NUMEL)
    prove_exact_cover(NUMEL, [("even", even), ("odd", odd)])
    with pytest.raises(LayoutError, match="belong to both"):
        prove_exact_cover(NUMEL, [("even", even), ("rows", rows(0, 6))])


def test_strides_that_do_not_divide_each_other() -> None:
    threes = [(f"3+{i}", Layout((Block((2,), 0, (1,), i, (3,)),), 2, 10)) for i in range(3)]
    prove_exact_cover(10, [*threes, ("tail", algebra.contiguous(6, 4, 10))])
    fives = ("five", Layout((Block((2,), 0, (1,), 4, (5,)),), 2, 10))
    with pytest.raises(LayoutError, match=r"\[4, 5\) belong to both 3\+1 and five"):
        prove_exact_cover(10, [*threes, fives])


def test_sizes_must_agree_and_blocks_must_fit() -> None:
    with pytest.raises(LayoutError, match="rank 3 describes a tensor of 5"):
        prove_exact_cover(6, [("rank 3", algebra.identity(5))], tensor="w")
    with pytest.raises(LayoutError, match="reaches"):
        prove_exact_cover(6, [("rank 3", Layout((Block((6,), 0, (1,), 1, (1,)),), 6, 6))])


def test_a_tensor_beyond_32_bits_needs_no_arrays() -> None:
    r, c, ranks = 1 << 22, 1 << 14, 8
    n = c // ranks
    numel = r * c
    owners = [(f"rank {i}", Layout((Block((r, n), 0, (n, 1), i * n, (c, 1)),), r * n, numel)) for i in range(ranks)]
    prove_exact_cover(numel, owners)
    with pytest.raises(LayoutError, match=rf"\[{3 * n}, {4 * n}\) of {numel}"):
        prove_exact_cover(numel, owners[:3] + owners[4:])


def test_an_empty_tensor_is_covered_by_nobody() -> None:
    prove_exact_cover(0, [])
    prove_exact_cover(0, [("a", Layout((), 0, 0))])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_verdict_matches_counting(data: st.DataObject) -> None:
    """Random sets of blocks on a small tensor: the proof succeeds exactly when every element is counted once."""
    numel = data.draw(st.integers(1, 40))
    counted = np.zeros(numel, np.int64)
    owners = []
    for i in range(data.draw(st.integers(0, 6))):
        stride = data.draw(st.sampled_from([1, 1, 2, 3, 4]))
        offset = data.draw(st.integers(0, numel - 1))
        n = data.draw(st.integers(1, (numel - 1 - offset) // stride + 1))
        owners.append((f"r{i}", Layout((Block((n,), 0, (1,), offset, (stride,)),), n, numel)))
        counted[offset : offset + n * stride : stride] += 1
    free = np.flatnonzero(counted == 0)
    if data.draw(st.booleans()):  # fill the gaps, so that acceptance is tested too
        owners += [(f"fill {i}", algebra.contiguous(int(i), 1, numel)) for i in free]
        counted[free] += 1
    if np.all(counted == 1):
        prove_exact_cover(numel, owners)
        return
    with pytest.raises(LayoutError) as caught:
        prove_exact_cover(numel, owners)
    lo, hi = (int(x) for x in caught.value.message.split("[")[1].split(")")[0].split(","))
    if "no owner" in caught.value.message:
        assert np.all(counted[lo:hi] == 0)
        assert lo == 0 or counted[lo - 1]
        assert hi == numel or counted[hi]
    else:
        assert np.all(counted[lo:hi] > 1)
