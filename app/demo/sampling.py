"""Sampling from the receiver's model.

Invariant: it reads the live parameters and keeps nothing between calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from app.demo.grpo import GenerateRequest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@torch.no_grad()
def generate(model: LlamaForCausalLM, request: GenerateRequest) -> list[list[int]]:
    """Complete every prompt with `max_new_tokens` tokens at temperature 1.

    Sampling is seeded: the same weights and the same request give the same tokens.
    """
    from transformers import GenerationConfig

    width = max(len(p) for p in request.prompts)
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in request.prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in request.prompts])
    sampling = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=request.max_new_tokens,
        min_new_tokens=request.max_new_tokens,
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.seed)
        out = model.generate(input_ids=tokens, attention_mask=attention, generation_config=sampling)
    return [[int(t) for t in row] for row in out[:, width:].tolist()]
