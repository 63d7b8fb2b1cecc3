"""The tables against the converters of mbridge, an independent bridge between Megatron-Core and checkpoints.

It needs `mbridge` (0.15.1, installed without its dependencies) beside megatron-core, einops and transformers. Its
converters are called on position-tagged int64 tensors, both ways, without models, process groups or devices.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.layout.mapping import map_partial
from engine.models.megatron import MegatronShape, MegatronTable, canonical_tensors
from tests.engine.megatron_world import EXPERTS, I64, LATENT
from tests.engine.megatron_world import config as config_of

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

CONFIG = config_of("", num_key_value_heads=2, num_hidden_layers=2) | LATENT
MODELS = {
    "LlamaForCausalLM": ("llama", {"attention_bias": False}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {}),
    "MixtralForCausalLM": ("mixtral", {}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {}),
}
UNIT = 8
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
REPLICATED = ("norm", "router", "down_proj")


@pytest.fixture(scope="module")
def registry() -> Iterator[dict[str, Any]]:
    """mbridge's classes by model type. Megatron-Core imports Triton kernels that no converter needs; where Triton is
    missing, that one module of theirs stands empty meanwhile."""
    pytest.importorskip("transformers", reason="mbridge needs transformers")
    pytest.importorskip("einops", reason="mbridge needs einops")
    kernels = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    for name in ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel"):
        setattr(kernels, name, None)
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton") is None:
            patch.setitem(sys.modules, kernels.__name__, kernels)
        pytest.importorskip("mbridge", reason="pip install --no-deps mbridge==0.15.1", exc_type=ImportError)
        from mbridge.core.bridge import _MODEL_REGISTRY

        yield _MODEL_REGISTRY


def bridge(registry: dict[str, Any], config: dict[str, Any], kind: str, tp: int, etp: int) -> Any:
    """A bridge that converts, built without a process group."""
    one = object.__new__(registry[kind])
    one.hf_config = SimpleNamespace(**config)
    one.config = SimpleNamespace(gated_linear_unit=True, mtp_num_layers=None, num_layers=config["num_hidden_layers"])
    one.mpu = SimpleNamespace(tp_size=tp, etp_size=etp)
    one.dtype = None
    one.vocab_size = config["vocab_size"]
    one.padded_vocab_size = -(-config["vocab_size"] // (UNIT * tp)) * UNIT * tp
    one.make_vocab_size_divisible_by = UNIT * tp
    return one


def names(architecture: str) -> Iterator[tuple[str, int | None]]:
    """Megatron-Core names with Transformer Engine's norms and grouped experts, as mbridge knows them."""
    latent = architecture.startswith("Deepseek")
    for n in range(CONFIG["num_hidden_layers"]):
        sparse = (latent and n >= CONFIG["first_k_dense_replace"]) or architecture.startswith(("Qwen3Moe", "Mixtral"))
        inside = ["self_attention.linear_proj.weight"]
        if latent:
            inside += [f"self_attention.linear_{k}_proj.weight" for k in ("q_down", "q_up", "kv_down", "kv_up")]
            inside += [f"self_attention.linear_{k}_up_proj.layer_norm_weight" for k in ("q", "kv")]
            inside += ["input_layernorm.weight"]
        else:
            inside += ["self_attention.linear_qkv.weight", "self_attention.linear_qkv.layer_norm_weight"]
        if architecture.startswith("Qwen2"):
            inside += ["self_attention.linear_qkv.bias"]
        if architecture.startswith("Qwen3"):
            inside += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
        if sparse:
            inside += ["pre_mlp_layernorm.weight", "mlp.router.weight"]
            inside += [f"mlp.experts.linear_fc{k}.weight{e}" for k in (1, 2) for e in range(EXPERTS)]
        else:
            inside += ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        if sparse and latent:
            inside += ["mlp.router.expert_bias", *(f"mlp.shared_experts.linear_fc{k}.weight" for k in (1, 2))]
        yield from ((f"decoder.layers.{n}.{name}", n) for name in inside)
    yield from ((n, None) for n in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"))
    yield "output_layer.weight", None


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (2, 1, 1), (4, 1, 4), (4, 2, 2), (2, 4, 1)])
@pytest.mark.parametrize("architecture", MODELS)
def test_tables_and_converters_agree_both_ways(
    registry: dict[str, Any], architecture: str, tp: int, ep: int, etp: int
) -> None:
    """(4 ranks, 2 query groups): the converters cut inside a group, too."""
    import torch

    kind, more = MODELS[architecture]
    config = {**CONFIG, **more, "architectures": [architecture]}
    one = bridge(registry, config, kind, tp, etp)
    arrays, first = {}, 1
    for t in canonical_tensors(config):
        n = int(np.prod(t.shape))
        arrays[t.name] = torch.arange(first, first + n).reshape(t.shape)
        first += n
    converted: dict[str, Any] = {}
    for name, layer in names(architecture):
        expert = ".experts.linear" in name
        size = etp if expert else tp
        whole = one._weight_to_mcore_format(name, [arrays[n] for n in one._weight_name_mapping_mcore_to_hf(name)])
        axis = 1 if name.endswith(COLUMNS) or ".experts.linear_fc2" in name else 0
        alone = any(part in name for part in REPLICATED)
        shape = list(whole.shape)
        shape[axis] //= 1 if alone else size
        parameter = SimpleNamespace(shape=tuple(shape), tensor_model_parallel=not alone, partition_dim=axis)
        split = one._weight_split_across_tp(name, whole, parameter, size)
        locals_ = []
        for rank, theirs in enumerate(split):
            local_name, ep_rank = name, 0
            if expert:
                prefix, _, number = name.rpartition("weight")
                ep_rank, local = divmod(int(number), EXPERTS // ep)
                local_name = f"{prefix}weight{local}"
            tp_rank = 0 if expert else rank
            table = MegatronTable(config, MegatronShape(tp_rank, tp, ep_rank, ep, rank if expert else 0, etp))
            ours = torch.zeros(theirs.numel(), dtype=torch.int64)
            for p in table.placements(local_name, tuple(theirs.shape), layer=layer):
                at: I64 = map_partial(p.layout, np.arange(theirs.numel()))
                ours[at >= 0] = arrays[p.tensor.name].reshape(-1)[at[at >= 0]]
            assert torch.equal(ours, theirs.reshape(-1)), (name, rank)
            locals_.append(ours.reshape(theirs.shape))
        merged = locals_[0] if alone else one._weight_merge_across_tp(name, locals_, parameter)
        converted.update(zip(*one._weight_to_hf_format(name, merged), strict=True))
    assert converted.keys() == arrays.keys()
    for name, tensor in converted.items():
        assert torch.equal(tensor.reshape(arrays[name].shape), arrays[name]), name
