"""Every canonical tensor of a model, from its configuration alone.

One invariant: the list is written down independently of the rules, so a tensor that no rank's parameters mention is
noticed as a gap instead of being forgotten on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.models.megatron.dimensions import Dimensions
from engine.records.models import TensorMeta

_Sized = Iterator[tuple[str, tuple[int, ...]]]


def canonical_tensors(hf_config: Mapping[str, Any], *, dtypes: Mapping[str, str] | None = None) -> list[TensorMeta]:
    """All tensors that the ranks of a job have to cover together. `dtypes` as for `MegatronTable`.

    InvalidInput if there is no table for the model.
    """
    d = Dimensions.of(hf_config)
    special = {"e_score_correction_bias": "float32"}
    return [
        TensorMeta(
            name=name,
            shape=shape,
            dtype=(dtypes or {}).get(name) or special.get(name.rpartition(".")[2], d.dtype),  # type: ignore[arg-type]
        )
        for name, shape in _named(d)
    ]


def _named(d: Dimensions) -> _Sized:
    yield "model.embed_tokens.weight", (d.vocabulary, d.hidden)
    for n in range(d.layers):
        at = f"model.layers.{n}"
        yield f"{at}.input_layernorm.weight", (d.hidden,)
        yield f"{at}.post_attention_layernorm.weight", (d.hidden,)
        yield from _latent_attention(d, f"{at}.self_attn") if d.latent else _attention(d, f"{at}.self_attn")
        yield from _mlp(d, f"{at}.mlp") if n in d.dense else _experts(d, f"{at}.{d.family.block}")
    yield "model.norm.weight", (d.hidden,)
    if not d.tied:
        yield "lm_head.weight", (d.vocabulary, d.hidden)


def _attention(d: Dimensions, at: str) -> _Sized:
    for name, heads in (("q_proj", d.heads), ("k_proj", d.groups), ("v_proj", d.groups)):
        yield f"{at}.{name}.weight", (heads * d.head, d.hidden)
        if d.qkv_bias:
            yield f"{at}.{name}.bias", (heads * d.head,)
    yield f"{at}.o_proj.weight", (d.hidden, d.heads * d.head)
    if d.o_bias:
        yield f"{at}.o_proj.bias", (d.hidden,)
    if d.family.qk_norm:
        yield f"{at}.q_norm.weight", (d.head,)
        yield f"{at}.k_norm.weight", (d.head,)


def _latent_attention(d: Dimensions, at: str) -> _Sized:
    assert d.latent is not None
    a = d.latent
    queries = d.heads * (a.nope + a.rope)
    if a.query_rank is None:
        yield f"{at}.q_proj.weight", (queries, d.hidden)
    else:
        yield f"{at}.q_a_proj.weight", (a.query_rank, d.hidden)
        yield f"{at}.q_a_layernorm.weight", (a.query_rank,)
        yield f"{at}.q_b_proj.weight", (queries, a.query_rank)
    yield f"{at}.kv_a_proj_with_mqa.weight", (a.rank + a.rope, d.hidden)
    yield f"{at}.kv_a_layernorm.weight", (a.rank,)
    yield f"{at}.kv_b_proj.weight", (d.heads * (a.nope + a.value), a.rank)
    yield f"{at}.o_proj.weight", (d.hidden, d.heads * a.value)


def _mlp(d: Dimensions, at: str, width: int = 0) -> _Sized:
    wide = width or d.width
    for name, shape in (("gate", (wide, d.hidden)), ("up", (wide, d.hidden)), ("down", (d.hidden, wide))):
        yield f"{at}.{name}_proj.weight", shape
        if d.mlp_bias:
            yield f"{at}.{name}_proj.bias", shape[:1]


def _experts(d: Dimensions, at: str) -> _Sized:
    f = d.family
    yield f"{at}.gate.weight", (d.experts, d.hidden)
    if d.expert_bias:
        yield f"{at}.gate.e_score_correction_bias", (d.experts,)
    if d.shared:
        yield from _mlp(d, f"{at}.shared_experts", d.shared)
    for e in range(d.experts):
        for name in (f.gate, f.up):
            yield f"{at}.experts.{e}.{name}.weight", (d.expert_width, d.hidden)
        yield f"{at}.experts.{e}.{f.down}.weight", (d.hidden, d.expert_width)
