"""Where SGLang's Llama-like models keep the elements of the checkpoint's tensors, by rules on parameter names.

One invariant: a rule is used only if the parameter has exactly the shape the rule gives it; a parameter without a rule
is an error. That the elements really are where the rules say is proven by the digest of a known version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.errors import LayoutError
from engine.layout.blocks import Block, Layout
from engine.records.models import TensorMeta

VOCAB_PADDING = 64


class Placement(NamedTuple):
    """`layout` maps elements of one local parameter, in memory order, to elements of `tensor`; partly, perhaps."""

    tensor: TensorMeta
    layout: Layout


@dataclass(frozen=True)
class Shape:
    """What the rules need of a model's configuration, and this rank's place in the engine."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    experts: int = 0
    expert_mlp: int = 0
    rank: int = 0
    ranks: int = 1
    expert_rank: int = 0
    expert_ranks: int = 1

    @classmethod
    def of(cls, config: Any, *, rank: int, ranks: int, expert_rank: int = 0, expert_ranks: int = 1) -> Shape:
        """From a Hugging Face configuration object."""
        heads = int(config.num_attention_heads)
        return cls(
            hidden=int(config.hidden_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            mlp=int(config.intermediate_size),
            vocab=int(config.vocab_size),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            experts=int(getattr(config, "num_experts", 0) or 0),
            expert_mlp=int(getattr(config, "moe_intermediate_size", 0) or 0),
            rank=rank,
            ranks=ranks,
            expert_rank=expert_rank,
            expert_ranks=expert_ranks,
        )

    def share(self, total: int) -> tuple[int, int]:
        """(first, count) of this rank's equal share of `total`."""
        if total % self.ranks:
            raise LayoutError(f"{total} does not divide among {self.ranks} ranks.")
        return total // self.ranks * self.rank, total // self.ranks

    def kv_share(self) -> tuple[int, int]:
        """(first, count) of this rank's key/value heads; with more ranks than heads each head is on several."""
        if self.ranks >= self.kv_heads:
            return self.rank // (self.ranks // self.kv_heads), 1
        return self.share(self.kv_heads)


@dataclass(frozen=True)
class Part:
    """A rectangle of a canonical matrix that is a run of whole rows of the local parameter.

    Rows [row, row + rows) and columns [col, col + cols) of `tensor`, at local row `at`. A vector has one column.
    """

    tensor: str
    shape: tuple[int, ...]
    at: int
    row: int
    rows: int
    col: int
    cols: int


Rule = Callable[[str, Shape], tuple[tuple[int, ...], list[Part]]]
"""(name before the matched suffix, shape) → (the local parameter's shape, what its rows hold)."""


def _whole(suffix: str, shape: Callable[[Shape], tuple[int, ...]]) -> Rule:
    def rule(prefix: str, s: Shape) -> tuple[tuple[int, ...], list[Part]]:
        full = shape(s)
        rows, cols = (full[0], 1) if len(full) == 1 else full
        return full, [Part(prefix + suffix, full, 0, 0, rows, 0, cols)]

    return rule


def _vocab(suffix: str) -> Rule:
    def rule(prefix: str, s: Shape) -> tuple[tuple[int, ...], list[Part]]:
        first, count = s.share(-(-s.vocab // VOCAB_PADDING) * VOCAB_PADDING)
        rows = max(0, min(first + count, s.vocab) - first)
        return (count, s.hidden), [Part(prefix + suffix, (s.vocab, s.hidden), 0, first, rows, 0, s.hidden)]

    return rule


def _qkv(kind: str) -> Rule:
    def rule(prefix: str, s: Shape) -> tuple[tuple[int, ...], list[Part]]:
        cols = s.hidden if kind == "weight" else 1
        parts, at = [], 0
        for letter, total, (first, count) in (
            ("q", s.heads, s.share(s.heads)),
            ("k", s.kv_heads, s.kv_share()),
            ("v", s.kv_heads, s.kv_share()),
        ):
            full = (total * s.head_dim, cols) if kind == "weight" else (total * s.head_dim,)
            rows = count * s.head_dim
            parts.append(Part(f"{prefix}{letter}_proj.{kind}", full, at, first * s.head_dim, rows, 0, cols))
            at += rows
        return ((at, cols) if kind == "weight" else (at,)), parts

    return rule


def _gate_up(prefix: str, s: Shape) -> tuple[tuple[int, ...], list[Part]]:
    first, count = s.share(s.mlp)
    full = (s.mlp, s.hidden)
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return (2 * count, s.hidden), [Part(n, full, i * count, first, count, 0, s.hidden) for i, n in enumerate(names)]


def _columns(suffix: str, inner: Callable[[Shape], int]) -> Rule:
    def rule(prefix: str, s: Shape) -> tuple[tuple[int, ...], list[Part]]:
        first, count = s.share(inner(s))
        return (s.hidden, count), [Part(prefix + suffix, (s.hidden, inner(s)), 0, 0, s.hidden, first, count)]

    return rule


def _experts(s: Shape) -> tuple[int, int, int, int]:
    """(first expert, experts, first inner row, inner rows) on this rank."""
    if s.experts % s.expert_ranks or s.expert_mlp % (s.ranks // s.expert_ranks):
        raise LayoutError(f"{s.experts} experts of {s.expert_mlp} do not divide among {s.ranks} ranks.")
    count = s.experts // s.expert_ranks
    inner = s.expert_mlp // (s.ranks // s.expert_ranks)
    return s.expert_rank * count, count, s.rank % (s.ranks // s.expert_ranks) * inner, inner


def _w13(prefix: str, s: Shape) -> tuple[tuple[int, ...], list[Part]]:
    first, count, at, inner = _experts(s)
    full = (s.expert_mlp, s.hidden)
    parts = [
        Part(f"{prefix}{first + e}.{n}_proj.weight", full, (2 * e + i) * inner, at, inner, 0, s.hidden)
        for e in range(count)
        for i, n in enumerate(("gate", "up"))
    ]
    return (count, 2 * inner, s.hidden), parts


def _w2(prefix: str, s: Shape) -> tuple[tuple[int, ...], list[Part]]:
    first, count, at, inner = _experts(s)
    full = (s.hidden, s.expert_mlp)
    parts = [
        Part(f"{prefix}{first + e}.down_proj.weight", full, e * s.hidden, 0, s.hidden, at, inner) for e in range(count)
    ]
    return (count, s.hidden, inner), parts


RULES: tuple[tuple[str, Rule], ...] = (
    ("embed_tokens.weight", _vocab("embed_tokens.weight")),
    ("lm_head.weight", _vocab("lm_head.weight")),
    ("self_attn.qkv_proj.weight", _qkv("weight")),
    ("self_attn.qkv_proj.bias", _qkv("bias")),
    ("self_attn.o_proj.weight", _columns("self_attn.o_proj.weight", lambda s: s.heads * s.head_dim)),
    ("self_attn.q_norm.weight", _whole("self_attn.q_norm.weight", lambda s: (s.head_dim,))),
    ("self_attn.k_norm.weight", _whole("self_attn.k_norm.weight", lambda s: (s.head_dim,))),
    ("mlp.gate_up_proj.weight", _gate_up),
    ("mlp.down_proj.weight", _columns("mlp.down_proj.weight", lambda s: s.mlp)),
    ("mlp.gate.weight", _whole("mlp.gate.weight", lambda s: (s.experts, s.hidden))),
    ("mlp.experts.w13_weight", _w13),
    ("mlp.experts.w2_weight", _w2),
    ("norm.weight", _whole("norm.weight", lambda s: (s.hidden,))),
)
"""By the end of the parameter's name, the first that fits."""

_STEM = re.compile(r"(?:mlp\.|self_attn\.|mlp\.experts\.)(?=(?:qkv_proj|gate_up_proj|w13_weight|w2_weight))")


def _prefix(name: str, suffix: str) -> str:
    """What precedes the canonical names of the parts: stacked parameters keep the module they are in."""
    stem = _STEM.match(suffix)
    return name[: len(name) - len(suffix)] + (stem.group(0) if stem else "")


def placements(parameters: Mapping[str, tuple[tuple[int, ...], str]], shape: Shape) -> dict[str, list[Placement]]:
    """Local parameter → what it holds. `parameters`: its shape and dtype by name.

    LayoutError if a parameter has no rule or another shape than its rule says.
    """
    out = {}
    for name, (local, dtype) in parameters.items():
        rule = next(((s, r) for s, r in RULES if name.endswith(s)), None)
        if rule is None:
            raise LayoutError(f"no rule says what the parameter {name!r} {list(local)} holds.")
        want, parts = rule[1](_prefix(name, rule[0]), shape)
        if tuple(local) != want:
            raise LayoutError(f"the parameter {name!r} is {list(local)}; the rule for it says {list(want)}.")
        out[name] = [_place(part, local, dtype) for part in parts if part.rows]
    return out


def _place(part: Part, local: tuple[int, ...], dtype: str) -> Placement:
    meta = TensorMeta.model_validate({"name": part.tensor, "shape": part.shape, "dtype": dtype})
    numel = width = 1
    for n in local:
        numel *= n
    for n in part.shape[1:]:
        width *= n
    block = Block(
        (part.rows, part.cols), part.at * part.cols, (part.cols, 1), part.row * width + part.col, (width, 1)
    ).normalised()
    total = width * part.shape[0]
    return Placement(meta, Layout((block,), numel, total))
