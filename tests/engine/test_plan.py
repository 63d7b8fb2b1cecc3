"""Plans: redundancy-free, balanced, the same for everybody, and refused where the layouts do not fit."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from engine.errors import InvalidInput, LayoutError
from engine.layout.algebra import contiguous, identity, scaled
from engine.layout.blocks import TILE_LANES, Block, Layout
from engine.plan.operations import Counts, Operation, Part, ReceiverTensor, SenderSlice
from engine.plan.planning import Plan, make_plan
from engine.plan.selection import (
    SliceChanges,
    count,
    dense_counts,
    dense_lanes,
    dense_ranks,
    dense_tiles,
    select_entries,
)
from engine.plan.statistics import payload_bytes, statistics, version_bytes
from engine.records import TensorMeta
from tests.support.plans import Receivers, Senders, box, covered, joined, split, where

ROWS, COLUMNS = 12, 8
W = TensorMeta(name="w", shape=(ROWS, COLUMNS))
WHOLE = identity(ROWS * COLUMNS)


def rows(parts: int, part: int) -> Layout:
    return split(W.shape, 0, parts, part)


def columns(parts: int, part: int) -> Layout:
    return split(W.shape, 1, parts, part)


def senders(*layouts: Layout | list[Layout], tensor: str = "w") -> list[list[SenderSlice]]:
    """One member for each argument."""
    return [
        [SenderSlice(n, tensor, x) for n, x in enumerate(mine if isinstance(mine, list) else [mine])]
        for mine in layouts
    ]


def receivers(*layouts: Layout, tensor: str = "w") -> list[list[ReceiverTensor]]:
    return [[ReceiverTensor(tensor, x)] for x in layouts]


def planned(metas: list[TensorMeta], s: Senders, r: Receivers) -> Plan:
    """The plan, which covers everything."""
    plan = make_plan(metas, s, r)
    assert covered(plan, s, r)
    assert [(o.sender, o.receiver, o.tensor) for o in plan.operations] == sorted(
        {(o.sender, o.receiver, o.tensor) for o in plan.operations}
    )
    return plan


def lanes_by_pair(plan: Plan) -> dict[tuple[int, int], int]:
    return {pair: sum(o.lanes for o in plan.of_pair(*pair)) for pair in plan.pairs}


N = ROWS * COLUMNS
TRAINERS = {
    "1": senders(WHOLE),
    "TP2 by column": senders(columns(2, 0), columns(2, 1)),
    "TP2 by row": senders(rows(2, 0), rows(2, 1)),
    "2x2": senders(*(box(W.shape, [range(6 * i, 6 * i + 6), range(4 * j, 4 * j + 4)]) for i in (0, 1) for j in (0, 1))),
    "flat shards that start mid-row": senders(contiguous(0, 13, N), contiguous(13, 40, N), contiguous(53, N - 53, N)),
    "every third row": senders(*(box(W.shape, [range(i, ROWS, 3), range(COLUMNS)]) for i in range(3))),
    "interleaved columns": senders(
        joined([box(W.shape, [range(ROWS), range(0, 2)]), box(W.shape, [range(ROWS), range(4, 6)])]),
        joined([box(W.shape, [range(ROWS), range(2, 4)]), box(W.shape, [range(ROWS), range(6, 8)])]),
    ),
    "two slices of one rank": senders([rows(3, 0), rows(3, 2)], rows(3, 1)),
    "transposed": senders(box(W.shape, [range(ROWS), range(COLUMNS)], [1, 0])),
}
ENGINES = {
    "1": receivers(WHOLE),
    "TP2 by column": receivers(columns(2, 0), columns(2, 1)),
    "TP4 by row": receivers(*(rows(4, i) for i in range(4))),
    "two replicas": receivers(WHOLE, WHOLE),
    "padded": receivers(joined([rows(2, 0)], 3, 5), joined([rows(2, 1)], 0, 7)),
    "transposed": receivers(box(W.shape, [range(ROWS), range(COLUMNS)], [1, 0])),
    "some rows only": receivers(rows(3, 1)),
}


@pytest.mark.parametrize(("trainer", "engine"), [*itertools.product(TRAINERS, ENGINES)])
def test_every_held_lane_is_reached_once(trainer: str, engine: str) -> None:
    planned([W], TRAINERS[trainer], ENGINES[engine])


def test_pairs_without_anything_in_common_have_no_operation() -> None:
    plan = planned([W], senders(*(rows(4, i) for i in range(4))), receivers(rows(2, 0), rows(2, 1)))
    assert plan.pairs == ((0, 0), (1, 0), (2, 1), (3, 1))
    assert plan.of_pair(0, 1) == ()
    assert lanes_by_pair(plan) == dict.fromkeys(plan.pairs, 24)
    assert (plan.senders, plan.receivers) == (4, 2)


def test_replicated_senders_share_the_work() -> None:
    """TP2 × DP2 → TP2: each half is held twice, and each of the four senders sends a quarter."""
    replicas = senders(columns(2, 0), columns(2, 1), columns(2, 0), columns(2, 1))
    plan = planned([W], replicas, receivers(rows(2, 0), rows(2, 1)))
    assert [s.lanes for s in statistics(plan).senders] == [24] * 4
    assert statistics(plan).balance == 1


def test_work_that_only_one_can_do_counts_for_the_balance() -> None:
    small = TensorMeta(name="a", shape=(60,))
    mine = [
        [SenderSlice(0, "w", WHOLE), SenderSlice(1, "a", identity(60))],
        [SenderSlice(0, "a", identity(60))],
    ]
    plan = planned([W, small], mine, [[ReceiverTensor("w", WHOLE), ReceiverTensor("a", identity(60))]])
    assert lanes_by_pair(plan) == {(0, 0): 96, (1, 0): 60}


def test_many_replicated_tensors_are_spread_evenly() -> None:
    rng = random.Random(5)
    metas = [TensorMeta(name=f"t{i}", shape=(rng.randrange(1, 4000),)) for i in range(200)]
    held = [[SenderSlice(i, m.name, identity(m.shape[0])) for i, m in enumerate(metas)] for _ in range(7)]
    plan = planned(metas, held, [[ReceiverTensor(m.name, identity(m.shape[0])) for m in metas]] * 2)
    assert statistics(plan).balance < 1.01


def test_replicas_may_lie_in_another_order() -> None:
    turned = box(W.shape, [range(ROWS), range(COLUMNS)], [1, 0])
    plan = planned([W], senders(WHOLE, turned), receivers(rows(2, 0), rows(2, 1)))
    assert {o.sender for o in plan.operations} == {0, 1}


def test_a_slice_that_a_sender_lists_twice_is_sent_once() -> None:
    planned([W], senders([WHOLE, WHOLE]), receivers(WHOLE))


def moe(experts: int = 4) -> list[TensorMeta]:
    return [TensorMeta(name=f"experts.{e}.w", shape=(ROWS, COLUMNS)) for e in range(experts)]


def test_experts_go_to_halves_of_experts() -> None:
    """EP2 → TP2."""
    metas = moe()
    mine = [[SenderSlice(e, metas[e].name, WHOLE) for e in range(4) if e % 2 == rank] for rank in range(2)]
    theirs = [[ReceiverTensor(m.name, columns(2, rank)) for m in metas] for rank in range(2)]
    plan = planned(metas, mine, theirs)
    assert lanes_by_pair(plan) == dict.fromkeys(itertools.product((0, 1), (0, 1)), 96)


def test_experts_that_live_elsewhere_make_no_operation() -> None:
    """EP2 → EP2, cut differently; an expert nobody holds is left out."""
    metas = moe()
    mine = [[SenderSlice(e, metas[e].name, WHOLE) for e in range(4) if e % 2 == rank] for rank in range(2)]
    theirs = [[ReceiverTensor(metas[e].name, WHOLE) for e in held] for held in ((0, 2), (1,))]
    plan = planned(metas, mine, theirs)
    assert [(o.sender, o.receiver, o.tensor) for o in plan.operations] == [
        (0, 0, "experts.0.w"),
        (0, 0, "experts.2.w"),
        (1, 1, "experts.1.w"),
    ]


def test_stages_go_to_one_rank() -> None:
    """PP2 → TP1: each stage has its own layers."""
    metas = [TensorMeta(name=f"layers.{i}.w", shape=W.shape) for i in range(4)]
    mine = [[SenderSlice(i, metas[i].name, WHOLE) for i in range(4) if i // 2 == stage] for stage in range(2)]
    plan = planned(metas, mine, [[ReceiverTensor(m.name, WHOLE) for m in metas]])
    assert [len(plan.of_pair(s, 0)) for s in (0, 1)] == [2, 2]


def test_replicated_key_value_heads() -> None:
    """Two heads on four ranks: neighbours hold the same rows, which both get."""
    plan = planned([W], senders(rows(2, 0), rows(2, 1)), receivers(*(rows(2, i // 2) for i in range(4))))
    assert plan.pairs == ((0, 0), (0, 1), (1, 2), (1, 3))


def test_a_fused_tensor_of_the_trainer_is_sent_from_where_it_lies() -> None:
    """Interleaved query, key and value rows of one parameter are three slices of it, each into its own tensor."""
    q, k = TensorMeta(name="q", shape=(8, 3)), TensorMeta(name="k", shape=(4, 3))
    mine = [
        [SenderSlice(0, "q", split(q.shape, 0, 2, r)), SenderSlice(1, "k", split(k.shape, 0, 2, r))] for r in (0, 1)
    ]
    fused = [ReceiverTensor("q", joined([identity(24)], 0, 12)), ReceiverTensor("k", joined([identity(12)], 24, 0))]
    plan = planned([q, k], mine, [fused])
    assert {o.span for o in plan.operations} == {36}


def test_wide_elements() -> None:
    meta = TensorMeta(name="w", shape=W.shape, dtype="float32")
    planned(
        [meta],
        senders(*(scaled(columns(2, i), 2) for i in (0, 1))),
        receivers(*(scaled(rows(3, i), 2) for i in range(3))),
    )


def test_bytes_and_empty_tensors() -> None:
    flags, none = TensorMeta(name="flags", shape=(7,), dtype="uint8"), TensorMeta(name="none", shape=(0, 4))
    mine = [[SenderSlice(0, "flags", identity(4)), SenderSlice(1, "none", identity(0))], []]
    theirs = [[ReceiverTensor("flags", identity(4)), ReceiverTensor("none", identity(0))], []]
    plan = planned([flags, none], mine, theirs)
    assert [o.tensor for o in plan.operations] == ["flags"]
    assert make_plan([], [], []).operations == ()


def shuffled(seed: int, metas: list[TensorMeta], s: Senders, r: Receivers) -> Plan:
    rng = random.Random(seed)

    def mixed(layout: Layout) -> Layout:
        return dataclasses.replace(layout, blocks=tuple(rng.sample(layout.blocks, len(layout.blocks))))

    return make_plan(
        rng.sample(metas, len(metas)),
        [[dataclasses.replace(x, layout=mixed(x.layout)) for x in rng.sample(m, len(m))] for m in map(list, s)],
        [[dataclasses.replace(x, layout=mixed(x.layout)) for x in rng.sample(m, len(m))] for m in map(list, r)],
    )


def test_the_order_of_lists_does_not_matter() -> None:
    metas = [*moe(), W]
    mine = [
        [*(SenderSlice(i, m.name, WHOLE) for i, m in enumerate(metas[:4])), *TRAINERS["interleaved columns"][s]]
        for s in (0, 1)
    ]
    theirs = [[ReceiverTensor(m.name, WHOLE) for m in metas]] * 3
    plan = planned(metas, mine, theirs)
    for seed in range(5):
        assert shuffled(seed, metas, mine, theirs) == plan


def test_whatever_changes_a_layout_changes_the_digest() -> None:
    """Even of lanes that nobody receives, since it numbers the ranks of a slice."""
    base = (["w", "v"], senders([rows(2, 0), rows(2, 1)]), receivers(rows(2, 0)))
    other = TensorMeta(name="v", shape=(3,))
    turned = box(W.shape, [range(6, 12), range(COLUMNS)], [1, 0])
    plans = [
        make_plan([W, other], base[1], base[2]),
        make_plan([W], base[1], base[2]),
        make_plan([W, TensorMeta(name="v", shape=(3, 1))], base[1], base[2]),
        make_plan([W, TensorMeta(name="v", shape=(3,), dtype="float16")], base[1], base[2]),
        make_plan([W, other], senders([rows(2, 0), turned]), base[2]),
        make_plan([W, other], senders([rows(2, 1), rows(2, 0)]), base[2]),
        make_plan([W, other], senders(rows(2, 0), rows(2, 1)), base[2]),
        make_plan([W, other], senders([rows(2, 0)]), base[2]),
        make_plan([W, other], [*base[1], []], base[2]),
        make_plan([W, other], base[1], [*base[2], []]),
        make_plan([W, other], base[1], receivers(rows(2, 1))),
        make_plan([W, other], base[1], receivers(joined([rows(2, 0)], 0, 1))),
    ]
    assert len({p.digest for p in plans}) == len(plans)
    assert all(len(p.digest) == 64 for p in plans)


def broken(layout: Layout, *blocks: Block) -> Layout:
    return Layout(blocks, layout.src_numel, layout.dst_numel)


SHORT = TensorMeta(name="w", shape=(ROWS, COLUMNS - 1))
REFUSED = {
    "a gap": (
        [W], senders(rows(4, 0), rows(4, 2), rows(4, 3)), receivers(rows(4, 0), WHOLE),
        r"w: receiver 1 holds lanes \[24, 48\) of 96, which no sender has",
    ),
    "a gap in columns": (
        [W], senders(box(W.shape, [range(ROWS), range(1, COLUMNS)])), receivers(columns(2, 0)),
        r"w: receiver 0 holds lanes \[0, 1\)",
    ),
    "nobody": ([W], [[]], receivers(rows(4, 1)), r"w: receiver 0 holds lanes \[24, 48\)"),
    "an overlap in part": (
        [W], senders(WHOLE, rows(2, 1)), receivers(WHOLE),
        r"w: lanes \[48, 96\) are in slice 0 of sender 0 and in slice 0 of sender 1",
    ),
    "a piece of another one": (
        [W], senders(rows(2, 0), WHOLE), receivers(WHOLE),
        r"w: lanes \[0, 48\) are in slice 0 of sender 0 and in slice 0 of sender 1",
    ),
    "an overlap of columns": (
        [W], senders(columns(2, 0), columns(2, 1), box(W.shape, [range(ROWS), range(3, 5)])), receivers(WHOLE),
        r"w: lanes \[3, 4\) are in slice 0 of sender 0 and in slice 0 of sender 2",
    ),
    "an overlap that nobody receives": (
        [W], senders([WHOLE, rows(2, 1)]), [[]], r"w: lanes \[48, 96\) are in slice 0 of sender 0 and in slice 1",
    ),
    "a tensor the version has not, sent": ([], senders(WHOLE), [], r"sender 0 has a tensor 'w' that the version does"),
    "a tensor the version has not, held": ([], [], receivers(WHOLE), r"receiver 0 has a tensor 'w'"),
    "another shape of the sender": ([SHORT], senders(WHOLE), [], r"w: sender 0 describes a tensor of 96 lanes"),
    "another shape of the receiver": (
        [SHORT], senders(identity(84)), receivers(identity(84), WHOLE), r"w: receiver 1 describes a tensor of 96 lanes",
    ),
    "another dtype of the receiver": (
        [W], senders(WHOLE), receivers(scaled(WHOLE, 2)), r"w: receiver 0 describes a tensor of 192 lanes, it has 96",
    ),
    "two shapes": ([W, SHORT], [], [], r"'w' is described in two ways"),
    "a slice number twice": ([W], [[SenderSlice(0, "w", rows(2, 0))] * 2], [], r"sender 0 lists slice 0 of 'w' twice"),
    "a tensor twice": ([W], senders(WHOLE), [[ReceiverTensor("w", WHOLE)] * 2], r"receiver 0 lists 'w' twice"),
    "a rank without a lane": (
        [W], senders(broken(WHOLE, Block((95,), 0, (1,), 0, (1,)))), [], r"slice 0 of sender 0: .*w",
    ),
    "a lane mapped twice": (
        [W], senders(WHOLE),
        receivers(broken(WHOLE, Block((4,), 0, (1,), 0, (1,)), Block((4,), 4, (1,), 2, (1,)))), r"receiver 0: w: ",
    ),
    "a local lane mapped twice": (
        [W], senders(WHOLE),
        receivers(broken(WHOLE, Block((4,), 0, (1,), 0, (1,)), Block((4,), 2, (1,), 4, (1,)))), r"receiver 0: local",
    ),
    "a layout out of bounds": (
        [W], senders(WHOLE), receivers(broken(WHOLE, Block((97,), 0, (1,), 0, (1,)))), r"reaches source 96 of 96",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_layouts_that_do_not_fit_are_refused_by_name(case: str) -> None:
    metas, s, r, words = REFUSED[case]
    with pytest.raises((LayoutError, InvalidInput), match=words):
        make_plan(metas, s, r)


def part_of(layout: Layout) -> Part:
    return Part(0, layout)


LONG = 3 * TILE_LANES + 17
PARTS = {
    "all": identity(LONG),
    "a run": Layout((Block((LONG // 2,), 70000, (1,), 5, (1,)),), LONG, LONG),
    "columns": box((LONG // 7, 7), [range(LONG // 7), range(2, 5)]),
    "two blocks": Layout((Block((9,), 65530, (1,), 20, (1,)), Block((50, 3), 131000, (7, 1), 29, (3, 1))), LONG, 400),
    "nothing": Layout((), LONG, 5),
}


@pytest.mark.parametrize("case", PARTS)
def test_selection_is_what_the_layout_says(case: str) -> None:
    layout = PARTS[case]
    part, at = part_of(layout), where(layout)
    rng = np.random.default_rng(1)
    ranks = np.flatnonzero(rng.random(layout.src_numel) < 0.2)
    chosen, local = select_entries(part, ranks)
    positions = np.arange(ranks.size)[chosen]
    assert np.array_equal(positions, np.flatnonzero(at[ranks] >= 0))
    assert np.array_equal(local, at[ranks[positions]])
    tiles = np.arange(-(-layout.src_numel // TILE_LANES))
    reached = [np.flatnonzero(at[t * TILE_LANES : (t + 1) * TILE_LANES] >= 0) + t * TILE_LANES for t in tiles]
    assert dense_counts(part, tiles).tolist() == [r.size for r in reached]
    assert dense_tiles(part, tiles).tolist() == [t for t in tiles if reached[t].size]
    for tile in tiles.tolist():
        assert np.array_equal(dense_ranks(part, tile), reached[tile])
        assert np.array_equal(dense_lanes(part, tile)[1], at[reached[tile]])
    operation = Operation(0, 0, "w", 1, layout.dst_numel, (part,))
    assert count(operation, {0: SliceChanges(ranks, tiles[:2])}) == Counts(
        positions.size, sum(bool(r.size) for r in reached[:2]), sum(r.size for r in reached[:2])
    )
    assert count(operation, {}) == Counts(0, 0, 0)


def test_statistics_and_bytes() -> None:
    plan = planned([W], senders(rows(3, 0), [rows(3, 1), rows(3, 2)]), receivers(rows(2, 0), rows(2, 1)))
    stats = statistics(plan)
    assert (stats.operations, stats.lanes) == (3, 96)
    assert {pair: (s.operations, s.lanes) for pair, s in stats.pairs.items()} == {
        (0, 0): (1, 32), (1, 0): (1, 16), (1, 1): (1, 48),
    }  # fmt: skip
    assert [s.lanes for s in stats.senders] == [32, 64]
    assert [(s.lanes, s.share) for s in stats.receivers] == [(48, 0.5), (48, 0.5)]
    assert stats.balance == pytest.approx(64 / 48)
    assert statistics(make_plan([], [[]], [[]])).balance == 1
    counts = [Counts(0, 0, 0), Counts(5, 0, 0), Counts(1, 2, 10)]
    assert version_bytes(plan, counts) == {(0, 0): 24, (1, 0): 24 + 30, (1, 1): 24 + 6 + 32 + 20}
    wide = dataclasses.replace(plan.operations[0], span=(1 << 32) + 1)
    assert payload_bytes(wide, Counts(5, 0, 0)) == 50
    with pytest.raises(InvalidInput):
        version_bytes(plan, counts[:2])


def test_huge_tensors_cost_nothing() -> None:
    """Column shares of a tensor of 2^34 lanes; local lanes go beyond 32 bits."""
    meta = TensorMeta(name="w", shape=(1 << 20, 1 << 14))
    cut = [split(meta.shape, 1, 16, i) for i in range(16)]
    mine, theirs = senders(*cut), receivers(identity(1 << 34), split(meta.shape, 0, 2, 1))
    plan = make_plan([meta], mine, theirs)
    assert lanes_by_pair(plan) == {(s, r): (1 << 30) >> r for s in range(16) for r in (0, 1)}
    assert {o.index_dtype for o in plan.operations} == {np.int64}
    with pytest.raises(LayoutError, match=r"receiver 0 holds lanes \[15360, 16384\)"):
        make_plan([meta], mine[:15], theirs)
