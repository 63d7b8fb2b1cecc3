"""Tiny random checkpoints that SGLang loads, made offline, and their weights as the publisher's lanes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.records import TensorMeta
from tests.support.versions import State, metas_of

COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": 257,
    "tie_word_embeddings": False,
}
MOE = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, COMMON),
    "llama": (LlamaConfig, LlamaForCausalLM, COMMON),
    "qwen3-narrow": (Qwen3Config, Qwen3ForCausalLM, {**COMMON, "intermediate_size": 96}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**COMMON, **MOE, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}


def _tokenizer(folder: Path) -> None:
    """One token a byte."""
    vocab = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for special in ("<eos>", "<pad>"):
        vocab[special] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def make(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint with weights large enough that greedy decoding depends on all of them."""
    config, model_class, values = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config(**values)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
    path = folder / family
    model.save_pretrained(path)
    _tokenizer(path)
    return path


def read(path: Path) -> tuple[list[TensorMeta], State]:
    """The checkpoint's tensors, and their bits as 16-bit lanes."""
    tensors = load_file(path / "model.safetensors")
    metas = metas_of({n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()})
    return metas, {n: t.contiguous().view(torch.uint16).numpy().reshape(-1).copy() for n, t in tensors.items()}


def write(base: Path, state: State, path: Path) -> Path:
    """A copy of the checkpoint `base` with other weights."""
    shutil.copytree(base, path)
    before = load_file(base / "model.safetensors")
    tensors = {
        n: torch.from_numpy(state[n].copy()).view(t.dtype).reshape(t.shape).contiguous() for n, t in before.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def trained(state: State, rng: np.random.Generator, fraction: float = 0.03) -> State:
    """As after a training step: some weights move by a few units in the last place, some by more."""
    out = {}
    for name, lanes in state.items():
        new = lanes.copy()
        hit = np.flatnonzero(rng.random(lanes.size) < fraction)
        # Bits 7… are the exponent of a BF16: moves of up to 8 units keep every value finite.
        new[hit] ^= rng.choice(np.array([1, 2, 3, 8, 0x8000], np.uint16), hit.size)
        out[name] = new
    return out
