"""Models, ranks and position-tagged parameters that the tests of Megatron-Core tables share.

One invariant: every element of a tagged tensor is a number of its own, so what lies where can be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.layout.blocks import Layout
from engine.layout.cover import prove_exact_cover
from engine.layout.mapping import map_partial
from engine.layout.placement import Placement, numel_of
from engine.models.megatron import (
    MegatronShape,
    MegatronTable,
    canonical_tensors,
    restrict,
)
from tests.support.megatron.reference import Coordinates, Form, Held, Tagged, held

HIDDEN, VOCAB, LAYERS, EXPERTS = 8, 50, 4, 8
I64 = npt.NDArray[np.int64]


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "num_local_experts": EXPERTS,
        "moe_intermediate_size": 4,
    } | more


LATENT = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}
DENSE = [
    config("Llama"),
    config("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    config("Mistral", num_key_value_heads=2),
    config("Qwen2", num_key_value_heads=8, tie_word_embeddings=True),
    config("Qwen2", num_key_value_heads=1),
    config("Qwen3", num_key_value_heads=2, attention_bias=True),
]
MOE = [
    config("Qwen3Moe"),
    config("Qwen3Moe", mlp_only_layers=[2], decoder_sparse_step=2),
    config("Mixtral", num_key_value_heads=2),
    config("DeepseekV3", **LATENT),
    config("DeepseekV3", **LATENT | {"q_lora_rank": None}),
]
LATENT_MODEL = MOE[3]


def ids(c: dict[str, Any]) -> str:
    return c["architectures"][0].removesuffix("ForCausalLM") + str(c["num_key_value_heads"])


def shape_of(at: Coordinates) -> MegatronShape:
    return MegatronShape(*at.tp, *at.ep, *at.etp)


def filled(placements: Iterable[Placement], tag: Tagged, numel: int) -> I64:
    """A local parameter, flat, filled through its placements."""
    local = np.zeros(numel, np.int64)
    for p in placements:
        canonical = tag.arrays[p.tensor.name]
        assert tuple(p.tensor.shape) == canonical.shape
        assert (p.layout.src_numel, p.layout.dst_numel) == (numel, canonical.size)
        at = map_partial(p.layout, np.arange(numel))
        assert not local[at >= 0].any(), "two placements share a local element"
        local[at >= 0] = canonical.reshape(-1)[at[at >= 0]]
    return local


def ranks(
    tp: int, ep: int = 1, etp: int = 1, stages: tuple[int, ...] = (LAYERS,), chunks: int = 1
) -> Iterator[Coordinates]:
    """Every distinct holder of parameters: stages × (tensor-parallel ranks × (expert × expert-tensor) ranks).

    `stages`: layers of each model chunk, in order; with several chunks a pipeline stage (`chunks`) only the order of
    the chunks counts here.
    """
    first = 0
    for k, n in enumerate(stages):
        for r in range(max(tp, ep * etp)):
            yield Coordinates(
                (r % tp, tp),
                (r // etp % ep, ep),
                (r % etp, etp),
                range(first, first + n),
                k == 0,
                k == len(stages) - 1,
            )
        first += n


Found = tuple[str, tuple[str, int | None], I64, list[Placement]]
"""Rank, (name, layer), its tensor by dense conversion, its placements."""


def tables(c: dict[str, Any], tag: Tagged, holders: Iterable[Coordinates], form: Form) -> Iterator[Found]:
    """Every parameter of every rank."""
    for at in holders:
        table = MegatronTable(c, shape_of(at))
        tensors: Held = held(c, tag, at, form)
        for (name, layer), local in tensors.items():
            yield str(at), (name, layer), local, table.placements(name, local.shape, layer=layer)


def owned(found: Iterable[Found]) -> Iterator[Found]:
    """One of all parameters that hold the same canonical elements."""
    seen = set()
    for one in found:
        blocks = [(p.tensor.name, b.dst_offset, b.shape, b.dst_strides) for p in one[3] for b in p.layout.blocks]
        elements = tuple(sorted(blocks))
        if elements not in seen:
            seen.add(elements)
            yield one


def prove_cover(c: dict[str, Any], found: Iterable[Found], cuts: int = 1) -> None:
    """The proof that registration makes: of replicas one owner counts, then everything is covered exactly once.

    `cuts`: flat ranges of each parameter that different ranks own.
    """
    owners: dict[str, list[tuple[str, Layout]]] = {t.name: [] for t in canonical_tensors(c)}
    for rank, _, local, placements in owned(found):
        if cuts == 1:
            for p in placements:
                owners[p.tensor.name].append((rank, p.layout))
        for k in range(cuts if cuts > 1 else 0):
            for r in restrict(placements, local.size * k // cuts, local.size * (k + 1) // cuts):
                owners[r.tensor.name].append((f"{rank} data={k}", r.layout))
    for t in canonical_tensors(c):
        prove_exact_cover(numel_of(t), owners[t.name], tensor=t.name)


def check_all(c: dict[str, Any], holders: Iterable[Coordinates], form: Form) -> None:
    tag = Tagged()
    every = list(tables(c, tag, holders, form))
    wanted = {t.name: t for t in canonical_tensors(c)}
    for rank, key, local, placements in every:
        assert np.array_equal(filled(placements, tag, local.size), local.reshape(-1)), (rank, key)
        assert all(p.tensor == wanted[p.tensor.name] for p in placements)
    prove_cover(c, every)
