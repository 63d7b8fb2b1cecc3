"""Tiny policies with what FSDP2 treats differently: odd sizes, tied and frozen weights, buffers, other placements.

One invariant: `build` gives the same weights in every process, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard


@dataclass(frozen=True)
class Spec:
    """`hidden` need not divide by the ranks; the mesh is `replicas` × the other ranks; `bf16`: what it computes in."""

    kind: str = "qwen3"
    tied: bool = False
    vocab: int = 251
    hidden: int = 30
    replicas: int = 1
    bf16: bool = False
    wrapped: bool = False


class Extras(nn.Module):
    """What no transformer has: weights that fewer ranks hold than there are, and state outside the optimizer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.randn(3))
        self.sideways = nn.Parameter(torch.randn(3, 8))
        self.frozen = nn.Parameter(torch.randn(7, 5), requires_grad=False)
        self.loose = nn.Parameter(torch.randn(9))
        self.low = nn.Linear(hidden, 5, bias=False, dtype=torch.bfloat16)
        self.register_buffer("bias", torch.randn(6))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor, *, few: bool) -> torch.Tensor:
        """A scalar that depends on the trained ones; on `few` only if told to."""
        out = self.sideways.square().mean() + self.loose.square().mean() + self.low(x.to(self.low.weight.dtype)).mean()
        out = out + self.frozen.mean() + self.bias.mean()
        return out + self.few.square().sum() if few else out


class Policy(nn.Module):
    """A causal language model and the extras."""

    def __init__(self, lm: nn.Module, hidden: int) -> None:
        super().__init__()
        self.lm = lm
        self.extras = Extras(hidden)

    def forward(self, tokens: torch.Tensor, *, few: bool) -> torch.Tensor:
        out = self.lm(input_ids=tokens, labels=tokens, output_hidden_states=True, use_cache=False)
        return out.loss + self.extras(out.hidden_states[-1], few=few)


def build(spec: Spec, seed: int) -> Policy:
    """The whole model in FP32 (one layer of the extras in BF16)."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": spec.tied,
        "attn_implementation": "eager",
    }
    lm = Qwen3ForCausalLM(Qwen3Config(**config)) if spec.kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**config))
    policy = Policy(lm, spec.hidden)
    if spec.wrapped:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        layers = lm.model.layers
        for i in range(len(layers)):
            layers[i] = checkpoint_wrapper(layers[i])
    return policy


def shard(policy: Policy, spec: Spec, mesh: DeviceMesh) -> None:
    """`fully_shard` as a user would, layer by layer."""
    low: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if spec.bf16 else {}
    for layer in policy.lm.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **low)
    fully_shard(policy.extras.low, mesh=mesh)

    def sideways(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param is policy.extras.sideways else None

    fully_shard(policy, mesh=mesh, ignored_params={policy.extras.loose}, shard_placement_fn=sideways, **low)


def rollout(spec: Spec) -> Policy:
    """The model as a rollout engine holds it: FP32 parameters in BF16, and other weights in it."""
    policy = build(Spec(**{**vars(spec), "wrapped": False}), seed=999)
    with torch.no_grad():
        for p in policy.parameters():
            p.data = p.data.to(torch.bfloat16)
        for b in policy.extras.buffers():
            b.zero_()
    return policy
