"""The model, both sides' layouts and the bits that `dte bench p2p` exchanges.

Invariant: every process makes the same case from the same description, and what a receiver must hold at the end is cut
out of the whole model by rectangles, without the plan that is measured.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from engine.detect.base import I64, U16
from engine.errors import InvalidInput
from engine.layout.algebra import contiguous
from engine.layout.blocks import Layout
from engine.models.boxes import Local
from engine.plan.operations import ReceiverTensor, SenderSlice
from engine.plan.planning import Plan, make_plan
from engine.records.models import TensorMeta

Shapes = Sequence[tuple[str, tuple[int, ...]]]
MOST_PARAMETERS = (1 << 31) - 1
"""PULSE's int32 indices go through all weights."""
_UNIT, _VOCABULARY, _DEEPEST = 64, 49152, 80
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj"}  # fmt: skip
_BY_COLUMNS = ("o_proj", "down_proj")
_PROJECTION = re.compile(r"(.*)\.(\w+_proj)\.weight")


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a receiver: `layout` maps lanes of its local `parameter` to lanes of the tensor."""

    tensor: str
    parameter: str
    layout: Layout

    @property
    def lanes(self) -> int:
        return sum(b.numel for b in self.layout.blocks)


@dataclass(frozen=True)
class Case:
    """`starts`: where each tensor begins in the flat parameters, by name. `bounds` [S + 1]: the senders' shards of
    these."""

    metas: tuple[TensorMeta, ...]
    starts: dict[str, int]
    bounds: tuple[int, ...]
    senders: tuple[tuple[SenderSlice, ...], ...]
    receivers: tuple[tuple[Held, ...], ...]
    plan: Plan

    @property
    def numel(self) -> int:
        return self.bounds[-1]

    def cut(self, receiver: int, flat: U16) -> dict[str, U16]:
        """The local parameters of a receiver when the model's flat bits are `flat`."""
        out: dict[str, U16] = {}
        for held in self.receivers[receiver]:
            into = out.setdefault(held.parameter, np.zeros(held.layout.src_numel, np.uint16))
            self.place(held, flat, into)
        return out

    def place(self, held: Held, flat: U16, into: U16) -> None:
        """Copy what the receiver holds of one tensor into its parameter."""
        start = self.starts[held.tensor]
        for b in held.layout.blocks:
            source = strided(flat, start + b.dst_offset, b.dst_strides, b.shape)
            strided(into, b.src_offset, b.src_strides, b.shape)[...] = source

    def expected(self, receiver: int, old: U16, new: U16) -> dict[str, tuple[I64, U16]]:
        """(local lanes, new bits) that must change on a receiver, by tensor, rising."""
        before, after = self.cut(receiver, old), self.cut(receiver, new)
        out: dict[str, tuple[I64, U16]] = {}
        for held in self.receivers[receiver]:
            mine = np.zeros(held.layout.src_numel, np.bool_)
            for b in held.layout.blocks:
                strided(mine, b.src_offset, b.src_strides, b.shape)[...] = True
            now = after[held.parameter]
            local = np.flatnonzero(mine & (before[held.parameter] != now))
            out[held.tensor] = (local, now[local])
        return out


def strided(
    flat: npt.NDArray[np.generic], offset: int, strides: Sequence[int], shape: Sequence[int]
) -> npt.NDArray[np.generic]:
    """A view of the elements of `flat` at these places."""
    return as_strided(flat[offset:], tuple(shape), tuple(s * flat.itemsize for s in strides))


def llama(parameters: int) -> list[tuple[str, tuple[int, ...]]]:
    """Tensors of the Llama-like model with tied embeddings that is nearest to so many parameters.

    At 135 M it has the dimensions of SmolLM2-135M; others are wider and deeper, or less so, in the same proportions.
    """
    widths = range(_UNIT // 2, 128 * _UNIT + 1, _UNIT // 2)
    return min((_tensors(h) for h in widths), key=lambda t: abs(sum(prod(s) for _, s in t) - parameters))


def _tensors(hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    layers = min(_DEEPEST, max(2, round(hidden * 30 / 576)))
    wide, narrow = _round(hidden * 8 / 3), _round(hidden / 3)
    vocabulary = min(_VOCABULARY, _round(hidden * _VOCABULARY / 576))
    out: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocabulary, hidden))]
    for n in range(layers):
        at = f"model.layers.{n}"
        out += [
            (f"{at}.self_attn.q_proj.weight", (hidden, hidden)),
            (f"{at}.self_attn.k_proj.weight", (narrow, hidden)),
            (f"{at}.self_attn.v_proj.weight", (narrow, hidden)),
            (f"{at}.self_attn.o_proj.weight", (hidden, hidden)),
            (f"{at}.mlp.gate_proj.weight", (wide, hidden)),
            (f"{at}.mlp.up_proj.weight", (wide, hidden)),
            (f"{at}.mlp.down_proj.weight", (hidden, wide)),
            (f"{at}.input_layernorm.weight", (hidden,)),
            (f"{at}.post_attention_layernorm.weight", (hidden,)),
        ]
    return [*out, ("model.norm.weight", (hidden,))]


def _round(n: float) -> int:
    return max(_UNIT, round(n / _UNIT) * _UNIT)


def equal(numel: int, count: int) -> list[tuple[str, tuple[int, ...]]]:
    """The same parameters as `count` vectors of about one size: what changes is the number of operations alone."""
    bounds = _shares(numel, count)
    return [(f"piece.{n}", (bounds[n + 1] - bounds[n],)) for n in range(count)]


def _shares(n: int, parts: int) -> tuple[int, ...]:
    return tuple(n * k // parts for k in range(parts + 1))


def synthetic(shapes: Shapes, changed: float, seed: int) -> tuple[U16, U16]:
    """(bits before, bits after) of all parameters: random weights, of which this fraction moves by one ulp."""
    rng = np.random.default_rng(seed)
    numel = sum(prod(s) for _, s in shapes)
    old, new = np.empty(numel, np.uint16), np.empty(numel, np.uint16)
    step = 8 << 20
    for at in range(0, numel, step):
        n = min(step, numel - at)
        old[at : at + n] = (rng.standard_normal(n, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
        moves = rng.random(n, np.float32) < changed
        up = rng.integers(0, 2, n, np.uint16) * np.uint16(2) - np.uint16(1)
        new[at : at + n] = old[at : at + n] + np.where(moves, up, np.uint16(0))
    return old, new


def make_case(shapes: Shapes, senders: int, receivers: int) -> Case:
    """Flat shards on the trainer's side, a tensor-parallel engine with fused projections on the other."""
    metas = tuple(TensorMeta(name=name, shape=shape, dtype="bfloat16") for name, shape in shapes)
    sizes = [prod(shape) for _, shape in shapes]
    firsts = np.cumsum([0, *sizes]).tolist()
    if firsts[-1] > MOST_PARAMETERS:
        raise InvalidInput(f"{firsts[-1]:,} parameters cannot be indexed with int32, as PULSE does.")
    bounds = _shares(firsts[-1], senders)
    slices = [
        tuple(
            SenderSlice(number, meta.name, contiguous(max(lo, first) - first, min(hi, first + n) - max(lo, first), n))
            for number, (meta, first, n) in enumerate(zip(metas, firsts[:-1], sizes, strict=True))
            if max(lo, first) < min(hi, first + n)
        )
        for lo, hi in itertools.pairwise(bounds)
    ]
    held = [_held(metas, rank, receivers) for rank in range(receivers)]
    wanted = [[ReceiverTensor(h.tensor, h.layout) for h in mine] for mine in held]
    return Case(
        metas=metas,
        starts=dict(zip((m.name for m in metas), firsts[:-1], strict=True)),
        bounds=bounds,
        senders=tuple(slices),
        receivers=tuple(held),
        plan=make_plan(metas, slices, wanted),
    )


def _held(metas: Sequence[TensorMeta], rank: int, size: int) -> tuple[Held, ...]:
    """What one rank of `size` holds: rows of most matrices, columns of those that close a block, vectors whole (those
    of `equal` are cut too)."""
    groups: dict[str, list[TensorMeta]] = {}
    for meta in metas:
        match = _PROJECTION.fullmatch(meta.name)
        fused = _FUSED.get(match[2]) if match else None
        groups.setdefault(f"{match[1]}.{fused}.weight" if match and fused else meta.name, []).append(meta)
    out: list[Held] = []
    for parameter, tensors in groups.items():
        ranges = [_ranges(meta, rank, size) for meta in tensors]
        rows = [hi - lo for (lo, hi), *_ in ranges]
        rest = [hi - lo for lo, hi in ranges[0][1:]]
        local, at = Local(parameter, (sum(rows), *rest)), 0
        for meta, mine, n in zip(tensors, ranges, rows, strict=True):
            local.put(meta, mine, (at, *(0 for _ in rest)))
            at += n
        out += [Held(p.tensor.name, parameter, p.layout) for p in local.done()]
    return tuple(out)


def _ranges(meta: TensorMeta, rank: int, size: int) -> list[tuple[int, int]]:
    match = _PROJECTION.fullmatch(meta.name)
    whole = [(0, n) for n in meta.shape]
    if len(meta.shape) < 2 and not meta.name.startswith("piece."):
        return whole
    dim = 1 if match and match[2] in _BY_COLUMNS else 0
    bounds = _shares(meta.shape[dim], size)
    whole[dim] = (bounds[rank], bounds[rank + 1])
    return whole
