"""Rule tables and probes against real SGLang model classes: they agree with each other and with the engine's loader."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
CASES = [
    *((name, 1, 1) for name in MODELS),
    *((name, 2, 1) for name in ("llama", "llama-one-kv-head", "qwen2", "qwen3-tied", "qwen3-moe", "mixtral")),
    ("qwen3-moe", 2, 2),
    ("mixtral", 2, 2),
    ("qwen3-moe", 4, 2),
    ("qwen3", 4, 1),
]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def reports(tmp_path: Path, config: dict[str, Any], tp: int, ep: int, tensors: list[Any] | None = None) -> list[Any]:
    """What each rank found."""
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        (model / "tensors.json").write_text(json.dumps(tensors))
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DTE_"))},
        "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    arguments = [str(model), str(tp), str(ep), str(free_port()), str(out)]
    command = [str(PYTHON), "-m", "tests.support.sglang_layouts", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(tp)]


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_table_probe_and_loader_agree(tmp_path: Path, name: str, tp: int, ep: int) -> None:
    config = {k: v for k, v in (COMMON | MODELS[name]).items() if v is not None or k == "bos_token_id"}
    found = reports(tmp_path, config, tp, ep)
    for report in found:
        assert report["wrong"] == []
        assert report["not_identity"] == {}
        assert report["class"] == config["architectures"][0]
        assert report["blocks"] <= 3
    padding = [sum(r["unwritten"].get("model.embed_tokens.weight", 0) for r in found)]
    assert padding == [(320 - 300) * 64]
    absent = {n for report in found for n in report["absent"]}
    assert all(".experts." in n for n in absent)
    assert bool(absent) == (ep > 1)


DEEPSEEK: dict[str, Any] = {
    **{k: v for k, v in COMMON.items() if k != "head_dim"},
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.0, "attention_bias": False,
    "num_nextn_predict_layers": 0, "rope_scaling": None, "tie_word_embeddings": False,
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


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_without_table_is_probed_fp32_router_bias_included(tmp_path: Path, tp: int) -> None:
    for report in reports(tmp_path, DEEPSEEK, tp, 1, deepseek_tensors()):
        assert report["wrong"] == []
        assert report["not_identity"] == {}
        assert report["absent"] == []
        assert report["dtypes"] == ["bfloat16", "float32"]
        assert report["blocks"] <= 3
