"""A two-layer policy with random weights and one token per character, so that a whole demo takes seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from app.demo.model import Policy, prepare_masters

ALPHABET = "0123456789+=\n "


@dataclass
class Encoded:
    input_ids: list[int]


class CharTokenizer:
    """As much of a tokenizer as the demo uses."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> Encoded:
        return Encoded([ALPHABET.index(c) for c in text])

    def decode(self, tokens: list[int]) -> str:
        return "".join(ALPHABET[t % len(ALPHABET)] for t in tokens)


def config_json() -> str:
    return json.dumps(
        {
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        }
    )


def load_tiny(seed: int) -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**json.loads(config_json())))
    prepare_masters(model, seed)
    model.eval()
    return Policy(model, CharTokenizer(), config_json())  # type: ignore[arg-type]
