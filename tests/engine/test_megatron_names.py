"""Names, dtypes and coordinates that the Megatron-Core tables take, and those they refuse by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidInput, LayoutError
from engine.models.megatron import (
    MegatronShape,
    MegatronTable,
    canonical_tensors,
    check_transformer_config,
)
from engine.models.megatron.table import LAYER_RULES, MODEL_RULES
from tests.engine.megatron_world import (
    DENSE,
    EXPERTS,
    HIDDEN,
    LATENT_MODEL,
    LAYERS,
    MOE,
    VOCAB,
    config,
)

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
