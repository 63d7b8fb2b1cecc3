"""Rule tables and probes against real SGLang model classes: they agree with each other and with the engine's loader."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DTE_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment; DTE_SGLANG_PYTHON names its interpreter"),
]

COMMON: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": 256, "bos_token_id": None,
    "pad_token_id": 257, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip
MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama-one-kv-head": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 1},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": None},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-tied": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-bias": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": True},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
        "mlp_only_layers": [], **MOE,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
        "num_experts_per_tok": 2, "head_dim": None, "sliding_window": None,
    },
}  # fmt: skip
SHARED = ("llama", "llama-one-kv-head", "qwen2", "qwen3-tied", "qwen3-moe", "mixtral")
SHAPES: dict[tuple[int, int], tuple[str, ...]] = {
    (1, 1): (*MODELS, "deepseek"),
    (2, 1): (*SHARED, "deepseek"),
    (2, 2): ("qwen3-moe", "mixtral"),
    (4, 2): ("qwen3-moe", "llama"),
}


DEEPSEEK: dict[str, Any] = {
    **{k: v for k, v in COMMON.items() if k != "head_dim"},
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.0, "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def deepseek_tensors() -> list[tuple[str, list[int], str]]:
    """The tensors of a DeepSeek-V3 checkpoint of that configuration: latent attention, and an FP32 router bias."""
    hidden, heads = 64, 4
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [300, hidden]}
    for n in range(2):
        at = f"model.layers.{n}"
        shapes |= {
            f"{at}.self_attn.q_a_proj.weight": [24, hidden],
            f"{at}.self_attn.q_a_layernorm.weight": [24],
            f"{at}.self_attn.q_b_proj.weight": [heads * 24, 24],
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": [32 + 8, hidden],
            f"{at}.self_attn.kv_a_layernorm.weight": [32],
            f"{at}.self_attn.kv_b_proj.weight": [heads * 32, 32],
            f"{at}.self_attn.o_proj.weight": [hidden, heads * 16],
            f"{at}.input_layernorm.weight": [hidden],
            f"{at}.post_attention_layernorm.weight": [hidden],
        }
        mlps = {f"{at}.mlp": 96} if n == 0 else {f"{at}.mlp.{m}": 32 for m in ("shared_experts", *experts())}
        for mlp, width in mlps.items():
            shapes |= {f"{mlp}.{p}.weight": [width, hidden] for p in ("gate_proj", "up_proj")}
            shapes[f"{mlp}.down_proj.weight"] = [hidden, width]
    shapes |= {"model.layers.1.mlp.gate.weight": [8, hidden]}
    shapes |= {"model.norm.weight": [hidden], "lm_head.weight": [300, hidden]}
    rows = [(n, s, "bfloat16") for n, s in shapes.items()]
    return [*rows, ("model.layers.1.mlp.gate.e_score_correction_bias", [8], "float32")]


def experts() -> list[str]:
    return [f"experts.{e}" for e in range(8)]


def prepare(folder: Path, name: str) -> Path:
    """A model directory; deepseek has no table and brings the list of its tensors."""
    model = folder / name
    model.mkdir()
    config = DEEPSEEK if name == "deepseek" else COMMON | MODELS[name]
    config = {k: v for k, v in config.items() if v is not None or k == "bos_token_id"}
    (model / "config.json").write_text(json.dumps(config))
    if name == "deepseek":
        (model / "tensors.json").write_text(json.dumps(deepseek_tensors()))
    return model


@pytest.mark.parametrize(("tp", "ep"), SHAPES)
def test_table_probe_and_loader_agree(tmp_path: Path, tp: int, ep: int) -> None:
    models = {name: prepare(tmp_path, name) for name in SHAPES[tp, ep]}
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DTE_"))},
        "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    words = [str(n) for n in (tp, ep, free_port())]
    command = [str(PYTHON), "-m", "tests.support.sglang_layouts", *words, *map(str, models.values())]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    for name, model in models.items():
        found = [json.loads((model / f"{rank}.json").read_text()) for rank in range(tp)]
        for report in found:
            assert report["wrong"] == [], name
            assert report["not_identity"] == {}, name
            assert report["blocks"] <= 3, name
            assert report["class"] == json.loads((model / "config.json").read_text())["architectures"][0]
        padding = sum(r["unwritten"].get("model.embed_tokens.weight", 0) for r in found)
        assert padding == (320 - 300) * 64, name
        absent = {n for report in found for n in report["absent"]}
        assert all(".experts." in n for n in absent), name
        assert bool(absent) == (ep > 1 and name in ("qwen3-moe", "mixtral")), name
        assert ("float32" in found[0]["dtypes"]) == (name == "deepseek"), "the FP32 router bias"
