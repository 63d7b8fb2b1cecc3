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
        "mlp_only_layers": [1], **MOE,
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


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_table_probe_and_loader_agree(tmp_path: Path, name: str, tp: int, ep: int) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    config = {k: v for k, v in (COMMON | MODELS[name]).items() if v is not None or k == "bos_token_id"}
    (model / "config.json").write_text(json.dumps(config))
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DTE_"))},
        "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [
        str(PYTHON),
        "-m",
        "tests.support.sglang_layouts",
        str(model),
        str(tp),
        str(ep),
        str(free_port()),
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    reports = [json.loads((out / f"{rank}.json").read_text()) for rank in range(tp)]
    for report in reports:
        assert report["wrong"] == []
        assert report["not_identity"] == {}
        assert report["class"] == config["architectures"][0]
        assert report["blocks"] <= 3
    padding = [sum(r["unwritten"].get("model.embed_tokens.weight", 0) for r in reports)]
    assert padding == [(320 - 300) * 64]
    absent = {name for report in reports for name in report["absent"]}
    assert all(".experts." in n for n in absent)
    assert bool(absent) == (ep > 1)
