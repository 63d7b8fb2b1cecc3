"""What a Hugging Face configuration says about the sizes of a model's weights.

One invariant: `Dimensions.of` either understands every setting that changes names or sizes of weights, or refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidInput
from engine.models.decoder import FAMILIES as SERVED
from engine.models.decoder import Family
from engine.records.models import ITEMSIZE

FAMILIES: Mapping[str, Family] = {
    **SERVED,
    "DeepseekV3ForCausalLM": Family(block="mlp", expert_width_key="moe_intermediate_size"),
}
_LATENT = frozenset({"DeepseekV3ForCausalLM"})
_MLP_BIAS = frozenset({"LlamaForCausalLM"})


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention. `query_rank` None: the query is projected at once. Sizes are elements."""

    query_rank: int | None
    rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class Dimensions:
    """Sizes and switches of one model. `dense`: the layers without experts; `width`: of a dense MLP; `shared`: of the
    shared experts together, 0 for none; `head`: one attention head. All sizes count elements."""

    family: Family
    dtype: str
    hidden: int
    layers: int
    vocabulary: int
    tied: bool
    heads: int
    groups: int
    head: int
    width: int
    experts: int
    expert_width: int
    shared: int
    dense: frozenset[int]
    latent: Latent | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool

    @property
    def expert_bias(self) -> bool:
        """True if the checkpoint has a bias of the router's choice for each expert."""
        return self.latent is not None

    @staticmethod
    def of(config: Mapping[str, Any]) -> Dimensions:
        """Read `config.json`; InvalidInput if there are no tables for such a model."""
        architecture = str((config.get("architectures") or [""])[0])
        family = FAMILIES.get(architecture)
        if family is None:
            raise InvalidInput(
                f"there is no Megatron-Core table for {architecture or 'a model without architecture'}.",
                remedy=f"Tables exist for {', '.join(sorted(FAMILIES))}.",
            )
        if config.get("quantization_config"):
            raise InvalidInput(
                "quantized weights have no Megatron-Core table.",
                remedy="Remove quantization_config: the trainer publishes the weights it trains, in their own dtype.",
            )
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in ITEMSIZE:
            raise InvalidInput(f"weights of dtype {dtype!r} have no table.", remedy="Set the configuration's dtype.")
        read = _Reader(config)
        hidden, heads, layers = read("hidden_size"), read("num_attention_heads"), read("num_hidden_layers")
        latent = _latent(read) if architecture in _LATENT else None
        if latent and config.get("attention_bias"):
            raise InvalidInput("no table covers attention_bias of latent attention.", remedy="Train without it.")
        moe = family.block is not None
        dense = _dense(config, architecture, layers)
        shared = read.or_zero("n_shared_experts") if latent else 0
        return Dimensions(
            family=family,
            dtype=dtype,
            hidden=hidden,
            layers=layers,
            vocabulary=read("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            heads=heads,
            groups=read.or_zero("num_key_value_heads") or heads,
            head=read.or_zero("head_dim") or hidden // heads,
            width=read("intermediate_size") if dense else 0,
            experts=read("num_experts", "num_local_experts", "n_routed_experts") if moe else 0,
            expert_width=read(family.expert_width_key) if moe else 0,
            shared=shared * read("moe_intermediate_size") if shared else 0,
            dense=dense,
            latent=latent,
            qkv_bias=_flag(config, family.qkv_bias),
            o_bias=_flag(config, family.o_bias),
            mlp_bias=architecture in _MLP_BIAS and bool(config.get("mlp_bias", False)),
        )


class _Reader:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __call__(self, *keys: str) -> int:
        """The first of `keys` that the configuration has; InvalidInput unless it is a positive integer."""
        value = next((self._config[k] for k in keys if k in self._config), None)
        if type(value) is not int or value < 1:
            raise InvalidInput(
                f"the model's configuration has no usable {keys[0]!r}.", remedy="Pass the model's own config.json."
            )
        return value

    def or_zero(self, key: str) -> int:
        """0 where the configuration leaves `key` out or null."""
        return self(key) if self._config.get(key) else 0


def _latent(read: _Reader) -> Latent:
    return Latent(
        query_rank=read.or_zero("q_lora_rank") or None,
        rank=read("kv_lora_rank"),
        rope=read("qk_rope_head_dim"),
        nope=read("qk_nope_head_dim"),
        value=read("v_head_dim"),
    )


def _dense(config: Mapping[str, Any], architecture: str, layers: int) -> frozenset[int]:
    """Layers that have a plain MLP. Each family has settings of its own for this; it ignores the others'."""
    if FAMILIES[architecture].block is None:
        return frozenset(range(layers))
    if architecture == "DeepseekV3ForCausalLM":
        first, every = int(config.get("first_k_dense_replace") or 0), int(config.get("moe_layer_freq") or 1)
        return frozenset(n for n in range(layers) if n < first or n % every)
    if architecture == "Qwen3MoeForCausalLM":
        only, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step") or 1)
        return frozenset(n for n in range(layers) if n in only or (n + 1) % step)
    return frozenset()


def _flag(config: Mapping[str, Any], which: bool | str) -> bool:
    return bool(config.get(which, False)) if isinstance(which, str) else which
