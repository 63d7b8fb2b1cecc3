"""Whatever the layouts on both sides and whatever is sent dense: the result is the version, and the undo is exact."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.apply import Applier, LiveCopy, LiveSet, LiveTensor
from engine.codec.chunk import ChunkHeader
from engine.layout.algebra import identity, map_indices
from engine.layout.blocks import Block, Layout
from engine.layout.mapping import map_partial
from engine.records import TensorMeta
from tests.support.versions import EMPTY_I64, EMPTY_U16, chunk_file, local_target, make_item
from tests.support.views import KINDS, View, views


def windows(rows: int, columns: int, by_column: bool, first: int, count: int) -> Layout:
    """`count` whole columns (or rows) from `first` on, row-major in memory."""
    if by_column:
        block = Block((rows, count), 0, (count, 1), first, (columns, 1))
        return Layout((block,), rows * count, rows * columns)
    block = Block((count, columns), 0, (columns, 1), first * columns, (columns, 1))
    return Layout((block,), count * columns, rows * columns)


def transposed(rows: int, columns: int) -> Layout:
    return Layout((Block((columns, rows), 0, (rows, 1), 0, (1, columns)),), rows * columns, rows * columns)


def padded(layout: Layout, pad: int) -> Layout:
    """The same with `pad` lanes that belong to nothing after each run of the innermost axis."""
    (block,) = layout.blocks
    if len(block.shape) != 2 or pad == 0:
        return layout
    rows, run = block.shape
    wide = Block((rows, run), 0, (run + pad, 1), block.dst_offset, block.dst_strides)
    return Layout((wide,), rows * (run + pad), layout.dst_numel)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, list[Layout], list[bool], Layout, int]:
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    by_column = draw(st.booleans())
    along = columns if by_column else rows
    cuts = sorted({0, along, *draw(st.lists(st.integers(1, along), max_size=3))})
    writers = [windows(rows, columns, by_column, a, b - a) for a, b in itertools.pairwise(cuts)]
    dense = draw(st.lists(st.booleans(), min_size=len(writers), max_size=len(writers)))
    kind = draw(st.sampled_from(["plain", "transposed", "columns", "rows"]))
    if kind == "plain":
        mine = identity(rows * columns)
    elif kind == "transposed":
        mine = transposed(rows, columns)
    else:
        limit = columns if kind == "columns" else rows
        first = draw(st.integers(0, limit - 1))
        mine = windows(rows, columns, kind == "columns", first, draw(st.integers(1, limit - first)))
    pad = draw(st.sampled_from([0, 0, 1, 3]))
    return rows, columns, writers, dense, padded(mine, pad), draw(st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("kind", KINDS)
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_any_layouts(kind: str, case: tuple[int, int, list[Layout], list[bool], Layout, int]) -> None:
    with views(kind) as view:
        installs(view, case)


def installs(view: View, case: tuple[int, int, list[Layout], list[bool], Layout, int]) -> None:
    rows, columns, writers, dense, mine, seed = case
    rng = np.random.default_rng(seed)
    n = rows * columns
    meta = TensorMeta(name="t", shape=(rows, columns), dtype="bfloat16")
    old = rng.integers(0, 1 << 16, n).astype(np.uint16)
    new = np.where(rng.random(n) < 0.3, rng.integers(0, 1 << 16, n), old).astype(np.uint16)
    at = map_partial(mine, np.arange(mine.src_numel, dtype=np.int64))
    padding, here = np.flatnonzero(at < 0), at[at >= 0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = []
        for writer, (layout, whole) in enumerate(zip(writers, dense, strict=True)):
            to = map_indices(layout, np.arange(layout.src_numel, dtype=np.int64))
            if whole:
                one = make_item(meta, 0, layout, EMPTY_I64, EMPTY_U16, np.zeros(1, np.int64), new[to])
            else:
                ranks = np.flatnonzero(new[to] != old[to]).astype(np.int64)
                one = make_item(meta, 0, layout, ranks, new[to][ranks] - old[to][ranks])
            files.append(chunk_file(folder, ChunkHeader("r", 1, 1, writer, 0, 0), [one], f"w{writer}"))
        target = dataclasses.replace(local_target(folder, [meta], {"t": new}, {"t": old}), chunks=tuple(files))
        memory = rng.integers(0, 1 << 16, mine.src_numel).astype(np.uint16)
        junk = memory[padding].copy()
        memory[at >= 0] = old[here]
        live = LiveTensor(("t",), (rows, columns), "bfloat16", (LiveCopy(view(memory), mine),))
        applier = Applier(LiveSet([live], partial=True))
        verdict = applier.prepare(target)
        assert verdict.entries == int((new[here] != old[here]).sum())
        assert np.array_equal(memory[at >= 0], old[here])
        applier.commit(1)
        assert np.array_equal(memory[at >= 0], new[here])
        applier.rollback()
        assert np.array_equal(memory[at >= 0], old[here])
        applier.prepare(target)
        applier.commit(1)
        applier.finalize(1)
        assert np.array_equal(memory[at >= 0], new[here])
        assert np.array_equal(memory[padding], junk)
