"""Applying versions to live weights: everything is proven before the first write, and everything can be undone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.apply import (
    Applier,
    ChunkDamaged,
    Lanes,
    LiveChanged,
    LiveCopy,
    LiveSet,
    LiveTensor,
    Phase,
    TensorMismatch,
    WrongBase,
    WrongResult,
    lane_count,
)
from engine.codec.chunk import ChunkHeader
from engine.detect.base import TILE
from engine.errors import CodecError, DteError, LayoutError, StateConflict
from engine.layout.algebra import contiguous, identity
from engine.layout.blocks import Block, Layout
from engine.records import TensorMeta
from tests.support.versions import (
    EMPTY_I64,
    EMPTY_U16,
    State,
    changed,
    chunk_file,
    digest_of,
    item,
    local_target,
    make_item,
    metas_of,
    shares,
)
from tests.support.views import KINDS, View, numpy_view, views

METAS = metas_of(
    {
        "a.weight": ((300, 500), "bfloat16"),
        "b.weight": ((70000,), "bfloat16"),
        "side": ((33,), "float32"),
        "flags": ((7,), "uint8"),
    }
)


def lanes_of(meta: TensorMeta) -> int:
    return lane_count(meta.shape, meta.dtype)


def random_state(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    state = {m.name: rng.integers(0, 1 << 16, lanes_of(m)).astype(np.uint16) for m in METAS}
    state["flags"][-1] &= 0xFF  # the odd last byte is zero-padded
    return state


def stepped(state: State, seed: int = 1) -> State:
    new = changed(state, np.random.default_rng(seed))
    new["flags"] = state["flags"].copy()
    new["flags"][0] ^= 0x0101
    return new


class Memory:
    """Live memory of one rank that holds every tensor whole."""

    def __init__(self, state: State, view: View = numpy_view) -> None:
        self.view = view
        self.arrays = {m.name: state[m.name].copy().view(np.uint8) for m in METAS}
        self.arrays["flags"] = self.arrays["flags"][:7].copy()

    def live(self) -> LiveSet:
        return LiveSet(
            LiveTensor(
                (m.name,), tuple(m.shape), m.dtype, (LiveCopy(self.view(self.arrays[m.name]), identity(lanes_of(m))),)
            )
            for m in METAS
        )

    def equals(self, state: State) -> bool:
        return all(np.array_equal(a, state[n].view(np.uint8)[: a.size]) for n, a in self.arrays.items())


@pytest.fixture
def base() -> State:
    return random_state()


@pytest.fixture(params=KINDS)
def view(request: pytest.FixtureRequest) -> Iterator[View]:
    with views(request.param) as made:
        yield made


@pytest.fixture
def new(base: State) -> State:
    return stepped(base)


@pytest.mark.parametrize("writers", [1, 3])
def test_prepare_commit_finalize(tmp_path: Path, base: State, new: State, writers: int, view: View) -> None:
    memory = Memory(base, view)
    applier = Applier(memory.live())
    target = local_target(tmp_path, METAS, new, base, writers=writers)
    verdict = applier.prepare(target)
    assert memory.equals(base), "prepare must not write"
    assert verdict.after == {t.name: t.digest for t in target.tensors}
    assert verdict.entries == sum(int((new[n] != base[n]).sum()) for n in base)
    applier.commit(1)
    assert applier.phase is Phase.WRITTEN
    assert applier.version is None
    applier.finalize(1)
    assert (applier.version, applier.step, applier.phase) == (1, 10, Phase.CLEAN)
    assert memory.equals(new)
    assert applier.prepare(target).already


def test_rollback_restores_every_bit(tmp_path: Path, base: State, new: State, view: View) -> None:
    memory = Memory(base, view)
    applier = Applier(memory.live())
    applier.prepare(local_target(tmp_path, METAS, new, base))
    applier.commit(1)
    assert memory.equals(new)
    applier.rollback()
    assert memory.equals(base)
    assert applier.phase is Phase.CLEAN
    assert applier.version is None


class Torn:
    """Lanes whose write stops half way, once."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.torn = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lanes, name)

    def scatter(self, index: npt.NDArray[Any], values: npt.NDArray[np.uint16]) -> None:
        if self.torn:
            return self._lanes.scatter(index, values)
        self.torn = True
        self._lanes.scatter(index[: index.size // 2], values[: index.size // 2])
        raise OSError("the device is gone")


@pytest.mark.parametrize("back", [True, False])
def test_a_write_that_stops_half_way_is_undone_or_ended(
    tmp_path: Path, base: State, new: State, view: View, back: bool
) -> None:
    memory = Memory(base, lambda array: Torn(view(array)) if array.nbytes == 140000 else view(array))
    applier = Applier(memory.live())
    applier.prepare(local_target(tmp_path, METAS, new, base))
    with pytest.raises(OSError, match="gone"):
        applier.commit(1)
    assert applier.phase is Phase.WRITING
    assert not memory.equals(base)
    assert not memory.equals(new)
    if back:
        applier.rollback()
        assert memory.equals(base)
    else:
        applier.commit(1)
        assert memory.equals(new)


def test_a_rewound_version_goes_dense_and_is_applied_sparse(
    tmp_path: Path, base: State, new: State, view: View
) -> None:
    memory = Memory(base, view)
    applier = Applier(memory.live())
    verdict = applier.prepare(local_target(tmp_path, METAS, new, base, dense=["a.weight", "b.weight"], writers=2))
    assert verdict.entries == sum(int((new[n] != base[n]).sum()) for n in base), (
        "equal lanes of dense tiles are dropped"
    )
    applier.commit(1)
    applier.rollback()
    assert memory.equals(base)


@pytest.mark.parametrize("bits", [0x7FC0, 0xFFFF, 0x7F81, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001])
def test_special_bits_travel_both_ways(tmp_path: Path, base: State, bits: int, view: View) -> None:
    there = {n: v.copy() for n, v in base.items()}
    there["b.weight"][::1000] = bits
    memory = Memory(base, view)
    applier = Applier(memory.live())
    applier.prepare(local_target(tmp_path, METAS, there, base))
    applier.commit(1)
    applier.finalize(1)
    assert memory.equals(there)
    applier.prepare(local_target(tmp_path, METAS, base, there, version=2))
    applier.commit(2)
    applier.finalize(2)
    assert memory.equals(base)


def refused(memory: Memory, state: State, applier: Applier, target: object, error: type[DteError]) -> DteError:
    with pytest.raises(error) as caught:
        applier.prepare(target)  # type: ignore[arg-type]
    assert applier.phase is Phase.CLEAN
    assert memory.equals(state), "nothing may be written"
    return caught.value


def test_wrong_base(tmp_path: Path, base: State, new: State, view: View) -> None:
    other = {n: v.copy() for n, v in base.items()}
    other["side"][5] ^= 1
    memory = Memory(other, view)
    error = refused(memory, other, Applier(memory.live()), local_target(tmp_path, METAS, new, base), WrongBase)
    assert isinstance(error, WrongBase)
    assert error.tensors == ("side",)


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "longer"])
def test_damaged_chunk(tmp_path: Path, base: State, new: State, damage: str, view: View) -> None:
    target = local_target(tmp_path, METAS, new, base)
    path = target.chunks[0].path
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-1:]
    elif damage == "longer":
        data += b"x"
    path.unlink()
    if damage != "missing":
        path.write_bytes(data)
    memory = Memory(base, view)
    refused(memory, base, Applier(memory.live()), target, ChunkDamaged)


def test_wrong_result(tmp_path: Path, base: State, new: State, view: View) -> None:
    wrong = {n: v.copy() for n, v in new.items()}
    wrong["a.weight"][7] ^= 4
    target = local_target(tmp_path, METAS, new, base)
    claim = tuple(t.model_copy(update={"digest": digest_of(t.name, wrong[t.name])}) for t in target.tensors)
    memory = Memory(base, view)
    refused(memory, base, Applier(memory.live()), dataclasses.replace(target, tensors=claim), WrongResult)


def test_two_writers_change_one_lane(tmp_path: Path, base: State, new: State, view: View) -> None:
    meta = METAS[1]
    layout = identity(lanes_of(meta))
    ranks = np.array([5, 900], np.int64)
    files = []
    for writer, diffs in enumerate(([1, 2], [3, 4])):
        one = make_item(meta, 1, layout, ranks, np.array(diffs, np.uint16))
        files.append(chunk_file(tmp_path, ChunkHeader("r", 1, 1, writer, 0, 0), [one], f"w{writer}"))
    after = {n: v.copy() for n, v in base.items()}
    after["b.weight"][ranks] += np.array([4, 6], np.uint16)  # so that even the digest comes out
    target = dataclasses.replace(local_target(tmp_path, METAS, after, base), chunks=tuple(files))
    memory = Memory(base, view)
    error = refused(memory, base, Applier(memory.live()), target, CodecError)
    assert "lane 5" in error.message


def test_slices_that_reach_outside_their_tensor(tmp_path: Path, base: State, new: State, view: View) -> None:
    meta = METAS[1]
    outside = Layout((Block((10,), 0, (1,), 69995, (1,)),), 10, 70005)
    one = make_item(meta, 1, outside, np.array([9], np.int64), np.array([1], np.uint16))
    memory = Memory(base, view)
    applier = Applier(memory.live())
    target = local_target(tmp_path, METAS, new, base)
    try:
        file = chunk_file(tmp_path, ChunkHeader("r", 1, 1, 0, 0, 0), [one])
    except DteError:
        return  # the encoder already refuses to write it
    refused(memory, base, applier, dataclasses.replace(target, chunks=(file,)), DteError)


def test_a_chunk_of_another_version(tmp_path: Path, base: State, new: State, view: View) -> None:
    target = local_target(tmp_path, METAS, new, base)
    other = local_target(tmp_path, METAS, new, base, version=2)
    memory = Memory(base, view)
    refused(memory, base, Applier(memory.live()), dataclasses.replace(target, chunks=other.chunks), CodecError)


def test_tensors_that_do_not_fit(tmp_path: Path, base: State, new: State, view: View) -> None:
    target = local_target(tmp_path, METAS, new, base)
    memory = Memory(base, view)
    applier = Applier(memory.live())
    for tensors in (
        target.tensors[:-1],
        (*target.tensors, target.tensors[0].model_copy(update={"name": "more"})),
        (target.tensors[0].model_copy(update={"shape": (500, 300)}), *target.tensors[1:]),
        (target.tensors[0].model_copy(update={"dtype": "float16"}), *target.tensors[1:]),
    ):
        refused(memory, base, applier, dataclasses.replace(target, tensors=tensors), TensorMismatch)


def test_a_version_without_base_must_be_complete(tmp_path: Path, base: State, new: State, view: View) -> None:
    memory = Memory(base, view)
    applier = Applier(memory.live())
    whole = local_target(tmp_path, METAS, new, None, version=0, writers=2)
    part = dataclasses.replace(whole, chunks=whole.chunks[:1])
    refused(memory, base, applier, part, CodecError)
    with pytest.raises(CodecError):
        applier.resync([part])
    assert memory.equals(base)
    applier.prepare(whole)
    applier.commit(0)
    applier.finalize(0)
    assert memory.equals(new)


def test_somebody_writes_between_prepare_and_commit(tmp_path: Path, base: State, new: State, view: View) -> None:
    memory = Memory(base, view)
    applier = Applier(memory.live())
    applier.prepare(local_target(tmp_path, METAS, new, base))
    at = int(np.flatnonzero(new["b.weight"] != base["b.weight"])[0])
    memory.arrays["b.weight"].view(np.uint16)[at] ^= 0xFFFF
    with pytest.raises(LiveChanged):
        applier.commit(1)
    assert applier.phase is Phase.PREPARED
    memory.arrays["b.weight"].view(np.uint16)[at] ^= 0xFFFF
    assert memory.equals(base)


def test_moves_that_do_not_fit(tmp_path: Path, base: State, new: State, view: View) -> None:
    applier = Applier(Memory(base, view).live())
    for move in (applier.abort, applier.rollback, lambda: applier.commit(1), lambda: applier.finalize(1)):
        with pytest.raises(StateConflict):
            move()
    applier.prepare(local_target(tmp_path, METAS, new, base))
    with pytest.raises(StateConflict):
        applier.commit(2)
    with pytest.raises(StateConflict):
        applier.finalize(1)
    applier.commit(1)
    with pytest.raises(StateConflict):
        applier.prepare(local_target(tmp_path, METAS, new, base))
    with pytest.raises(StateConflict):
        applier.adopt(1, 10, [], {})
    with pytest.raises(StateConflict):
        applier.commit(1)
    applier.finalize(1)


def test_resync_from_a_dense_version_and_deltas(tmp_path: Path, base: State, view: View) -> None:
    one = stepped(base, 1)
    two = stepped(one, 2)
    plan = [
        local_target(tmp_path, METAS, base, None, version=0, writers=2),
        local_target(tmp_path, METAS, one, base, version=1),
        local_target(tmp_path, METAS, two, one, version=2, writers=2),
    ]
    memory = Memory(random_state(99), view)
    applier = Applier(memory.live())
    before: list[Phase] = []
    applier.resync(plan, before_write=lambda: before.append(applier.phase))
    assert before == [Phase.CLEAN]
    assert applier.phase is Phase.REWRITTEN
    assert applier.version is None
    applier.finalize(2)
    assert memory.equals(two)
    assert applier.version == 2


def test_resync_from_a_version_with_a_base_that_is_dense_everywhere(tmp_path: Path, base: State, view: View) -> None:
    one = stepped(base, 1)
    two = stepped(one, 2)
    names = [m.name for m in METAS]
    plan = [
        local_target(tmp_path, METAS, one, base, version=1, writers=2, dense=names),
        local_target(tmp_path, METAS, two, one, version=2),
    ]
    memory = Memory(random_state(99), view)
    applier = Applier(memory.live())
    applier.resync([dataclasses.replace(plan[0], base_digests=None), plan[1]])
    applier.finalize(2)
    assert memory.equals(two)


def test_a_damaged_resync_writes_nothing_and_a_wrong_one_stays_dirty(
    tmp_path: Path, base: State, new: State, view: View
) -> None:
    start = random_state(99)
    memory = Memory(start, view)
    applier = Applier(memory.live())
    dense = local_target(tmp_path, METAS, base, None, version=0)
    delta = local_target(tmp_path, METAS, new, base)
    with pytest.raises(ChunkDamaged):
        applier.resync(
            [dense, dataclasses.replace(delta, chunks=(dataclasses.replace(delta.chunks[0], sha256="0" * 64),))]
        )
    with pytest.raises(CodecError, match="no start"):
        applier.resync([delta])
    with pytest.raises(CodecError, match="not carry all"):
        applier.resync([local_target(tmp_path, METAS, new, base, dense=[m.name for m in METAS[1:]], chunks=())])
    assert memory.equals(start)
    assert applier.phase is Phase.CLEAN
    with pytest.raises(WrongResult):
        applier.resync([dataclasses.replace(dense, tensors=delta.tensors)])
    assert applier.phase is Phase.REWRITING
    with pytest.raises(StateConflict):
        applier.prepare(delta)
    applier.resync([dense, delta])
    applier.finalize(1)
    assert memory.equals(new)


def test_partial_ranks_add_up(tmp_path: Path, base: State, new: State, view: View) -> None:
    """Two ranks hold the columns of one tensor and both hold all of another."""
    rows, columns = METAS[0].shape
    name = "a.weight"
    metas = [METAS[0]]
    target = local_target(tmp_path, metas, {name: new[name]}, {name: base[name]}, writers=2)
    total_live = total_after = 0
    views = []
    for rank in range(2):
        half = columns // 2
        memory = np.ascontiguousarray(base[name].reshape(rows, columns)[:, rank * half : (rank + 1) * half]).reshape(-1)
        layout = Layout((Block((rows, half), 0, (half, 1), rank * half, (columns, 1)),), rows * half, rows * columns)
        live = LiveTensor((name,), (rows, columns), "bfloat16", (LiveCopy(view(memory), layout),))
        applier = Applier(LiveSet([live], partial=True))
        verdict = applier.prepare(target)
        total_live += int(verdict.live[name], 16)
        total_after += int(verdict.after[name], 16)
        applier.commit(1)
        applier.finalize(1)
        views.append(memory.reshape(rows, half))
    assert f"{total_live & (2**64 - 1):016x}" == digest_of(name, base[name])
    assert f"{total_after & (2**64 - 1):016x}" == digest_of(name, new[name])
    assert np.array_equal(np.concatenate(views, axis=1).reshape(-1), new[name])


def test_replicas_are_written_together_and_must_agree(tmp_path: Path, base: State, new: State, view: View) -> None:
    name, n = "b.weight", 70000
    first, second = base[name].copy(), base[name].copy()
    copies = tuple(LiveCopy(view(m), identity(n)) for m in (first, second))
    applier = Applier(LiveSet([LiveTensor((name,), (n,), "bfloat16", copies)]))
    target = local_target(tmp_path, [METAS[1]], {name: new[name]}, {name: base[name]})
    applier.prepare(target)
    applier.commit(1)
    applier.finalize(1)
    assert np.array_equal(first, new[name])
    assert np.array_equal(second, new[name])
    second[3] ^= 1
    with pytest.raises(DteError, match="copies"):
        applier.audit(list(target.tensors))


def test_adopt_needs_the_right_digests(base: State, new: State, view: View) -> None:
    memory = Memory(base, view)
    applier = Applier(memory.live())
    metas = [TensorMeta(name=m.name, shape=m.shape, dtype=m.dtype) for m in METAS]
    assert {n: f"{d:016x}" for n, d in applier.audit(metas).items()} == {n: digest_of(n, v) for n, v in base.items()}


def test_layouts_that_map_two_lanes_to_one_are_refused(view: View) -> None:
    doubled = Layout((Block((4, 4), 0, (4, 1), 0, (2, 1)),), 16, 16)
    with pytest.raises(LayoutError):
        LiveCopy(view(np.zeros(16, np.uint16)), doubled)


def test_tiles_across_a_slice_border(tmp_path: Path, view: View) -> None:
    """Dense tiles of a slice that is not a whole number of tiles, at an odd offset."""
    n = TILE + 1000
    meta = TensorMeta(name="t", shape=(n,), dtype="bfloat16")
    rng = np.random.default_rng(0)
    old, fresh = (rng.integers(0, 1 << 16, n).astype(np.uint16) for _ in range(2))
    items = [item(meta, layout, i, old, fresh, dense=True) for i, layout in enumerate(shares(n, 3))]
    assert sum(i.dense_bits.size for i in items) == n
    file = chunk_file(tmp_path, ChunkHeader("r", 1, 1, 0, 0, 0), items)
    target = dataclasses.replace(local_target(tmp_path, [meta], {"t": fresh}, {"t": old}), chunks=(file,))
    applier = Applier(LiveSet([LiveTensor(("t",), (n,), "bfloat16", (LiveCopy(view(old), identity(n)),))]))
    applier.prepare(target)
    applier.commit(1)
    applier.finalize(1)
    assert np.array_equal(old, fresh)
    assert contiguous(0, n, n) == identity(n)
    assert EMPTY_I64.size == EMPTY_U16.size == 0
