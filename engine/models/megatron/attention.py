"""Rules of attention: queries, keys and values by group, and latent attention.

One invariant: rows are placed by where they stand in the tensor of all ranks, so a cut inside a group, or inside a
head, is placed like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.errors import LayoutError
from engine.models.boxes import Range
from engine.models.megatron.dimensions import Latent
from engine.models.megatron.kinds import Rule, no_bias, norm, whole
from engine.models.megatron.spot import CHECK_SIZES, Spot
from engine.records.models import TensorMeta


def _qkv(kind: str) -> Rule:
    """Group after group [queries, key, value]; a rank has an equal share of these rows, wherever the cut falls."""

    def rule(s: Spot) -> int:
        d = s.dims
        _no_latent(s)
        rest = (d.hidden,) if kind == "weight" else ()
        if kind == "bias" and not d.qkv_bias:
            raise no_bias(s, "add_qkv_bias and add_bias_linear")
        if d.heads % d.groups:
            raise LayoutError(f"{s.local.name!r}: {d.heads} heads do not divide into {d.groups} query groups.")
        size = s.shape.tp_size
        if d.groups % size and size % d.groups:
            raise LayoutError(
                f"{s.local.name!r}: {d.groups} query groups and {size} ranks do not divide each other.",
                remedy=CHECK_SIZES,
            )
        if s.local.shape == ((2 * d.heads + 2 * d.groups) * d.head // size, *rest):
            raise s.refuse("attention_output_gate is not supported.", "Train without attention_output_gate.")
        lo, hi = s.split((d.heads + 2 * d.groups) * d.head, "rows of queries, keys and values")
        s.expect(hi - lo, *rest)
        queries = d.heads // d.groups * d.head
        group = queries + 2 * d.head
        first = 0
        for name, rows in (("q_proj", queries), ("k_proj", d.head), ("v_proj", d.head)):
            meta = s.meta(f"{s.at}.self_attn.{name}.{kind}", d.groups * rows, *rest)
            _grouped(s, meta, rows, first, group, (lo, hi))
            first += rows
        return 0

    return rule


def _grouped(s: Spot, meta: TensorMeta, rows: int, first: int, group: int, mine: Range) -> None:
    """Canonical rows [g·rows, (g+1)·rows) are rows [g·group + first, …) of a tensor of which `mine` lies here."""
    lo, hi = mine
    if lo % group == 0 and hi % group == 0:  # whole groups: one block however many there are
        width = meta.shape[1] if len(meta.shape) > 1 else 1
        count, run = (hi - lo) // group, rows * width
        s.block(meta, (count, run), first * width, (group * width, 1), lo // group * run, (run, 1))
        return
    for g in range(lo // group, -(-hi // group)):
        start = g * group + first
        a, b = max(lo, start), min(hi, start + rows)
        if a < b:
            s.rows(meta, (g * rows + a - start, g * rows + b - start), a - lo)


def _output_projection(s: Spot) -> int:
    d = s.dims
    inner = d.heads * (d.latent.value if d.latent else d.head)
    lo, hi = s.split(inner, "columns of the output projection")
    s.expect(d.hidden, hi - lo)
    s.columns(s.meta(f"{s.at}.self_attn.o_proj.weight", d.hidden, inner), (lo, hi))
    return 0


def _output_bias(s: Spot) -> int:
    if not s.dims.o_bias:
        raise no_bias(s, "add_bias_linear")
    return whole(s, f"{s.at}.self_attn.o_proj.bias", s.dims.hidden)


def _head_norm(name: str, compressed: bool = False) -> Rule:
    """Norms of queries and keys; with latent attention the query's norm is that of its compressed form."""

    def rule(s: Spot) -> int:
        latent = s.dims.latent
        if latent and compressed and latent.query_rank:
            return whole(s, f"{s.at}.self_attn.q_a_layernorm.weight", latent.query_rank)
        if latent or not s.dims.family.qk_norm:
            raise s.refuse("the checkpoint has no such norm.", "Train with qk_layernorm as the model has it.")
        return whole(s, f"{s.at}.self_attn.{name}.weight", s.dims.head)

    return rule


# --- latent attention ------------------------------------------------------------------------------------------------


def _latent(s: Spot) -> Latent:
    if s.dims.latent is None:
        raise s.refuse("the model has no latent attention.", CHECK_SIZES)
    return s.dims.latent


def _query_rank(s: Spot) -> int:
    rank = _latent(s).query_rank
    if rank is None:
        raise s.refuse("the model projects its queries at once.", "Train with q_lora_rank as the model has it.")
    return rank


def _no_latent(s: Spot) -> None:
    if s.dims.latent is not None:
        raise s.refuse("the model has latent attention.", "Train with multi_latent_attention.")


def _down(*parts: tuple[str, Callable[[Spot], int]]) -> Rule:
    """Down projections one below the other: on every rank (Transformer Engine), or each split by rows (local spec)."""

    def rule(s: Spot) -> int:
        sizes = {name: size(s) for name, size in parts}
        everywhere = s.local.shape[:1] == (sum(sizes.values()),)
        mine = {n: (0, r) if everywhere else s.split(r, "rows of a down projection") for n, r in sizes.items()}
        s.expect(sum(hi - lo for lo, hi in mine.values()), s.dims.hidden)
        row = 0
        for name, (lo, hi) in mine.items():
            s.rows(s.meta(f"{s.at}.self_attn.{name}.weight", sizes[name], s.dims.hidden), (lo, hi), row)
            row += hi - lo
        return 0

    return rule


def _key_value_down(s: Spot) -> int:
    latent = _latent(s)
    return latent.rank + latent.rope


def _up(name: str, rows: Callable[[Spot], int], columns: Callable[[Spot], int]) -> Rule:
    """Rows of whole heads; a rank has its share of the heads."""

    def rule(s: Spot) -> int:
        total, inner = rows(s), columns(s)
        s.split(s.dims.heads, "attention heads")
        lo, hi = s.split(total, "rows")
        s.expect(hi - lo, inner)
        s.rows(s.meta(f"{s.at}.self_attn.{name}.weight", total, inner), (lo, hi), 0)
        return 0

    return rule


def _query_rows(s: Spot) -> int:
    latent = _latent(s)
    return s.dims.heads * (latent.nope + latent.rope)


def _direct_query_columns(s: Spot) -> int:
    if _latent(s).query_rank is not None:
        raise s.refuse("the model compresses its queries.", "Train with q_lora_rank as the model has it.")
    return s.dims.hidden


def _key_value_rows(s: Spot) -> int:
    latent = _latent(s)
    return s.dims.heads * (latent.nope + latent.value)


# --- the list --------------------------------------------------------------------------------------------------------

_BEFORE = norm("input_layernorm")


def _query_norm(s: Spot) -> int:
    return whole(s, f"{s.at}.self_attn.q_a_layernorm.weight", _query_rank(s))


def _key_value_norm(s: Spot) -> int:
    return whole(s, f"{s.at}.self_attn.kv_a_layernorm.weight", _latent(s).rank)


ATTENTION_RULES: Mapping[str, Rule] = {
    "input_layernorm.weight": _BEFORE,
    "self_attention.linear_qkv.layer_norm_weight": _BEFORE,
    "self_attention.linear_qkv_down_proj.layer_norm_weight": _BEFORE,
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _head_norm("q_norm", compressed=True),
    "self_attention.k_layernorm.weight": _head_norm("k_norm"),
    "self_attention.linear_proj.weight": _output_projection,
    "self_attention.linear_proj.bias": _output_bias,
    "self_attention.linear_q_proj.weight": _up("q_proj", _query_rows, _direct_query_columns),
    "self_attention.linear_q_down_proj.weight": _down(("q_a_proj", _query_rank)),
    "self_attention.linear_q_up_proj.weight": _up("q_b_proj", _query_rows, _query_rank),
    "self_attention.linear_q_up_proj.layer_norm_weight": _query_norm,
    "self_attention.linear_kv_down_proj.weight": _down(("kv_a_proj_with_mqa", _key_value_down)),
    "self_attention.linear_qkv_down_proj.weight": _down(
        ("q_a_proj", _query_rank), ("kv_a_proj_with_mqa", _key_value_down)
    ),
    "self_attention.linear_kv_up_proj.weight": _up("kv_b_proj", _key_value_rows, lambda s: _latent(s).rank),
    "self_attention.linear_kv_up_proj.layer_norm_weight": _key_value_norm,
    "self_attention.kv_layernorm.weight": _key_value_norm,
}
