"""What each rank of a Megatron-Core job holds, written down densely: whole tensors, concatenated, split, transposed.

It uses nothing of the tables it is compared with; only numpy, a model's configuration and a rank's coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Experts = Literal["sequential", "grouped", "legacy"]


class Tagged:
    """Canonical tensors made on demand; every element has a number of its own, from 1 on (0 is padding)."""

    def __init__(self) -> None:
        self.arrays: dict[str, I64] = {}
        self._next = 1

    def __call__(self, name: str, *shape: int) -> I64:
        if name not in self.arrays:
            n = int(np.prod(shape))
            self.arrays[name] = np.arange(self._next, self._next + n).reshape(shape)
            self._next += n
        return self.arrays[name]


@dataclass(frozen=True)
class Coordinates:
    """A rank: (rank, size) in each group, the layers of its model chunk, and whether it has both ends of the model."""

    tp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)
    layers: range = range(2)
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Form:
    """How the model was built: `te`: Transformer Engine's names, norms inside linear layers; `unit`:
    make_vocab_size_divisible_by; `fused`: queries and keys compressed by one projection."""

    te: bool = False
    experts: Experts = "sequential"
    unit: int = 8
    fused: bool = False


Held = dict[tuple[str, int | None], I64]
"""(name inside the model chunk, global layer number or None) → the rank's tensor."""


def cut(a: I64, axis: int, share: tuple[int, int]) -> I64:
    return np.split(a, share[1], axis)[share[0]]


class Dense:
    """One rank's tensors."""

    def __init__(self, config: Mapping[str, Any], tag: Tagged, at: Coordinates, form: Form) -> None:
        self.c, self.tag, self.at, self.form = config, tag, at, form
        self.family = str(config["architectures"][0]).removesuffix("ForCausalLM")
        self.hidden = int(config["hidden_size"])
        self.out: Held = {}

    def all(self) -> Held:
        tied = self.c["tie_word_embeddings"]
        if self.at.first:
            self.out["embedding.word_embeddings.weight", None] = self._vocabulary("model.embed_tokens.weight")
        for local, n in enumerate(self.at.layers):
            self._layer(n, f"decoder.layers.{local}.")
        if self.at.last:
            self.out["decoder.final_layernorm.weight", None] = self.tag("model.norm.weight", self.hidden)
            if not tied:
                self.out["output_layer.weight", None] = self._vocabulary("lm_head.weight")
            elif not self.at.first:  # a stage apart from the first has a copy
                self.out["output_layer.weight", None] = self._vocabulary("model.embed_tokens.weight")
        return self.out

    def _vocabulary(self, name: str) -> I64:
        size = self.c["vocab_size"]
        unit = self.form.unit * self.at.tp[1]
        padding = -(-size // unit) * unit - size
        return cut(np.pad(self.tag(name, size, self.hidden), ((0, padding), (0, 0))), 0, self.at.tp)

    def _layer(self, n: int, prefix: str) -> None:
        te, hf = self.form.te, f"model.layers.{n}"

        def put(items: Iterable[tuple[str, I64]]) -> None:
            self.out.update({(prefix + name, n): value for name, value in items})

        latent, moe = self.family == "DeepseekV3", self._sparse(n)
        before = "self_attention.linear_qkv.layer_norm_weight" if te and not latent else "input_layernorm.weight"
        if self.form.fused and te:
            before = "self_attention.linear_qkv_down_proj.layer_norm_weight"
        between = "mlp.linear_fc1.layer_norm_weight" if te and not moe else "pre_mlp_layernorm.weight"
        put([(before, self.tag(f"{hf}.input_layernorm.weight", self.hidden))])
        put([(between, self.tag(f"{hf}.post_attention_layernorm.weight", self.hidden))])
        put(self._latent(f"{hf}.self_attn") if latent else self._attention(f"{hf}.self_attn"))
        put(self._experts(hf) if moe else self._mlp("mlp", f"{hf}.mlp", self.c["intermediate_size"]))

    def _sparse(self, n: int) -> bool:
        if self.family == "DeepseekV3":
            return bool(n >= self.c["first_k_dense_replace"])
        if self.family == "Qwen3Moe":
            return n not in self.c.get("mlp_only_layers", []) and (n + 1) % self.c.get("decoder_sparse_step", 1) == 0
        return self.family == "Mixtral"

    # --- attention -----------------------------------------------------------------------------------------------

    def _attention(self, hf: str) -> Iterable[tuple[str, I64]]:
        heads, groups, size = self.c["num_attention_heads"], self.c["num_key_value_heads"], self.c["head_dim"]

        def interleaved(kind: str, *rest: int) -> I64:
            parts = [
                self.tag(f"{hf}.{name}.{kind}", n * size, *rest).reshape(groups, -1, *rest)
                for name, n in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups))
            ]
            return cut(np.concatenate(parts, 1).reshape(-1, *rest), 0, self.at.tp)

        yield "self_attention.linear_qkv.weight", interleaved("weight", self.hidden)
        attention_bias = self.c.get("attention_bias", False)
        if attention_bias or self.family == "Qwen2":
            yield "self_attention.linear_qkv.bias", interleaved("bias")
        yield self._output(hf, heads * size)
        if attention_bias and self.family != "Qwen2":
            yield "self_attention.linear_proj.bias", self.tag(f"{hf}.o_proj.bias", self.hidden)
        if self.family.startswith("Qwen3"):
            for which in ("q", "k"):
                yield f"self_attention.{which}_layernorm.weight", self.tag(f"{hf}.{which}_norm.weight", size)

    def _output(self, hf: str, inner: int) -> tuple[str, I64]:
        return "self_attention.linear_proj.weight", cut(
            self.tag(f"{hf}.o_proj.weight", self.hidden, inner), 1, self.at.tp
        )

    def _latent(self, hf: str) -> Iterable[tuple[str, I64]]:
        c, te, tag = self.c, self.form.te, self.tag
        heads, ranks = c["num_attention_heads"], (c["q_lora_rank"], c["kv_lora_rank"])
        queries = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])

        def down(name: str, rows: int) -> I64:  # Transformer Engine repeats it on every rank
            whole = tag(f"{hf}.{name}.weight", rows, self.hidden)
            return whole if te else cut(whole, 0, self.at.tp)

        def norm(linear: str, local: str, name: str, size: int) -> tuple[str, I64]:
            at = f"{linear}.layer_norm_weight" if te else f"{local}.weight"
            return f"self_attention.{at}", tag(f"{hf}.{name}.weight", size)

        kv_rows = ranks[1] + c["qk_rope_head_dim"]
        if ranks[0] is None:
            yield (
                "self_attention.linear_q_proj.weight",
                cut(tag(f"{hf}.q_proj.weight", queries, self.hidden), 0, self.at.tp),
            )
        else:
            yield norm("linear_q_up_proj", "q_layernorm", "q_a_layernorm", ranks[0])
            up = tag(f"{hf}.q_b_proj.weight", queries, ranks[0])
            yield "self_attention.linear_q_up_proj.weight", cut(up, 0, self.at.tp)
        if self.form.fused:
            both = [down("q_a_proj", ranks[0]), down("kv_a_proj_with_mqa", kv_rows)]
            yield "self_attention.linear_qkv_down_proj.weight", np.concatenate(both)
        else:
            if ranks[0] is not None:
                yield "self_attention.linear_q_down_proj.weight", down("q_a_proj", ranks[0])
            yield "self_attention.linear_kv_down_proj.weight", down("kv_a_proj_with_mqa", kv_rows)
        yield norm("linear_kv_up_proj", "kv_layernorm", "kv_a_layernorm", ranks[1])
        up = tag(f"{hf}.kv_b_proj.weight", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), ranks[1])
        yield "self_attention.linear_kv_up_proj.weight", cut(up, 0, self.at.tp)
        yield self._output(hf, heads * c["v_head_dim"])

    # --- MLPs ----------------------------------------------------------------------------------------------------

    def _mlp(self, at: str, hf: str, width: int) -> Iterable[tuple[str, I64]]:
        gate, up = (cut(self.tag(f"{hf}.{n}_proj.weight", width, self.hidden), 0, self.at.tp) for n in ("gate", "up"))
        yield f"{at}.linear_fc1.weight", np.concatenate([gate, up])
        yield f"{at}.linear_fc2.weight", cut(self.tag(f"{hf}.down_proj.weight", self.hidden, width), 1, self.at.tp)
        if self.c.get("mlp_bias", False):
            halves = [cut(self.tag(f"{hf}.{n}_proj.bias", width), 0, self.at.tp) for n in ("gate", "up")]
            yield f"{at}.linear_fc1.bias", np.concatenate(halves)
            yield f"{at}.linear_fc2.bias", self.tag(f"{hf}.down_proj.bias", self.hidden)

    def _experts(self, hf: str) -> Iterable[tuple[str, I64]]:
        c, mixtral = self.c, self.family == "Mixtral"
        block = f"{hf}.block_sparse_moe" if mixtral else f"{hf}.mlp"
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        count = c["n_routed_experts"] if self.family == "DeepseekV3" else c["num_local_experts"]
        width = c["intermediate_size"] if mixtral else c["moe_intermediate_size"]
        yield "mlp.router.weight", self.tag(f"{block}.gate.weight", count, self.hidden)
        if self.family == "DeepseekV3":
            yield "mlp.router.expert_bias", self.tag(f"{block}.gate.e_score_correction_bias", count)
            yield from self._mlp("mlp.shared_experts", f"{block}.shared_experts", c["n_shared_experts"] * width)
        ups, downs = [], []
        for e in np.split(np.arange(count), self.at.ep[1])[self.at.ep[0]]:
            one = f"{block}.experts.{e}"
            both = [cut(self.tag(f"{one}.{n}.weight", width, self.hidden), 0, self.at.etp) for n in (gate, up)]
            ups.append(np.concatenate(both))
            downs.append(cut(self.tag(f"{one}.{down}.weight", self.hidden, width), 1, self.at.etp))
        if self.form.experts == "legacy":  # stored [hidden, …] and used as [experts, hidden, …]
            yield "mlp.experts.weight1", np.stack([u.T for u in ups]).reshape(self.hidden, -1)
            yield "mlp.experts.weight2", np.stack([d.T for d in downs]).reshape(-1, self.hidden)
            return
        for e, (fc1, fc2) in enumerate(zip(ups, downs, strict=True)):
            for k, value in ((1, fc1), (2, fc2)):
                one = f"local_experts.{e}.linear_fc{k}.weight"
                yield f"mlp.experts.{one if self.form.experts == 'sequential' else f'linear_fc{k}.weight{e}'}", value


def held(config: Mapping[str, Any], tag: Tagged, at: Coordinates, form: Form = Form()) -> Held:
    """Every parameter (and router bias) of a rank."""
    return Dense(config, tag, at, form).all()
