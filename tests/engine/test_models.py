"""Rule tables against brute force: every local element is where numpy slicing of tagged tensors says, on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.errors import InvalidInput, LayoutError
from engine.layout.mapping import map_partial
from engine.models import ParameterLayouts, Shares, has_table, layouts_for

HIDDEN, HEADS, HEAD, WIDTH, VOCAB, LAYERS = 12, 8, 6, 16, 300, 2
EXPERTS, EXPERT_WIDTH = 8, 8
Arrays = dict[str, np.ndarray]


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 4,
        "head_dim": HEAD,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "moe_intermediate_size": EXPERT_WIDTH,
    } | more


class Tagged:
    """Canonical tensors made on demand; every element has a number of its own, from 1 on."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}
        self._next = 1

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        n = int(np.prod(shape))
        self.arrays[name] = np.arange(self._next, self._next + n).reshape(shape)
        self._next += n
        return self.arrays[name]


def piece(a: np.ndarray, axis: int, rank: int, size: int) -> np.ndarray:
    return np.split(a, size, axis)[rank]


def by_slicing(c: dict[str, Any], tag: Tagged, tp_rank: int, tp: int, ep_rank: int, ep: int, stacked: bool) -> Arrays:
    """What a rank of the engine holds, written down a second time with numpy; 0 is padding."""
    arch, kv = c["architectures"][0], c["num_key_value_heads"]
    qkv_bias = arch == "Qwen2ForCausalLM" or c.get("attention_bias", False)
    o_bias = arch != "Qwen2ForCausalLM" and c.get("attention_bias", False)
    moe = {"Qwen3MoeForCausalLM": "mlp", "MixtralForCausalLM": "block_sparse_moe"}.get(arch)
    width = WIDTH if arch == "MixtralForCausalLM" else EXPERT_WIDTH
    gate, up, down = ("w1", "w3", "w2") if arch == "MixtralForCausalLM" else ("gate_proj", "up_proj", "down_proj")
    etp = tp // ep
    out: Arrays = {}

    def vocabulary(name: str) -> np.ndarray:
        unit = 64 if (-(-VOCAB // 64) * 64) % tp == 0 else 64 * tp
        rows = -(-VOCAB // unit) * unit
        return piece(np.pad(tag(name, VOCAB, HIDDEN), ((0, rows - VOCAB), (0, 0))), 0, tp_rank, tp)

    def kv_part(name: str, *rest: int) -> np.ndarray:
        whole = tag(name, kv * HEAD, *rest)
        if tp > kv:
            whole = np.repeat(whole.reshape(kv, HEAD, *rest), tp // kv, 0).reshape(-1, *rest)
        return piece(whole, 0, tp_rank, tp)

    def qkv(at: str, kind: str, *rest: int) -> np.ndarray:
        q = piece(tag(f"{at}.q_proj.{kind}", HEADS * HEAD, *rest), 0, tp_rank, tp)
        return np.concatenate([q, kv_part(f"{at}.k_proj.{kind}", *rest), kv_part(f"{at}.v_proj.{kind}", *rest)])

    out["model.embed_tokens.weight"] = vocabulary("model.embed_tokens.weight")
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        at = f"{layer}.self_attn"
        out[f"{at}.qkv_proj.weight"] = qkv(at, "weight", HIDDEN)
        if qkv_bias:
            out[f"{at}.qkv_proj.bias"] = qkv(at, "bias")
        out[f"{at}.o_proj.weight"] = piece(tag(f"{at}.o_proj.weight", HIDDEN, HEADS * HEAD), 1, tp_rank, tp)
        if o_bias:
            out[f"{at}.o_proj.bias"] = tag(f"{at}.o_proj.bias", HIDDEN)
        if arch.startswith("Qwen3"):
            for norm in ("q_norm", "k_norm"):
                out[f"{at}.{norm}.weight"] = tag(f"{at}.{norm}.weight", HEAD)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}.{norm}.weight"] = tag(f"{layer}.{norm}.weight", HIDDEN)
        if moe:
            at = f"{layer}.{moe}"
            out[f"{at}.gate.weight"] = tag(f"{at}.gate.weight", EXPERTS, HIDDEN)
            if stacked:
                both = tag(f"{at}.experts.gate_up_proj", EXPERTS, 2 * width, HIDDEN)
                gates, ups = both[:, :width], both[:, width:]
                downs = tag(f"{at}.experts.down_proj", EXPERTS, HIDDEN, width)
            else:
                one = [f"{at}.experts.{e}" for e in range(EXPERTS)]
                gates = np.stack([tag(f"{e}.{gate}.weight", width, HIDDEN) for e in one])
                ups = np.stack([tag(f"{e}.{up}.weight", width, HIDDEN) for e in one])
                downs = np.stack([tag(f"{e}.{down}.weight", HIDDEN, width) for e in one])
            gates, ups, downs = (piece(a, 0, ep_rank, ep) for a in (gates, ups, downs))
            halves = [piece(a, 1, tp_rank % etp, etp) for a in (gates, ups)]
            out[f"{at}.experts.w13_weight"] = np.concatenate(halves, 1)
            out[f"{at}.experts.w2_weight"] = piece(downs, 2, tp_rank % etp, etp)
        else:
            at = f"{layer}.mlp"
            halves = [piece(tag(f"{at}.{p}.weight", WIDTH, HIDDEN), 0, tp_rank, tp) for p in ("gate_proj", "up_proj")]
            out[f"{at}.gate_up_proj.weight"] = np.concatenate(halves)
            out[f"{at}.down_proj.weight"] = piece(tag(f"{at}.down_proj.weight", HIDDEN, WIDTH), 1, tp_rank, tp)
    out["model.norm.weight"] = tag("model.norm.weight", HIDDEN)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = vocabulary("lm_head.weight")
    return out


def materialised(table: ParameterLayouts, arrays: Arrays) -> Arrays:
    """Every parameter filled through its placements, flat."""
    out: Arrays = {}
    for name, placements in table.items():
        (numel,) = {p.layout.src_numel for p in placements} or {0}
        local = np.zeros(numel, np.int64)
        for p in placements:
            canonical = arrays[p.tensor.name]
            assert tuple(p.tensor.shape) == canonical.shape
            assert p.layout.dst_numel == canonical.size
            at = map_partial(p.layout, np.arange(numel))
            assert not local[at >= 0].any(), "two placements share a local element"
            local[at >= 0] = canonical.reshape(-1)[at[at >= 0]]
        out[name] = local
    return out


MODELS = [
    config("LlamaForCausalLM"),
    config("LlamaForCausalLM", attention_bias=True, tie_word_embeddings=True),
    config("MistralForCausalLM", num_key_value_heads=2),
    config("Qwen2ForCausalLM", num_key_value_heads=8),
    config("Qwen3ForCausalLM", num_key_value_heads=1),
    config("Qwen3MoeForCausalLM", num_key_value_heads=2, decoder_sparse_step=1),
    config("Qwen3MoeForCausalLM"),
    config("MixtralForCausalLM"),
]
SHAPES = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (4, 4), (8, 2)]


@pytest.mark.parametrize(("tp", "ep"), SHAPES)
@pytest.mark.parametrize("c", MODELS, ids=lambda c: c["architectures"][0][:9] + str(c["num_key_value_heads"]))
@pytest.mark.parametrize("names", ["separate", "stacked"])
def test_every_rank_holds_what_slicing_says(c: dict[str, Any], tp: int, ep: int, names: Any) -> None:
    held: dict[str, set[int]] = {}
    for rank in range(tp):
        tag = Tagged()
        expected = by_slicing(c, tag, rank, tp, rank // (tp // ep), ep, names == "stacked")
        table = layouts_for(c, rank, tp, rank // (tp // ep), ep, expert_names=names)
        found = materialised(table, tag.arrays)
        assert found.keys() == expected.keys()
        for name, local in expected.items():
            assert np.array_equal(found[name], local.reshape(-1)), name
            held.setdefault("", set()).update(local.reshape(-1).tolist())
    every = {int(v) for a in tag.arrays.values() for v in (a.min(), a.max())}
    assert every <= held[""]
    assert len(held[""] - {0}) == sum(a.size for a in tag.arrays.values()), "some element lives on no rank"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_placements_are_few(tp: int) -> None:
    for c in MODELS:
        for name, placements in layouts_for(c, 0, tp).items():
            blocks = sum(len(p.layout.blocks) for p in placements)
            assert blocks <= 2 * EXPERTS if "experts" in name else blocks <= 3, name


def test_a_padded_rank_may_hold_no_vocabulary_at_all() -> None:
    table = layouts_for(config("LlamaForCausalLM", vocab_size=50), 7, 8)
    assert table["lm_head.weight"] == []


def test_vocabularies_are_padded_to_what_divides_by_the_ranks() -> None:
    assert [Shares(r, 2).vocabulary(300) for r in range(2)] == [((0, 160), 160), ((160, 300), 160)]
    assert [Shares(r, 3).vocabulary(300) for r in range(3)] == [((0, 128), 128), ((128, 256), 128), ((256, 300), 128)]
    assert Shares().vocabulary(300) == ((0, 300), 320)


def test_the_dtype_is_the_configurations() -> None:
    table = layouts_for(config("LlamaForCausalLM", dtype=None, torch_dtype="float16"))
    assert {p.tensor.dtype for ps in table.values() for p in ps} == {"float16"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["SomethingElse"]}, "SomethingElse"),
        ({"architectures": None}, "without architecture"),
        ({"hidden_size": None}, "hidden_size"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"dtype": "float4"}, "float4"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2}, "only some"),
    ],
)
def test_what_has_no_table_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        layouts_for(config("LlamaForCausalLM") | change)
    assert has_table(config("LlamaForCausalLM"))
    assert not has_table({"architectures": ["SomethingElse"]})


@pytest.mark.parametrize(
    ("change", "tp"),
    [({"num_attention_heads": 6}, 4), ({"intermediate_size": 18}, 4), ({"num_key_value_heads": 3}, 4)],
)
def test_sizes_that_do_not_divide_are_refused(change: dict[str, Any], tp: int) -> None:
    with pytest.raises(LayoutError, match="ranks"):
        layouts_for(config("LlamaForCausalLM") | change, 0, tp)


@pytest.mark.parametrize("shares", [(2, 2, 0, 1), (0, 4, 0, 3), (1, 4, 1, 2), (0, 2, 2, 2)])
def test_ranks_outside_their_groups_are_refused(shares: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidInput):
        Shares(*shares)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_the_number_of_experts_has_two_names(architecture: str, key: str) -> None:
    known = layouts_for(config(architecture), 0, 1)
    found = config(architecture)
    for name in {"num_experts", "num_local_experts"} - {key}:
        del found[name]
    assert layouts_for(found, 0, 1) == known
    del found[key]
    with pytest.raises(InvalidInput, match="num_experts"):
        layouts_for(found, 0, 1)
