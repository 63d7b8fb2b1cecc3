"""What arrives from the trainer's ranks becomes the version, bit for bit, or is refused with nothing written."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.apply import Applier, LiveCopy, LiveSet, LiveTensor, Phase, TensorMismatch, WrongBase, WrongResult
from engine.digest import DigestKey, delta_digest, from_hex, to_hex
from engine.errors import CodecError, InvalidInput
from engine.layout.algebra import identity
from engine.layout.blocks import TILE_LANES, Layout
from engine.plan.operations import Delivery, ReceiverTensor, SenderSlice
from engine.plan.planning import make_plan
from engine.records import TensorMeta
from tests.engine.test_plan import ENGINES, TRAINERS
from tests.engine.test_plan import W as SMALL
from tests.support.plans import box, covered, exchange, joined, split, target_of, where
from tests.support.random_plans import Group, groups
from tests.support.versions import State
from tests.support.views import View, numpy_view, views

U16 = npt.NDArray[np.uint16]


class Receiver:
    """One rank's memory: every tensor it holds, padding included, in one copy or two."""

    def __init__(
        self,
        metas: Sequence[TensorMeta],
        held: Sequence[ReceiverTensor],
        copies: dict[str, Layout],
        state: State,
        view: View = numpy_view,
        seed: int = 0,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.memory: list[tuple[str, Layout, npt.NDArray[np.uint8]]] = []
        by_name = {m.name: m for m in metas}
        live = []
        for tensor in held:
            meta = by_name[tensor.tensor]
            odd = meta.dtype == "uint8" and int(np.prod(meta.shape)) % 2
            places = []
            for layout in (tensor.layout, *([copies[meta.name]] if meta.name in copies else [])):
                at = where(layout)
                lanes = self.rng.integers(0, 1 << 16, layout.src_numel).astype(np.uint16)
                lanes[at >= 0] = state[meta.name][at[at >= 0]]
                raw = lanes.view(np.uint8)[: lanes.size * 2 - odd].copy()
                self.memory.append((meta.name, layout, raw))
                places.append(LiveCopy(view(raw), layout))
            live.append(LiveTensor((meta.name,), tuple(meta.shape), meta.dtype, tuple(places)))
        self.start = self.bytes()
        self.applier = Applier(LiveSet(live, partial=True))

    def bytes(self) -> list[bytes]:
        return [raw.tobytes() for _, _, raw in self.memory]

    def expected(self, state: State) -> list[bytes]:
        """The memory as it must be at `state`: what was there at the start, with every held lane replaced."""
        out = []
        for (name, layout, raw), before in zip(self.memory, self.start, strict=True):
            lanes = np.frombuffer(before + b"\0" * (raw.size % 2), np.uint16).copy()
            at = where(layout)
            lanes[at >= 0] = state[name][at[at >= 0]]
            out.append(lanes.tobytes()[: raw.size])
        return out


def states(metas: Sequence[TensorMeta], seed: int, share: float = 0.3) -> tuple[State, State]:
    """Bits before and after a step."""
    rng = np.random.default_rng(seed)
    old: State = {}
    new: State = {}
    for m in metas:
        size = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8}[m.dtype]
        count = int(np.prod(m.shape)) * size
        before = rng.integers(0, 256, count + count % 2).astype(np.uint8)
        before[count:] = 0
        after = np.where(rng.random(before.size) < share, rng.integers(0, 256, before.size), before).astype(np.uint8)
        after[count:] = 0
        old[m.name], new[m.name] = before.view(np.uint16), after.view(np.uint16)
    return old, new


SEEDS, SHARES = st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 1.0])


@given(group=groups(), seed=SEEDS, dense=SHARES)
@settings(max_examples=60, deadline=None)
def test_any_group(group: Group, seed: int, dense: float) -> None:
    leads_everybody_to_the_version("numpy", group, seed, dense)


@given(group=groups(), seed=SEEDS, dense=SHARES)
@settings(max_examples=20, deadline=None)
def test_any_group_on_a_device(group: Group, seed: int, dense: float) -> None:
    leads_everybody_to_the_version("device", group, seed, dense)


def leads_everybody_to_the_version(kind: str, group: Group, seed: int, dense: float) -> None:
    """Every held lane is reached once, and the exchange leads every receiver to the version, and back."""
    plan = make_plan(group.metas, group.senders, group.receivers)
    assert covered(plan, group.senders, group.receivers)
    turned = [[*reversed(m)] for m in group.senders], [[*reversed(m)] for m in group.receivers]
    assert make_plan(group.metas[::-1], *turned) == plan
    old, new = states(group.metas, seed)
    rng = np.random.default_rng(seed)
    arrived = exchange(plan, group.senders, old, new, lambda tiles: np.flatnonzero(rng.random(tiles) < dense))
    with views(kind) as view:
        for number, held in enumerate(group.receivers):
            receiver = Receiver(group.metas, held, group.copies[number], old, view, seed)
            applier, target = receiver.applier, target_of(group.metas, old, new, arrived[number])
            verdict = applier.prepare(target)
            assert receiver.bytes() == receiver.start
            at = {t.tensor: where(t.layout) for t in held}
            here = {n: lanes[lanes >= 0] for n, lanes in at.items()}
            assert verdict.entries == sum(int((old[n][i] != new[n][i]).sum()) for n, i in here.items())
            for n, i in here.items():
                moved = delta_digest(DigestKey.for_tensor(n), i, old[n][i], new[n][i])
                assert verdict.after[n] == to_hex(from_hex(verdict.live[n]) + moved)
            applier.commit(1)
            assert receiver.bytes() == receiver.expected(new)
            applier.rollback()
            assert receiver.bytes() == receiver.start
            applier.prepare(target)
            applier.commit(1)
            applier.finalize(1)
            assert receiver.bytes() == receiver.expected(new)
            assert applier.prepare(target).already


@given(group=groups(), seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_a_version_without_base_is_carried_dense(group: Group, seed: int) -> None:
    plan = make_plan(group.metas, group.senders, group.receivers)
    old, new = states(group.metas, seed)
    arrived = exchange(plan, group.senders, old, new, np.arange)
    for number, held in enumerate(group.receivers):
        receiver = Receiver(group.metas, held, group.copies[number], old, seed=seed)
        receiver.applier.prepare(target_of(group.metas, None, new, arrived[number]))
        receiver.applier.commit(1)
        assert receiver.bytes() == receiver.expected(new)
        if arrived[number]:
            fewer = target_of(group.metas, None, new, arrived[number][1:])
            again = Receiver(group.metas, held, group.copies[number], old, seed=seed)
            with pytest.raises(CodecError, match="does not carry all"):
                again.applier.prepare(fewer)


# Two senders with half of the columns each, in two tiles; one receiver with half of the rows, padding, and two copies.
META = TensorMeta(name="w", shape=(20, 10001))
SENDERS = [[SenderSlice(0, "w", split(META.shape, 1, 2, 0))], [SenderSlice(0, "w", split(META.shape, 1, 2, 1))]]
MINE = joined([split(META.shape, 0, 2, 1)], 3, 4)
PLAN = make_plan([META], SENDERS, [[ReceiverTensor("w", MINE)]])
OTHER = make_plan([META], [*SENDERS, []], [[], [ReceiverTensor("w", MINE)]])
OLD, NEW = states([META], 3)


SPARSE = exchange(PLAN, SENDERS, OLD, NEW, lambda tiles: np.arange(0))[0]
MIXED = exchange(PLAN, SENDERS, OLD, NEW, lambda tiles: np.arange(1, tiles))[0]  # tile 1 of each slice is dense


def at(array: npt.NDArray[np.generic], index: int, value: object) -> npt.NDArray[np.generic]:
    out = array.copy()
    out[index] = value
    return out


def sparse(**changes: object) -> list[Delivery]:
    return [dataclasses.replace(SPARSE[0], **changes), SPARSE[1]]


def mixed(**changes: object) -> list[Delivery]:
    return [dataclasses.replace(MIXED[0], **changes), MIXED[1]]


S, M = SPARSE[0], MIXED[0]
UNCHANGED = int(np.setdiff1d(where(PLAN.operations[0].parts[0].layout), S.local)[1])
HELD = int(np.flatnonzero(where(MINE) >= 0)[0])
IN_TILE = int(where(PLAN.operations[0].parts[0].layout)[TILE_LANES + 5])
REFUSED = {
    "index out of range": (sparse(local=at(S.local, 5, MINE.src_numel)), CodecError, "not below"),
    "index far out of range": (sparse(local=at(S.local, -1, (1 << 32) - 1)), CodecError, "not below"),
    "into padding": (sparse(local=at(S.local, 0, 1)), CodecError, "holds nothing"),
    "into padding behind": (sparse(local=at(S.local, -1, MINE.src_numel - 1)), CodecError, "holds nothing"),
    "another sender's lane": (sparse(local=at(S.local, 0, int(SPARSE[1].local[0]))), CodecError, "not that sender's"),
    "one lane twice": (
        sparse(local=at(S.local, 0, int(S.local[1])), bits=at(S.bits, 0, int(S.bits[1]))), CodecError, "two writers",
    ),
    "one lane more": (
        sparse(local=np.append(S.local, S.local[:1]), bits=np.append(S.bits, S.bits[:1])), CodecError, "two writers",
    ),
    "a lane that does not change": (
        sparse(local=at(S.local, 0, UNCHANGED), bits=at(S.bits, 0, int(OLD["w"][where(MINE)[UNCHANGED]]))),
        CodecError, "do not change",
    ),
    "fewer bits": (sparse(bits=S.bits[1:]), CodecError, "lanes with"),
    "signed lanes": (sparse(local=S.local.astype(np.int64)), CodecError, "arrived as"),
    "wide bits": (sparse(bits=S.bits.astype(np.uint32)), CodecError, "arrived as"),
    "a matrix": (sparse(local=S.local[:, None]), CodecError, "shapes"),
    "a delivery twice": ([*SPARSE, S], CodecError, "arrived twice"),
    "what another receiver gets": (sparse(operation=OTHER.operations[0]), CodecError, r"receivers \[0, 1\]"),
    "another span": (
        sparse(operation=dataclasses.replace(S.operation, span=MINE.src_numel + 1)), TensorMismatch, "planned with",
    ),
    "an unknown tensor": (
        sparse(operation=dataclasses.replace(S.operation, tensor="x")), TensorMismatch, "does not have",
    ),
    "a tile out of range": (mixed(tiles=at(M.tiles, -1, [0, 2])), CodecError, "out of range"),
    "a negative tile": (mixed(tiles=at(M.tiles, 0, [0, -1])), CodecError, "out of range"),
    "a tile of no part": (mixed(tiles=at(M.tiles, -1, [1, 1])), CodecError, "not in the operation"),
    "a tile of a negative part": (mixed(tiles=at(M.tiles, 0, [-1, 0])), CodecError, "not in the operation"),
    "a tile twice": (
        mixed(tiles=np.concatenate([M.tiles, M.tiles[-1:]]), dense=np.append(M.dense, M.dense)), CodecError, "twice",
    ),
    "tiles in another order": (mixed(tiles=np.array([[0, 1], [0, 0]])), CodecError, "out of order"),
    "a tile too few": (mixed(tiles=M.tiles[1:]), CodecError, "dense lanes"),
    "a dense lane too few": (mixed(dense=M.dense[1:]), CodecError, "dense lanes"),
    "a dense lane too many": (mixed(dense=np.append(M.dense, M.dense[:1])), CodecError, "dense lanes"),
    "an entry in a dense tile": (
        mixed(local=np.append(M.local, np.uint32(IN_TILE)), bits=np.append(M.bits, np.uint16(1))),
        CodecError, "in a dense tile",
    ),
    "tiles of three numbers": (mixed(tiles=np.zeros((1, 3), np.int64)), CodecError, "shapes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_deliveries_that_do_not_fit_are_refused_before_any_write(case: str) -> None:
    deliveries, error, words = REFUSED[case]
    receiver = Receiver([META], [ReceiverTensor("w", MINE)], {"w": joined([split(META.shape, 0, 2, 1)])}, OLD)
    with pytest.raises(error, match=words):
        receiver.applier.prepare(target_of([META], OLD, NEW, deliveries))
    assert receiver.bytes() == receiver.start
    assert receiver.applier.phase is Phase.CLEAN
    receiver.applier.prepare(target_of([META], OLD, NEW, MIXED))
    receiver.applier.commit(1)
    assert receiver.bytes() == receiver.expected(NEW)


@pytest.mark.parametrize(("trainer", "engine"), [*itertools.product(TRAINERS, ENGINES)])
def test_named_layouts(trainer: str, engine: str) -> None:
    plan = make_plan([SMALL], TRAINERS[trainer], ENGINES[engine])
    old, new = states([SMALL], 7)
    arrived = exchange(plan, TRAINERS[trainer], old, new, lambda tiles: np.arange(0))
    for held, mine in zip(ENGINES[engine], arrived, strict=True):
        receiver = Receiver([SMALL], held, {}, old)
        receiver.applier.prepare(target_of([SMALL], old, new, mine))
        receiver.applier.commit(1)
        assert receiver.bytes() == receiver.expected(new)


WHOLE = [ReceiverTensor("w", identity(META.shape[0] * META.shape[1]))]
WHOLE_PLAN = make_plan([META], SENDERS, [WHOLE])


def whole(old: State, new: State) -> list[Delivery]:
    """For a receiver that can prove the tensor alone."""
    return exchange(WHOLE_PLAN, SENDERS, old, new, lambda tiles: np.arange(1, tiles))[0]


def test_tied_copies_are_both_written() -> None:
    turned = box(META.shape, [range(20), range(10001)], [1, 0])
    receiver = Receiver([META], WHOLE, {"w": turned}, OLD)
    receiver.applier.prepare(target_of([META], OLD, NEW, whole(OLD, NEW)))
    receiver.applier.commit(1)
    receiver.applier.finalize(1)
    assert receiver.bytes() == receiver.expected(NEW)


@pytest.mark.parametrize("what", ["bits", "dense", "left out"])
def test_what_does_not_lead_to_the_version_is_not_written(what: str) -> None:
    good = whole(OLD, NEW)
    first = dataclasses.replace(good[0])
    if what == "bits":
        first = dataclasses.replace(first, bits=at(first.bits, 9, int(first.bits[9]) ^ 0x4000))
    elif what == "dense":
        first = dataclasses.replace(first, dense=at(first.dense, 9, int(first.dense[9]) ^ 1))
    bad = good[1:] if what == "left out" else [first, good[1]]
    receiver = Receiver([META], WHOLE, {}, OLD)
    with pytest.raises((WrongResult, CodecError), match=r"deliveries of version 1 do not lead|do not change"):
        receiver.applier.prepare(target_of([META], OLD, NEW, bad))
    assert receiver.bytes() == receiver.start
    assert receiver.applier.phase is Phase.CLEAN


def test_weights_that_are_not_the_base_are_left_alone() -> None:
    receiver = Receiver([META], WHOLE, {}, NEW)
    with pytest.raises(WrongBase):
        receiver.applier.prepare(target_of([META], OLD, NEW, whole(OLD, NEW)))
    assert receiver.bytes() == receiver.start


def test_an_empty_version() -> None:
    """Nothing changes: deliveries without anything, or none at all."""
    empty = exchange(WHOLE_PLAN, SENDERS, OLD, OLD, lambda tiles: np.arange(0))[0]
    assert len(empty) == 2
    assert all(d.local.size == d.tiles.size == d.dense.size == 0 for d in empty)
    for deliveries in (empty, []):
        receiver = Receiver([META], WHOLE, {}, OLD)
        assert receiver.applier.prepare(target_of([META], OLD, OLD, deliveries)).entries == 0
        receiver.applier.commit(1)
        receiver.applier.finalize(1)
        assert receiver.applier.version == 1
        assert receiver.bytes() == receiver.start


def test_a_tensor_that_this_rank_does_not_hold_is_refused() -> None:
    other = TensorMeta(name="v", shape=(3,))
    receiver = Receiver([META, other], WHOLE, {}, OLD)
    stray = dataclasses.replace(S, operation=dataclasses.replace(S.operation, tensor="v"))
    old, new = {**OLD, "v": np.zeros(3, np.uint16)}, {**NEW, "v": np.zeros(3, np.uint16)}
    with pytest.raises(TensorMismatch, match="does not hold"):
        receiver.applier.prepare(target_of([META, other], old, new, [stray]))
    assert receiver.bytes() == receiver.start


def test_a_version_without_base_lists_no_entries() -> None:
    receiver = Receiver([META], WHOLE, {}, OLD)
    with pytest.raises(CodecError, match="has no base"):
        receiver.applier.prepare(target_of([META], None, NEW, whole(OLD, NEW)))
    assert receiver.bytes() == receiver.start


def test_a_resync_takes_no_deliveries() -> None:
    receiver = Receiver([META], WHOLE, {}, OLD)
    with pytest.raises(InvalidInput, match="made from chunks"):
        receiver.applier.resync([target_of([META], None, NEW, [])])
    assert receiver.bytes() == receiver.start
    assert receiver.applier.phase is Phase.CLEAN
