"""Tiny Megatron-Core GPT models built from a Hugging Face config, so that names, sizes and logits can be compared.

Only the local layer spec is used: it is the one that runs without a GPU. The model's numbers are those of the config;
the job adds the parallel shape and the dtype.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from tests.support.megatron.job import Job

VOCAB_DIVISOR = 16


def padded_vocab(vocab: int, tp: int) -> int:
    """What Megatron pads the vocabulary to: a multiple of the divisor times the tensor-parallel size."""
    multiple = VOCAB_DIVISOR * tp
    return -(-vocab // multiple) * multiple


def param_dtype(job: Job) -> torch.dtype:
    if job.fp32:
        return torch.float32
    return torch.float16 if job.fp16 else torch.bfloat16


def transformer_config(job: Job, hf: dict[str, Any]) -> TransformerConfig:
    """The Megatron-Core config that means the same model as `hf`, in the job's parallel shape."""
    dtype = param_dtype(job)
    values: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "init_method_std": 0.08,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] == "qwen2",
        "qk_layernorm": hf["model_type"] in ("qwen3", "qwen3_moe", "deepseek_v3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": job.tp,
        "pipeline_model_parallel_size": job.pp,
        "virtual_pipeline_model_parallel_size": job.vpp,
        "expert_model_parallel_size": job.ep,
        "sequence_parallel": job.sp,
        # Fused kernels need a GPU.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    if job.etp is not None:
        values["expert_tensor_parallel_size"] = job.etp
    values |= _moe(hf)
    if hf["model_type"] == "deepseek_v3":
        return MLATransformerConfig(**values, **_latent_attention(hf))
    head = hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    return TransformerConfig(**values, num_query_groups=hf["num_key_value_heads"], kv_channels=head)


def _moe(hf: dict[str, Any]) -> dict[str, Any]:
    experts = hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts")
    if experts is None:
        return {}
    values: dict[str, Any] = {
        "num_moe_experts": experts,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf.get("moe_intermediate_size", hf["intermediate_size"]),
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": [int(n >= hf.get("first_k_dense_replace", 0)) for n in range(hf["num_hidden_layers"])],
    }
    if hf["model_type"] == "deepseek_v3":
        values |= {
            "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 1e-3,
            "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        }
    return values


def _latent_attention(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": hf["rope_theta"],
    }


class LatentCoreAttention(DotProductAttention):
    """Megatron-Core's own attention, told that values may be narrower than keys, as latent attention needs: of its own
    core attentions only the one on GPUs takes the two widths. It has no parameters."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        # The first of the two constructions of an MLA layer, which the second replaces, gives no widths.
        super().__init__(*args, **kwargs)
        if k_channels is not None and v_channels is not None:
            self.hidden_size_per_attention_head = k_channels
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


def build(job: Job, hf: dict[str, Any], config: TransformerConfig) -> list[torch.nn.Module]:
    """This rank's model chunks, one for each virtual pipeline stage, wrapped for 16-bit training where it is that.

    The groups of `parallel_state` must be up. Same seed and shape, same weights.
    """
    return [_chunk(job, hf, config, stage) for stage in range(job.vpp or 1)]


def _chunk(job: Job, hf: dict[str, Any], config: TransformerConfig, stage: int) -> torch.nn.Module:
    vp_stage = None if job.vpp is None else stage
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    if isinstance(config, MLATransformerConfig):
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentCoreAttention
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab(hf["vocab_size"], job.tp),
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf["rope_theta"],
        vp_stage=vp_stage,
    )
    _vary_vectors(model, job.seed)
    if job.fp32:
        return model
    model = Float16Module(config, model)
    for name, parameter in model.named_parameters():
        if any(part in name for part in job.fp32_params):
            parameter.data = parameter.data.float()
    return model


def _vary_vectors(model: torch.nn.Module, seed: int) -> None:
    """Norms start as ones and biases as zeros: two of them exchanged would go unseen, so each gets its own values.

    Replicas get equal ones: the values depend on the layer, the name and, where a vector is split, on the rank's part.
    """
    offset = model.decoder.layers[0].layer_number if len(model.decoder.layers) else 0  # type: ignore
    for name, parameter in model.named_parameters():
        if parameter.dim() != 1:
            continue
        part = ps.get_tensor_model_parallel_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{offset}/{name}/{part}".encode()))
        with torch.no_grad():
            parameter.add_((0.2 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))
