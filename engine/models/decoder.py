"""Rule tables of decoder-only transformers as SGLang stores them: which canonical tensors make up each parameter.

One invariant: a table describes every parameter of the model, each from Hugging Face checkpoint names, or refuses.
Tables describe weights as the engine's loader leaves them; an engine that repacks them afterwards needs a probe, and a
digest of the live weights confirms either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import InvalidInput
from engine.layout.placement import Placement
from engine.models.boxes import Local, Range
from engine.models.parallel import Shares
from engine.records.models import ITEMSIZE, TensorMeta

ParameterLayouts = dict[str, list[Placement]]
ExpertNames = Literal["separate", "stacked"]
_EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""One number under either name, depending on who wrote the configuration."""


@dataclass(frozen=True)
class Family:
    """What tells one architecture from another.

    `qkv_bias`, `o_bias`: True, False, or the configuration key that decides. `block`: the MoE block's name in a layer,
    None for dense models; `expert_width_key`: configuration key of the experts' inner size; `gate`, `up`, `down`: a
    single expert's projections in the checkpoint.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    qk_norm: bool = False
    refuse: tuple[str, ...] = ()
    block: str | None = None
    expert_width_key: str = ""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_LLAMA = Family(qkv_bias="attention_bias", o_bias="attention_bias", refuse=("mlp_bias",))
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "Qwen3MoeForCausalLM": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True,
        refuse=("mlp_only_layers",), block="mlp", expert_width_key="moe_intermediate_size",
    ),
    "MixtralForCausalLM": Family(
        block="block_sparse_moe", expert_width_key="intermediate_size", gate="w1", up="w3", down="w2",
    ),
}  # fmt: skip


class Decoder:
    """One rank's parameters. `all()` is the table."""

    def __init__(
        self, family: Family, config: Mapping[str, Any], shares: Shares, expert_names: ExpertNames = "separate"
    ) -> None:
        self._family = family
        self._config = config
        self._shares = shares
        self._stacked = expert_names == "stacked"
        self._dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if self._dtype not in ITEMSIZE:
            raise InvalidInput(f"weights of dtype {self._dtype!r} have no table.", remedy="Probe the engine's loader.")
        if config.get("quantization_config"):
            raise InvalidInput("quantized weights have no table.", remedy="Serve the policy in its own dtype.")
        for key in family.refuse:
            if config.get(key):
                raise InvalidInput(f"no table covers {key}.", remedy="Probe the engine's loader.")
        if config.get("decoder_sparse_step", 1) != 1:
            raise InvalidInput("no table covers layers of which only some have experts.", remedy="Probe the loader.")
        self._hidden = self._int("hidden_size")
        self._heads = self._int("num_attention_heads")
        self._kv_heads = int(config.get("num_key_value_heads") or self._heads)
        self._head = int(config.get("head_dim") or self._hidden // self._heads)
        self._out: ParameterLayouts = {}

    def all(self) -> ParameterLayouts:
        """Every parameter of this rank by the engine's name."""
        self._vocabulary("model.embed_tokens.weight")
        for n in range(self._int("num_hidden_layers")):
            layer = f"model.layers.{n}"
            self._attention(f"{layer}.self_attn")
            if self._family.block is not None:
                self._experts(f"{layer}.{self._family.block}")
            else:
                self._mlp(f"{layer}.mlp")
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self._whole(f"{layer}.{norm}.weight", (self._hidden,))
        self._whole("model.norm.weight", (self._hidden,))
        if not self._config.get("tie_word_embeddings", False):
            self._vocabulary("lm_head.weight")
        return self._out

    # --- the parts of a layer ------------------------------------------------------------------------------------

    def _attention(self, at: str) -> None:
        s, d = self._shares, self._head
        q, kv = s.split(self._heads, "attention heads"), s.kv_heads(self._kv_heads)
        heads = {"q_proj": (self._heads, q), "k_proj": (self._kv_heads, kv), "v_proj": (self._kv_heads, kv)}
        parts = {f"{at}.{n}": (total * d, (lo * d, hi * d)) for n, (total, (lo, hi)) in heads.items()}
        self._stacked_rows(f"{at}.qkv_proj.weight", parts, ".weight", (self._hidden,))
        if self._flag(self._family.qkv_bias):
            self._stacked_rows(f"{at}.qkv_proj.bias", parts, ".bias", ())
        self._columns(f"{at}.o_proj.weight", self._hidden, self._heads * d, (q[0] * d, q[1] * d))
        if self._flag(self._family.o_bias):
            self._whole(f"{at}.o_proj.bias", (self._hidden,))
        if self._family.qk_norm:
            self._whole(f"{at}.q_norm.weight", (d,))
            self._whole(f"{at}.k_norm.weight", (d,))

    def _mlp(self, at: str) -> None:
        width = self._int("intermediate_size")
        mine = self._shares.split(width, "columns of the MLP")
        parts = {f"{at}.gate_proj": (width, mine), f"{at}.up_proj": (width, mine)}
        self._stacked_rows(f"{at}.gate_up_proj.weight", parts, ".weight", (self._hidden,))
        self._columns(f"{at}.down_proj.weight", self._hidden, width, mine)

    def _experts(self, at: str) -> None:
        f, hidden = self._family, self._hidden
        count, width = self._int(*_EXPERT_COUNTS), self._int(f.expert_width_key)
        self._whole(f"{at}.gate.weight", (count, hidden))
        first, stop = self._shares.experts(count)
        lo, hi = self._shares.expert_split(width, "columns of an expert")
        size = hi - lo
        w13 = Local(f"{at}.experts.w13_weight", (stop - first, 2 * size, hidden))
        w2 = Local(f"{at}.experts.w2_weight", (stop - first, hidden, size))
        if self._stacked:
            both = self._meta(f"{at}.experts.gate_up_proj", (count, 2 * width, hidden))
            w13.put(both, ((first, stop), (lo, hi), (0, hidden)), (0, 0, 0))
            w13.put(both, ((first, stop), (width + lo, width + hi), (0, hidden)), (0, size, 0))
            down = self._meta(f"{at}.experts.down_proj", (count, hidden, width))
            w2.put(down, ((first, stop), (0, hidden), (lo, hi)), (0, 0, 0))
        else:
            for e in range(first, stop):
                one = f"{at}.experts.{e}"
                for row, name in ((0, f.gate), (size, f.up)):
                    meta = self._meta(f"{one}.{name}.weight", (width, hidden))
                    w13.put(meta, ((lo, hi), (0, hidden)), (e - first, row, 0))
                meta = self._meta(f"{one}.{f.down}.weight", (hidden, width))
                w2.put(meta, ((0, hidden), (lo, hi)), (e - first, 0, 0))
        self._add(w13)
        self._add(w2)

    # --- kinds of parameters -------------------------------------------------------------------------------------

    def _whole(self, name: str, shape: tuple[int, ...]) -> None:
        """Every rank has all of it."""
        local = Local(name, shape)
        local.put(self._meta(name, shape), tuple((0, n) for n in shape), tuple(0 for _ in shape))
        self._add(local)

    def _columns(self, name: str, rows: int, columns: int, mine: Range) -> None:
        """A matrix of which each rank has some columns."""
        local = Local(name, (rows, mine[1] - mine[0]))
        local.put(self._meta(name, (rows, columns)), ((0, rows), mine), (0, 0))
        self._add(local)

    def _stacked_rows(
        self, name: str, parts: Mapping[str, tuple[int, Range]], suffix: str, rest: tuple[int, ...]
    ) -> None:
        """Some rows of several canonical tensors, one below the other. `parts`: name → (its rows, those here)."""
        local = Local(name, (sum(hi - lo for _, (lo, hi) in parts.values()), *rest))
        row = 0
        for part, (rows, (lo, hi)) in parts.items():
            whole = tuple((0, n) for n in rest)
            local.put(self._meta(part + suffix, (rows, *rest)), ((lo, hi), *whole), (row, *(0 for _ in rest)))
            row += hi - lo
        self._add(local)

    def _vocabulary(self, name: str) -> None:
        size = self._int("vocab_size")
        mine, rows = self._shares.vocabulary(size)
        local = Local(name, (rows, self._hidden))
        local.put(self._meta(name, (size, self._hidden)), (mine, (0, self._hidden)), (0, 0))
        self._add(local)

    def _add(self, local: Local) -> None:
        self._out[local.name] = local.done()

    def _meta(self, name: str, shape: tuple[int, ...]) -> TensorMeta:
        return TensorMeta(name=name, shape=shape, dtype=self._dtype)  # type: ignore[arg-type]

    def _flag(self, which: bool | str) -> bool:
        return bool(self._config.get(which, False)) if isinstance(which, str) else which

    def _int(self, key: str, *others: str) -> int:
        """The value of `key`, or of the first of `others` that the configuration has instead."""
        value = next((self._config[k] for k in (key, *others) if k in self._config), None)
        if type(value) is not int or value < 1:
            raise InvalidInput(f"the model's configuration has no usable {key!r}.", remedy="Probe the engine's loader.")
        return value
