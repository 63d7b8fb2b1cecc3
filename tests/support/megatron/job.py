"""What one training run of the rig is: the model family, its parallel shape, its optimizer and what goes wrong when.

A `Job` is plain data: it travels to the ranks as JSON and says everything that a run depends on.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Job:
    """Sizes are small enough for a step to take well under a second. Data-parallel size follows from the world.

    `steps` in the fields below are counted from 1. Of `fp32_params`, every parameter whose name has one of these parts
    is held in FP32 among 16-bit ones: `("q_layernorm", "k_layernorm")` or `("router",)`.
    """

    family: Family = "qwen3"
    layers: int = 2
    vocab: int = 250
    tied: bool = False

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    sp: bool = False

    optimizer: Literal["dist", "float16", "fp32", "aware-split", "aware-whole"] = "dist"
    fp16: bool = False
    fp32_params: tuple[str, ...] = ()
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None

    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0
    schedule: Literal["constant", "manual", "scheduler"] = "constant"

    seed: int = 1
    data_seed: int = 1
    micro_batches: int = 4
    micro_batch_size: int = 2
    sequence: int = 16

    initial_loss_scale: float = 2.0**12
    overflow_steps: tuple[int, ...] = ()
    grad_norm_skip_threshold: float | None = None
    spike_steps: tuple[int, ...] = ()

    @property
    def model_parallel(self) -> int:
        return self.tp * self.pp

    @property
    def distributed(self) -> bool:
        """Whether the optimizer's state is sharded; the precision-aware ones are an emulated FusedAdam."""
        return self.optimizer not in ("float16", "fp32")

    @property
    def fp32(self) -> bool:
        return self.optimizer == "fp32"

    def to_json(self) -> dict[str, Any]:
        return _ADAPTER.dump_python(self, mode="json")  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Job:
        return _ADAPTER.validate_python(value)


_ADAPTER: TypeAdapter[Job] = TypeAdapter(Job)


def hf_config(job: Job) -> dict[str, Any]:
    """The Hugging Face config of the job's model: what `config.json` beside its weights would say."""
    common: dict[str, Any] = {
        "vocab_size": job.vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": job.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": job.tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    match job.family:
        case "llama":
            return common | _named("llama", "LlamaForCausalLM")
        case "qwen2":
            # Qwen2 has no head_dim of its own.
            return {k: v for k, v in common.items() if k not in ("head_dim", "attention_bias")} | _named(
                "qwen2", "Qwen2ForCausalLM"
            )
        case "qwen3":
            return common | _named("qwen3", "Qwen3ForCausalLM")
        case "qwen3_moe":
            sparse = {"decoder_sparse_step": 1, "mlp_only_layers": []}
            return common | moe | sparse | _named("qwen3_moe", "Qwen3MoeForCausalLM")
        case "mixtral":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
            return common | experts | _named("mixtral", "MixtralForCausalLM")
        case "deepseek_v3":
            return (
                {k: v for k, v in common.items() if k != "head_dim"}
                | {
                    "num_key_value_heads": 8,
                    "q_lora_rank": 24,
                    "kv_lora_rank": 32,
                    "qk_nope_head_dim": 16,
                    "qk_rope_head_dim": 8,
                    "v_head_dim": 16,
                    "n_routed_experts": 4,
                    "n_shared_experts": 1,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32,
                    "first_k_dense_replace": 1,
                    "n_group": 1,
                    "topk_group": 1,
                    "norm_topk_prob": True,
                    "scoring_func": "sigmoid",
                    "topk_method": "noaux_tc",
                    "routed_scaling_factor": 1.5,
                    "rope_interleave": True,
                }
                | _named("deepseek_v3", "DeepseekV3ForCausalLM")
            )


def _named(model_type: str, architecture: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture]}
