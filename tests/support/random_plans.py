"""Random groups for property tests: tensors, cut in one way by the trainer and in another by the engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod

from hypothesis import strategies as st

from engine.layout.algebra import compose, contiguous, identity, scaled
from engine.layout.blocks import Layout
from engine.plan.operations import ReceiverTensor, SenderSlice
from engine.records import TensorMeta
from tests.support.plans import box, joined


@dataclass(frozen=True)
class Group:
    """`copies`: by receiver and tensor, a second copy of the same lanes, laid out in its own way."""

    metas: list[TensorMeta]
    senders: list[list[SenderSlice]]
    receivers: list[list[ReceiverTensor]]
    copies: list[dict[str, Layout]]


def _flat(draw: st.DrawFn, layout: Layout) -> list[Layout]:
    """The layout cut anywhere."""
    n = layout.src_numel
    cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))})
    return [compose(contiguous(a, b - a, n), layout) for a, b in itertools.pairwise(cuts)]


def _along(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[list[range]]]:
    """Pieces, each a list of boxes, each a list of ranges: one dimension cut in runs, strides or interleaved blocks."""
    dim = draw(st.integers(0, len(shape) - 1))
    n = shape[dim]
    kind = draw(st.sampled_from(["runs", "strided", "interleaved"]))
    if kind == "strided":
        step = draw(st.sampled_from([k for k in (1, 2, 3) if k <= n and (n < 10 or n % k == 0)]))
        groups = [[range(i, n, step)] for i in range(step)]
    else:
        cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=4))})
        found = [range(a, b) for a, b in itertools.pairwise(cuts)]
        groups = [[r] for r in found] if kind == "runs" else [g for g in (found[::2], found[1::2]) if g]
    return [[[*map(range, shape[:dim]), r, *map(range, shape[dim + 1 :])] for r in group] for group in groups]


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Layout]]:
    """Pieces that cover a tensor once; of each, one or two layouts that hold its elements in different orders."""
    if not shape or not draw(st.booleans()):
        return [[p] for p in _flat(draw, identity(prod(shape)))]
    orders = [tuple(range(len(shape))), tuple(reversed(range(len(shape))))]
    out = []
    for boxes in _along(draw, shape):
        layouts = [joined([box(shape, r, order) for r in boxes]) for order in orders]
        if draw(st.integers(0, 3)) == 0:
            out += [[p] for p in _flat(draw, layouts[0])]
        else:
            out.append(layouts if draw(st.booleans()) else [draw(st.sampled_from(layouts))])
    return out


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    small = draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    if draw(st.integers(0, 3)) == 0:  # several tiles
        small = [draw(st.integers(1, 9)), draw(st.sampled_from([21001, 32768, 40000]))]
    return tuple(small)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    senders: list[list[SenderSlice]] = [[] for _ in range(draw(st.integers(1, 4)))]
    receivers: list[list[ReceiverTensor]] = [[] for _ in range(draw(st.integers(1, 3)))]
    copies: list[dict[str, Layout]] = [{} for _ in receivers]
    metas = []
    for number in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(["bfloat16", "bfloat16", "float32", "float64", "uint8"]))
        meta = TensorMeta(name=f"t{number}", shape=draw(shapes()), dtype=dtype)
        metas.append(meta)
        if dtype == "uint8":
            whole = identity(-(-prod(meta.shape) // 2))
            sent, held, wide = [[whole]], [[whole]], 1
        else:
            wide = {"bfloat16": 1, "float32": 2, "float64": 4}[dtype]
            sent, held = draw(partitions(meta.shape)), draw(partitions(meta.shape))
        for layouts in sent:
            who = draw(st.lists(st.integers(0, len(senders) - 1), min_size=1, max_size=len(senders), unique=True))
            for sender in who:
                layout = scaled(draw(st.sampled_from(layouts)), wide)
                senders[sender].append(SenderSlice(len(senders[sender]), meta.name, layout))
        for mine, further in zip(receivers, copies, strict=True):
            pieces = draw(st.lists(st.sampled_from(held), max_size=len(held), unique_by=lambda p: p[0]))
            if pieces:
                chosen = [draw(st.sampled_from(p)) for p in pieces]
                pads = (
                    [0, 0]
                    if dtype == "uint8"
                    else draw(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=2, max_size=2))
                )
                mine.append(ReceiverTensor(meta.name, scaled(joined(chosen, *pads), wide)))
                if draw(st.integers(0, 3)) == 0:
                    again = [draw(st.sampled_from(p)) for p in reversed(pieces)]
                    further[meta.name] = scaled(joined(again, pads[1], pads[0]), wide)
    return Group(metas, senders, receivers, copies)
