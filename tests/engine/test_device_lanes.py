"""Lanes on a device and lanes in host memory are the same lanes, whatever the layout, the piece size or the thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.apply import DeviceLanes, LaneView, LiveCopy, LiveSet, LiveTensor, view_of
from engine.apply.device import SCRATCH_BYTES
from engine.digest import DigestKey
from engine.errors import InvalidInput, LayoutError
from engine.layout.algebra import identity, scaled
from engine.layout.blocks import Block, Layout
from tests.support.views import PRETEND, PretendTensor, device_view, one_thread, pretending, views

MASK = (1 << 64) - 1
DEVICE_KINDS = ("device", "pretend")


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with one_thread():
        yield


@st.composite
def local_layouts(draw: st.DrawFn) -> Layout:
    """Disjoint rectangles of one canonical tensor, somewhere in local memory, which they need not fill."""
    drawn = draw(st.lists(st.sampled_from([1, 2, 3, 5, 7, 16, 64]), min_size=1, max_size=4))
    shape = tuple(n if np.prod(drawn[: k + 1]) <= 20_000 else 1 for k, n in enumerate(drawn))
    row = [int(np.prod(shape[k + 1 :])) for k in range(len(shape))]
    order = draw(st.permutations(range(len(shape))))
    blocks, at = [], draw(st.integers(0, 3))
    cut = draw(st.integers(1, shape[0]))
    base = draw(st.sampled_from([0, 1, 4095, 4096, 100_003]))  # canonical lanes before it
    for first, n in ((0, cut), (cut, shape[0] - cut)):
        if n == 0:
            continue
        sizes = (n, *shape[1:])
        strides = [0] * len(shape)
        step = 1
        for axis in order:
            strides[axis] = step
            step *= sizes[axis]
        blocks.append(Block(sizes, at, tuple(strides), base + first * row[0], tuple(row)))
        at += step + draw(st.integers(0, 2))
    return Layout(tuple(blocks), at, base + int(np.prod(shape)) + draw(st.integers(0, 5)))


@pytest.mark.parametrize("kind", DEVICE_KINDS)
@given(layout=local_layouts(), wide=st.booleans(), odd=st.integers(0, 3), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_what_is_read_and_written_is_the_same(kind: str, layout: Layout, wide: bool, odd: int, seed: int) -> None:
    """`wide`: 32-bit elements, two lanes each; `odd`: the tensor begins inside a larger one."""
    layout = scaled(layout, 2) if wide else layout
    rng = np.random.default_rng(seed)
    n = layout.src_numel
    whole = rng.integers(0, 1 << 16, n + odd).astype(np.uint16)
    host = whole[odd:].copy()
    key = DigestKey.for_tensor(f"t{seed % 7}")
    with views(kind) as view:
        there = view(whole[odd:])
        plain = LaneView(host)
        assert (there.lanes, there.nbytes) == (plain.lanes, plain.nbytes)
        assert there.digest(key, layout) == plain.digest(key, layout)
        for dtype in (np.int64, np.uint32):
            index = rng.integers(0, n, 2 * n).astype(dtype)
            assert np.array_equal(there.gather(index), plain.gather(index))
        start = int(rng.integers(0, n + 1))
        count = int(rng.integers(0, n - start + 1))
        assert np.array_equal(there.run(start, count), plain.run(start, count))
        index = rng.permutation(n)[: n // 2]
        values = rng.integers(0, 1 << 16, index.size).astype(np.uint16)
        for lanes in (there, plain):
            lanes.scatter(index.astype(np.uint32), values)
            lanes.write_run(start, np.arange(count, dtype=np.uint16))
        assert np.array_equal(whole[odd:], host), "written in place"
        assert there.digest(key, layout) == plain.digest(key, layout)


@pytest.mark.parametrize("kind", DEVICE_KINDS)
@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 3 * 4096 + 17])
@pytest.mark.parametrize("n", [1, 100, 4095, 4096, 4097, 3 * 4096, 5 * 4096 + 123])
def test_runs_that_begin_and_end_anywhere(kind: str, start: int, n: int) -> None:
    memory = np.random.default_rng(n).integers(0, 1 << 16, n).astype(np.uint16)
    layout = Layout((Block((n,), 0, (1,), start, (1,)),), n, start + n + 7)
    key = DigestKey.for_tensor("run")
    with views(kind) as view:
        assert view(memory).digest(key, layout) == LaneView(memory).digest(key, layout)


@pytest.mark.parametrize("bits", [0x0000, 0xFFFF, 0x7FFF, 0x8000])
def test_sums_that_wrap(bits: int) -> None:
    memory = np.full(20_000, bits, np.uint16)
    key = DigestKey.for_tensor("w")
    weights = key.weights(np.arange(memory.size, dtype=np.int64))
    expected = sum(int(w) * (bits + 1) for w in weights) & MASK
    assert device_view(memory).digest(key, identity(memory.size)) == expected


def test_shards_add_up_and_copies_agree() -> None:
    """Columns of one tensor on two ranks, one of them twice: the second time transposed."""
    rows, columns = 96, 80
    state = np.random.default_rng(0).integers(0, 1 << 16, rows * columns).astype(np.uint16)
    key, half = DigestKey.for_tensor("t"), columns // 2
    total = 0
    for rank in range(2):
        mine = np.ascontiguousarray(state.reshape(rows, columns)[:, rank * half : (rank + 1) * half])
        by_row = Layout((Block((rows, half), 0, (half, 1), rank * half, (columns, 1)),), rows * half, state.size)
        by_column = Layout((Block((half, rows), 0, (rows, 1), rank * half, (1, columns)),), rows * half, state.size)
        turned = np.ascontiguousarray(mine.T)
        copies = (LiveCopy(device_view(mine), by_row), LiveCopy(device_view(turned), by_column))
        total += LiveTensor(("t",), (rows, columns), "bfloat16", copies).digest("t")
    assert total & MASK == LaneView(state).digest(key, identity(state.size))


@pytest.mark.parametrize("pretended", [False, True])
def test_a_part_of_a_larger_tensor(pretended: bool) -> None:
    """Stacked parameters: the view begins in the middle of a storage, and the layout has strides."""
    memory = np.random.default_rng(0).integers(0, 1 << 16, 1000).astype(np.uint16)
    stacked = torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16)
    columns = Layout((Block((20, 30), 0, (30, 1), 5, (70, 1)),), 600, 1500)
    key = DigestKey.for_tensor("q")
    with pretending():
        part = (PretendTensor(stacked) if pretended else stacked).narrow(0, 301, 600)
        lanes, host = DeviceLanes(part), LaneView(memory[301:901])
        assert lanes.digest(key, columns) == host.digest(key, columns)
        assert np.array_equal(lanes.gather(np.arange(600)), memory[301:901])
        lanes.write_run(0, np.zeros(600, np.uint16))
    assert np.flatnonzero(memory == 0).tolist() == list(range(301, 901))


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_memory_without_lanes(kind: str) -> None:
    with views(kind) as view:
        empty = view(np.empty(0, np.uint16))
        assert (empty.lanes, empty.digest(DigestKey.for_tensor("e"), identity(0))) == (0, 0)
        nothing = np.empty(0, np.int64)
        empty.scatter(nothing, np.empty(0, np.uint16))
        assert empty.gather(nothing).size == empty.run(0, 0).size == 0


def test_what_is_out_of_range_never_reaches_the_device() -> None:
    memory = np.arange(8, dtype=np.uint16)
    lanes, two = device_view(memory), np.zeros(2, np.uint16)
    for index in (np.array([0, 8]), np.array([-1, 0])):
        with pytest.raises(InvalidInput):
            lanes.gather(index)
        with pytest.raises(InvalidInput):
            lanes.scatter(index, two)
    for start in (-1, 7):
        with pytest.raises(InvalidInput):
            lanes.run(start, 2)
        with pytest.raises(InvalidInput):
            lanes.write_run(start, two)
    with pytest.raises(LayoutError):
        lanes.digest(DigestKey.for_tensor("t"), identity(9))
    assert np.array_equal(memory, np.arange(8)), "nothing may be written"


def test_tensors_that_cannot_be_seen_as_lanes() -> None:
    for tensor in (
        torch.zeros(4, 4, dtype=torch.bfloat16).t()[:, 1:],
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(4, dtype=torch.bfloat16, device="meta"),
    ):
        with pytest.raises(InvalidInput):
            DeviceLanes(tensor)
    with pytest.raises(InvalidInput, match=r"'w'.*meta"):
        view_of("w", torch.zeros(4, dtype=torch.bfloat16, device="meta"))


def test_the_view_is_chosen_by_where_the_tensor_lies() -> None:
    flat = torch.zeros(4, dtype=torch.bfloat16)
    assert isinstance(view_of("w", flat), LaneView)
    with pretending():
        there = view_of("w", PretendTensor(flat))
        assert isinstance(there, DeviceLanes)
        assert there.device == str(PRETEND)
        there.scatter(np.array([2]), np.array([0x3F80], np.uint16))
    assert flat.tolist() == [0, 0, 1, 0]


def test_writes_wait_for_the_device_before_and_after_and_passes_once() -> None:
    memory = np.zeros(5000, np.uint16)
    one = np.array([1])
    with pretending() as module:
        lanes = [DeviceLanes(PretendTensor(torch.from_numpy(memory.view(np.int16)))) for _ in range(2)]
        for write in (
            lambda: lanes[0].scatter(one, np.ones(1, np.uint16)),
            lambda: lanes[0].write_run(0, memory[:9].copy()),
        ):
            module.calls.clear()
            write()
            assert module.calls == ["enter", "synchronize", "synchronize", "leave"]
        for read in (lambda: lanes[0].gather(one), lambda: lanes[0].run(0, 9)):
            module.calls.clear()
            read()
            assert module.calls == ["enter", "leave"]
        live = [
            LiveTensor((n,), (5000,), "bfloat16", (LiveCopy(view, identity(5000)),))
            for n, view in zip("ab", lanes, strict=True)
        ]
        module.calls.clear()
        LiveSet.digests({"a": live[0], "b": live[1]})
        assert module.calls == ["synchronize", "enter", "leave", "enter", "leave"]


def test_writes_do_not_look_like_somebody_elses() -> None:
    parameter = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    before = parameter._version
    DeviceLanes(parameter).write_run(0, np.full(8, 0x3F80, np.uint16))
    assert parameter.tolist() == [1.0] * 8
    assert parameter._version == before


def test_tensors_of_inference_mode_and_other_threads() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(8, dtype=torch.bfloat16)
        lanes = DeviceLanes(tensor)
    thread = threading.Thread(target=lambda: lanes.write_run(0, np.full(8, 0x3F80, np.uint16)))
    thread.start()
    thread.join()
    lanes.scatter(np.array([0]), np.zeros(1, np.uint16))
    assert tensor.tolist() == [0.0] + [1.0] * 7


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes that results of operations took at a time, as storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            at = storage.data_ptr()
            if at not in self.alive:
                self.alive[at] = storage.nbytes()
                self.most = max(self.most, sum(self.alive.values()))
                torch.utils.weak.weakref.finalize(storage, self.alive.pop, at, None)
        return out


@pytest.mark.parametrize("shape", ["run", "columns", "turned", "pairs"])
def test_scratch_memory_is_bounded(shape: str) -> None:
    rows, columns = 3000, 1024
    n = rows * columns
    layout = {
        "run": identity(n),
        "columns": Layout((Block((rows, columns), 0, (columns, 1), 7, (columns * 2, 1)),), n, 2 * n),
        "turned": Layout((Block((rows, columns), 0, (columns, 1), 0, (1, rows)),), n, n),
        "pairs": Layout((Block((n // 2, 2), 0, (2, 1), 0, (4, 1)),), n, 2 * n),
    }[shape]
    memory = np.random.default_rng(0).integers(0, 1 << 16, n).astype(np.uint16)
    lanes = DeviceLanes(torch.from_numpy(memory.view(np.int16)), scratch_bytes=1 << 20)
    key = DigestKey.for_tensor(shape)
    with Allocations() as counted:
        got = lanes.digest(key, layout)
    assert got == LaneView(memory).digest(key, layout)
    words = 8 * (4096 + layout.dst_numel // 4096 + 1)
    assert 100_000 < counted.most - memory.nbytes - words < 1 << 20, "the memory itself is counted as a storage, once"
    assert SCRATCH_BYTES == 32 << 20
