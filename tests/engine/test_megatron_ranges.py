"""Any flat range of a parameter, as an optimizer shard owns it: its runs hold exactly the range's elements."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import LayoutError
from engine.layout.blocks import Block, Layout
from engine.layout.mapping import map_indices
from engine.layout.placement import Placement, numel_of
from engine.models.megatron import (
    Run,
    restrict,
)
from engine.records.models import TensorMeta
from tests.engine.megatron_world import (
    DENSE,
    I64,
    LATENT_MODEL,
    MOE,
    ids,
    prove_cover,
    ranks,
    tables,
)
from tests.support.megatron.reference import Coordinates, Form, Tagged


def check_runs(runs: list[Run], tag: Tagged, local: I64, start: int, stop: int) -> None:
    """Runs hold exactly the range's elements that are not padding, in order, each as long as it can be."""
    flat = local.reshape(-1)
    seen = np.zeros(flat.size, bool)
    owner = np.full(flat.size, -1)
    numbers = {r.tensor.name: k for k, r in enumerate({r.tensor.name: r for r in runs}.values())}
    end = start
    for r in runs:
        assert end <= r.start < r.start + r.numel <= stop
        assert (r.layout.src_numel, r.layout.dst_numel) == (r.numel, numel_of(r.tensor))
        at = map_indices(r.layout, np.arange(r.numel))
        here = slice(r.start, r.start + r.numel)
        assert np.array_equal(tag.arrays[r.tensor.name].reshape(-1)[at], flat[here])
        seen[here] = True
        owner[here] = numbers[r.tensor.name]
        end = r.start + r.numel
    assert np.array_equal(seen[start:stop], flat[start:stop] > 0)
    assert not seen[:start].any()
    assert not seen[stop:].any()
    changes = np.count_nonzero(np.diff(owner[start:stop][seen[start:stop]])) if seen.any() else -1
    holes = np.count_nonzero(np.diff(np.flatnonzero(seen)) > 1)
    assert len(runs) == changes + 1 + holes


@cache
def everything() -> list[tuple[Tagged, I64, list[Placement]]]:
    """One parameter of each kind on the second rank of two."""
    out = []
    for c, form in (
        (DENSE[1], Form()), (DENSE[4], Form()), (MOE[0], Form(experts="legacy")), (MOE[3], Form(fused=True)),
    ):  # fmt: skip
        tag, at = Tagged(), Coordinates((1, 2), (1, 2), (0, 1), range(1, 3))
        found = {key[0].split(".", 3)[-1]: (tag, local, p) for _, key, local, p in tables(c, tag, [at], form)}
        out += found.values()
    return out


@given(which=st.integers(0, 999), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_range_of_a_parameter(which: int, data: st.DataObject) -> None:
    tag, local, placements = everything()[which % len(everything())]
    start = data.draw(st.integers(0, local.size))
    stop = data.draw(st.integers(start, local.size))
    check_runs(restrict(placements, start, stop), tag, local, start, stop)


def test_a_whole_parameter_and_each_of_its_ends() -> None:
    for tag, local, placements in everything():
        for start, stop in ((0, local.size), (0, 0), (0, 1), (local.size - 1, local.size), (5, max(5, local.size - 3))):
            check_runs(restrict(placements, start, stop), tag, local, start, stop)


def test_neighbours_are_one_run_whatever_blocks_they_need() -> None:
    """[0, 4) goes on from [4, 8) in the tensor, too; [8, 12) lies elsewhere, and 12 belongs to nobody."""
    meta = TensorMeta(name="t", shape=(20,))
    blocks = (
        Block((4,), 0, (1,), 2, (1,)),
        Block((4,), 4, (1,), 6, (1,)),
        Block((2, 2), 8, (2, 1), 0, (15, 1)),
        Block((2,), 13, (1,), 18, (1,)),
    )
    found = restrict([Placement(meta, Layout(blocks, 15, 20))], 1, 15)
    assert [(r.start, r.numel, len(r.layout.blocks)) for r in found] == [(1, 11, 2), (13, 2, 1)]
    assert map_indices(found[0].layout, np.arange(11)).tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 15, 16]
    assert map_indices(found[1].layout, np.arange(2)).tolist() == [18, 19]


@pytest.mark.parametrize("cuts", [2, 7])
@pytest.mark.parametrize("c", [DENSE[1], MOE[2], LATENT_MODEL], ids=ids)
def test_cover_also_holds_for_the_slices_of_a_distributed_optimizer(c: dict[str, Any], cuts: int) -> None:
    """Data-parallel ranks own flat ranges of every parameter, some of them none."""
    prove_cover(c, tables(c, Tagged(), ranks(2, 2, 1, (1, 3)), Form(te=True, experts="grouped")), cuts)


def test_a_range_outside_the_parameter_is_refused() -> None:
    _, local, placements = everything()[0]
    for start, stop in ((-1, 2), (3, 2), (0, local.size + 1)):
        with pytest.raises(LayoutError, match="not a range"):
            restrict(placements, start, stop)
    assert restrict([], 0, 7) == []
