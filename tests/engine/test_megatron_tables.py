"""Tables from Megatron-Core names to checkpoint names against dense conversion of tagged tensors, on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidInput, LayoutError
from engine.layout.blocks import Block, Layout
from engine.layout.cover import prove_exact_cover
from engine.layout.mapping import map_indices, map_partial
from engine.layout.placement import Placement, numel_of
from engine.models.megatron import (
    MegatronShape,
    MegatronTable,
    Run,
    canonical_tensors,
    check_transformer_config,
    restrict,
)
from engine.models.megatron.table import LAYER_RULES, MODEL_RULES
from engine.records.models import TensorMeta
from tests.support.megatron.reference import Coordinates, Experts, Form, Held, Tagged, held

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


# --- every family, on every rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("c", DENSE, ids=ids)
def test_dense_models_on_every_rank(c: dict[str, Any], tp: int, te: bool) -> None:
    check_all(c, ranks(tp), Form(te=te))


@pytest.mark.parametrize("experts", ["sequential", "grouped", "legacy"])
@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 4), (1, 8, 1)])
@pytest.mark.parametrize("c", MOE, ids=lambda c: ids(c) + str(c.get("q_lora_rank", "")))
def test_models_with_experts_on_every_rank(c: dict[str, Any], tp: int, ep: int, etp: int, experts: Experts) -> None:
    check_all(c, ranks(tp, ep, etp), Form(te=experts == "grouped", experts=experts))


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_projection_that_compresses_queries_and_keys(tp: int, te: bool) -> None:
    check_all(LATENT_MODEL, ranks(tp), Form(te=te, fused=True))


@pytest.mark.parametrize("stages", [(2, 2), (1, 2, 1), (4, 0), (0, 3, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("c", [DENSE[0], DENSE[1], MOE[0], MOE[3]], ids=ids)
def test_layers_are_counted_through_all_stages(c: dict[str, Any], stages: tuple[int, ...]) -> None:
    """The number in a name counts from the chunk's first layer; a tied output layer is a replica of the embedding."""
    check_all(c, ranks(2, 2, 1, stages), Form())


@given(
    heads_per_group=st.integers(1, 4), groups=st.sampled_from([1, 2, 4]), head=st.integers(1, 3),
    tp=st.sampled_from([1, 2, 4, 8]), vocabulary=st.integers(1, 70), unit=st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_heads_groups_and_vocabulary(
    heads_per_group: int, groups: int, head: int, tp: int, vocabulary: int, unit: int
) -> None:
    """With more ranks than groups a rank's rows begin and end inside a group, even inside a head."""
    heads = heads_per_group * groups
    c = config(
        "Qwen2", num_attention_heads=heads, num_key_value_heads=groups, head_dim=head, vocab_size=vocabulary,
        num_hidden_layers=1,
    )  # fmt: skip
    if (heads + 2 * groups) * head % tp or heads * head % tp:
        return
    check_all(c, ranks(tp, stages=(1,)), Form(unit=unit))


def test_a_missing_rank_is_a_named_gap_and_a_second_owner_an_overlap() -> None:
    c, tag = DENSE[0], Tagged()
    every = list(tables(c, tag, ranks(4), Form()))
    with pytest.raises(LayoutError, match=r"no owner"):
        prove_cover(c, [x for x in every if "tp=(2, 4)" not in x[0]])
    wrong = MegatronTable(c, MegatronShape(1, 2)).placements("decoder.layers.0.mlp.linear_fc2.weight", (8, 8), layer=0)
    with pytest.raises(LayoutError, match=r"belong to both"):
        prove_cover(c, [*every, ("someone", ("", None), tag.arrays["model.norm.weight"], wrong)])


# --- numbers of pieces -----------------------------------------------------------------------------------------------


def test_blocks_and_runs_are_few() -> None:
    groups = 128
    c = config("Llama", num_attention_heads=2 * groups, num_key_value_heads=groups, head_dim=2)
    table = MegatronTable(c, MegatronShape())
    qkv = table.placements("decoder.layers.0.self_attention.linear_qkv.weight", (4 * groups * 2, HIDDEN), layer=3)
    assert [len(p.layout.blocks) for p in qkv] == [1, 1, 1]
    assert len(restrict(qkv, 0, 4 * groups * 2 * HIDDEN)) == 3 * groups
    columns = MegatronTable(c, MegatronShape(1, 2)).placements(
        "decoder.layers.0.mlp.linear_fc2.weight", (HIDDEN, 8), layer=0
    )
    assert [len(p.layout.blocks) for p in columns] == [1]
    (run,) = restrict(columns, 3, 61)  # a slice that starts and ends inside a row is one run of three blocks
    assert (run.start, run.numel, len(run.layout.blocks)) == (3, 58, 3)


# --- runs of a flat range --------------------------------------------------------------------------------------------


def check_runs(runs: list[Run], tag: Tagged, local: I64, start: int, stop: int) -> None:
    """Runs hold exactly the range's elements that are not padding, in order, each as long as it can be."""
    flat = local.reshape(-1)
    seen = np.zeros(flat.size, bool)
    owner = np.full(flat.size, -1)
    numbers = {r.tensor.name: k for k, r in enumerate({r.tensor.name: r for r in runs}.values())}
    end = start
    for r in runs:
        assert end <= r.start < r.start + r.numel <= stop
        assert (r.layout.src_numel, r.layout.dst_numel) == (r.numel, numel_of(r.tensor))
        at = map_indices(r.layout, np.arange(r.numel))
        here = slice(r.start, r.start + r.numel)
        assert np.array_equal(tag.arrays[r.tensor.name].reshape(-1)[at], flat[here])
        seen[here] = True
        owner[here] = numbers[r.tensor.name]
        end = r.start + r.numel
    assert np.array_equal(seen[start:stop], flat[start:stop] > 0)
    assert not seen[:start].any()
    assert not seen[stop:].any()
    changes = np.count_nonzero(np.diff(owner[start:stop][seen[start:stop]])) if seen.any() else -1
    holes = np.count_nonzero(np.diff(np.flatnonzero(seen)) > 1)
    assert len(runs) == changes + 1 + holes


@cache
def everything() -> list[tuple[Tagged, I64, list[Placement]]]:
    """One parameter of each kind on the second rank of two."""
    out = []
    for c, form in (
        (DENSE[1], Form()), (DENSE[4], Form()), (MOE[0], Form(experts="legacy")), (MOE[3], Form(fused=True)),
    ):  # fmt: skip
        tag, at = Tagged(), Coordinates((1, 2), (1, 2), (0, 1), range(1, 3))
        found = {key[0].split(".", 3)[-1]: (tag, local, p) for _, key, local, p in tables(c, tag, [at], form)}
        out += found.values()
    return out


@given(which=st.integers(0, 999), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_range_of_a_parameter(which: int, data: st.DataObject) -> None:
    tag, local, placements = everything()[which % len(everything())]
    start = data.draw(st.integers(0, local.size))
    stop = data.draw(st.integers(start, local.size))
    check_runs(restrict(placements, start, stop), tag, local, start, stop)


def test_a_whole_parameter_and_each_of_its_ends() -> None:
    for tag, local, placements in everything():
        for start, stop in ((0, local.size), (0, 0), (0, 1), (local.size - 1, local.size), (5, max(5, local.size - 3))):
            check_runs(restrict(placements, start, stop), tag, local, start, stop)


def test_neighbours_are_one_run_whatever_blocks_they_need() -> None:
    """[0, 4) goes on from [4, 8) in the tensor, too; [8, 12) lies elsewhere, and 12 belongs to nobody."""
    meta = TensorMeta(name="t", shape=(20,))
    blocks = (
        Block((4,), 0, (1,), 2, (1,)),
        Block((4,), 4, (1,), 6, (1,)),
        Block((2, 2), 8, (2, 1), 0, (15, 1)),
        Block((2,), 13, (1,), 18, (1,)),
    )
    found = restrict([Placement(meta, Layout(blocks, 15, 20))], 1, 15)
    assert [(r.start, r.numel, len(r.layout.blocks)) for r in found] == [(1, 11, 2), (13, 2, 1)]
    assert map_indices(found[0].layout, np.arange(11)).tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 15, 16]
    assert map_indices(found[1].layout, np.arange(2)).tolist() == [18, 19]


@pytest.mark.parametrize("cuts", [2, 7])
@pytest.mark.parametrize("c", [DENSE[1], MOE[2], LATENT_MODEL], ids=ids)
def test_cover_also_holds_for_the_slices_of_a_distributed_optimizer(c: dict[str, Any], cuts: int) -> None:
    """Data-parallel ranks own flat ranges of every parameter, some of them none."""
    prove_cover(c, tables(c, Tagged(), ranks(2, 2, 1, (1, 3)), Form(te=True, experts="grouped")), cuts)


def test_a_range_outside_the_parameter_is_refused() -> None:
    _, local, placements = everything()[0]
    for start, stop in ((-1, 2), (3, 2), (0, local.size + 1)):
        with pytest.raises(LayoutError, match="not a range"):
            restrict(placements, start, stop)
    assert restrict([], 0, 7) == []


# --- names, dtypes, coordinates --------------------------------------------------------------------------------------

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def test_tied_output_layers_are_the_embedding() -> None:
    name = "output_layer.weight"
    for tied, canonical in ((True, "model.embed_tokens.weight"), (False, "lm_head.weight")):
        table = MegatronTable(config("Llama", tie_word_embeddings=tied), MegatronShape(1, 2))
        (p,) = table.placements(name, (32, HIDDEN))
        assert p.tensor.name == canonical
        assert sum(b.numel for b in p.layout.blocks) == (VOCAB - 32) * HIDDEN


def test_a_rank_may_hold_nothing_but_padding() -> None:
    assert MegatronTable(DENSE[0], MegatronShape(3, 4)).placements("output_layer.weight", (32, HIDDEN)) == []


def test_dtypes() -> None:
    bias = "decoder.layers.0.mlp.router.expert_bias"
    canonical = "model.layers.2.mlp.gate.e_score_correction_bias"

    def dtype(**more: Any) -> str:
        (p,) = MegatronTable(LATENT_MODEL, MegatronShape(), **more).placements(bias, (EXPERTS,), layer=2)
        return p.tensor.dtype

    assert dtype() == "float32"
    assert dtype(dtypes={canonical: "bfloat16"}) == "bfloat16"
    norm = "decoder.final_layernorm.weight"
    half = config("Llama", dtype=None, torch_dtype="float16")
    assert MegatronTable(half, MegatronShape()).placements(norm, (HIDDEN,))[0].tensor.dtype == "float16"
    with pytest.raises(InvalidInput, match="float4"):
        dtype(dtypes={canonical: "float4"})
    named = {t.name: t.dtype for t in canonical_tensors(LATENT_MODEL)}
    assert (named[canonical], named["model.norm.weight"]) == ("float32", "bfloat16")


def test_an_expert_is_split_like_everything_else_unless_its_group_is_given() -> None:
    assert MegatronShape(1, 2, etp_size=None).expert_share == (1, 2)
    assert MegatronShape(1, 2).expert_share == (0, 1)
    assert MegatronShape(1, 2, etp_rank=3, etp_size=4).expert_share == (3, 4)
    for wrong in ((2, 2), (-1, 1), (0, 1, 2, 2), (0, 1, 0, 1, 1, 1), (1, 4, 0, 1, 2, None)):
        with pytest.raises(InvalidInput, match="etp" if len(wrong) > 4 else "rank"):
            MegatronShape(*wrong)


@pytest.mark.parametrize(
    ("name", "shape", "layer", "says"),
    [
        ("mtp.layers.0.eh_proj.weight", (8, 16), None, "mtp_num_layers"),
        ("module." + FC1, (32, 8), 0, r"Strip every leading 'module\.'"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", (8, 32, 8), 0, "single grouped"),
        ("rotary_pos_emb.inv_freq", (4,), None, "no rule for .*inv_freq"),
        ("decoder.layers.0.self_attention.linear_qkv._extra_state", (1,), 0, "no rule"),
        (FC1, (32, 8), None, "layer=module.layer_number - 1"),
        (FC1, (32, 8), LAYERS, "not the global number"),
        (FC1, (16, 8), 0, r"\[16, 8\].*\[32, 8\].*parallel shape"),
        (QKV, (144, 8), 0, "attention_output_gate"),
        (QKV, (96 + 6, 8), 0, "expects"),
        ("decoder.layers.0.self_attention.linear_qkv.bias", (96,), 0, "has no such bias.*add_qkv_bias"),
        ("decoder.layers.0.self_attention.linear_proj.bias", (8,), 0, "has no such bias"),
        ("decoder.layers.0.mlp.linear_fc1.bias", (32,), 0, "has no such bias"),
        ("decoder.layers.0.mlp.linear_fc2.bias", (8,), 0, "has no such bias"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", (6,), 0, "no such norm"),
        ("decoder.layers.0.self_attention.linear_q_proj.weight", (48, 8), 0, "no latent attention"),
        ("decoder.layers.0.mlp.router.weight", (8, 8), 0, "no experts"),
        ("embedding.word_embeddings.weight", (32, HIDDEN), None, "no vocabulary of 50"),
        ("embedding.word_embeddings.weight", (56, HIDDEN + 1), None, "expects"),
        ("output_layer.weight", (), None, "expects"),
    ],
)
def test_what_a_dense_model_has_not_is_refused_by_name(
    name: str, shape: tuple[int, ...], layer: int | None, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says) as refused:
        MegatronTable(config("Llama"), MegatronShape()).placements(name, shape, layer=layer)
    assert name in str(refused.value)
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("name", "shape", "layer", "says"),
    [
        (FC1, (32, 8), 1, "layer 1 of the model has experts"),
        ("decoder.layers.0.mlp.router.weight", (8, 8), 0, "layer 0 of the model has no experts"),
        ("decoder.layers.0.mlp.shared_experts.gate_weight", (1, 8), 1, "no rule"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight4", (8, 8), 1, "has none with number 4"),
        ("decoder.layers.0.mlp.experts.weight1", (8, 8 * 8), 1, "expects"),
        (QKV, (96, 8), 0, "latent attention"),
        ("decoder.layers.0.self_attention.linear_q_proj.weight", (80, 8), 0, "compresses its queries"),
        ("decoder.layers.0.self_attention.k_layernorm.weight", (6,), 0, "no such norm"),
    ],
)
def test_what_a_model_with_experts_has_not_is_refused(name: str, shape: tuple[int, ...], layer: int, says: str) -> None:
    table = MegatronTable(LATENT_MODEL, MegatronShape(ep_rank=1, ep_size=2))
    with pytest.raises(InvalidInput, match=says):
        table.placements(name, shape, layer=layer)


def test_other_families_have_neither_shared_experts_nor_router_biases() -> None:
    table = MegatronTable(MOE[0], MegatronShape())
    for name, shape in (("router.expert_bias", (EXPERTS,)), ("shared_experts.linear_fc1.weight", (16, 8))):
        with pytest.raises(InvalidInput, match="Train with"):
            table.placements(f"decoder.layers.0.mlp.{name}", shape, layer=0)


@pytest.mark.parametrize(
    ("change", "tp", "name", "rows"),
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 6}, 2, QKV, 36),
        ({"num_attention_heads": 6}, 1, QKV, 84),
        ({"intermediate_size": 18}, 4, FC1, 9),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change: dict[str, Any], tp: int, name: str, rows: int) -> None:
    with pytest.raises(LayoutError, match=r"divide|evenly"):
        MegatronTable(config("Llama", **change), MegatronShape(0, tp)).placements(name, (rows, HIDDEN), layer=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["SomethingElse"]}, "SomethingElse.*Tables exist for DeepseekV3ForCausalLM"),
        ({"architectures": None}, "without architecture"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "50"}, "vocab_size"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"dtype": "float4"}, "float4"),
    ],
)
def test_configurations_without_a_table_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        MegatronTable(config("Llama") | change, MegatronShape())
    with pytest.raises(InvalidInput, match="attention_bias"):
        canonical_tensors(LATENT_MODEL | {"attention_bias": True})


def test_settings_that_change_the_meaning_of_stored_weights_are_refused() -> None:
    class Plain:
        gated_linear_unit = True
        normalization = "RMSNorm"
        layernorm_zero_centered_gamma = False
        mtp_num_layers = 0
        moe_latent_size = None

    check_transformer_config(Plain())
    check_transformer_config(object())  # settings that a version does not have are off
    for name, value in (
        ("gated_linear_unit", False), ("normalization", "LayerNorm"), ("layernorm_zero_centered_gamma", True),
        ("attention_output_gate", True), ("moe_mlp_glu_interleave_size", 32), ("mtp_num_layers", 1),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=name):
            check_transformer_config(type("Other", (Plain,), {name: value})())


def test_the_page_lists_every_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "megatron-layouts.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (?:`|DeepSeek)", page, re.MULTILINE)
    assert rows == [*MODEL_RULES, *LAYER_RULES]
