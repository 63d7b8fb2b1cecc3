"""Rules of MLPs and experts: gate above up on every rank, experts numbered from the rank's first.

One invariant: a layer has either a plain MLP or experts, as the configuration says; the other's names are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import LayoutError
from engine.models.boxes import Range
from engine.models.megatron.kinds import Rule, no_bias, norm, whole
from engine.models.megatron.spot import CHECK_SIZES, Spot

_LAYERS = "Train with moe_layer_freq as the model has it."


def _dense(s: Spot) -> None:
    if s.layer not in s.dims.dense:
        raise s.refuse(f"layer {s.layer} of the model has experts.", _LAYERS)


def _sparse(s: Spot) -> None:
    if s.layer in s.dims.dense:
        raise s.refuse(f"layer {s.layer} of the model has no experts.", _LAYERS)


def _gate_up(s: Spot, names: tuple[str, str], width: int, rest: tuple[int, ...], by: tuple[int, int]) -> int:
    """A rank's rows of the gate above its rows of the up projection."""
    lo, hi = s.split(width, "rows of gate and up projection", by)
    s.expect(2 * (hi - lo), *rest)
    for name, row in zip(names, (0, hi - lo), strict=True):
        s.rows(s.meta(name, width, *rest), (lo, hi), row)
    return 0


def _down_columns(s: Spot, name: str, width: int, by: tuple[int, int]) -> int:
    lo, hi = s.split(width, "columns of the down projection", by)
    s.expect(s.dims.hidden, hi - lo)
    s.columns(s.meta(name, s.dims.hidden, width), (lo, hi))
    return 0


def _mlp_up(kind: str) -> Rule:
    def rule(s: Spot) -> int:
        _dense(s)
        if kind == "bias" and not s.dims.mlp_bias:
            raise no_bias(s, "add_bias_linear")
        names = (f"{s.at}.mlp.gate_proj.{kind}", f"{s.at}.mlp.up_proj.{kind}")
        return _gate_up(s, names, s.dims.width, (s.dims.hidden,) if kind == "weight" else (), s.shape.share)

    return rule


def _mlp_down(s: Spot) -> int:
    _dense(s)
    return _down_columns(s, f"{s.at}.mlp.down_proj.weight", s.dims.width, s.shape.share)


def _mlp_down_bias(s: Spot) -> int:
    _dense(s)
    if not s.dims.mlp_bias:
        raise no_bias(s, "add_bias_linear")
    return whole(s, f"{s.at}.mlp.down_proj.bias", s.dims.hidden)


def _shared(s: Spot) -> str:
    _sparse(s)
    if not s.dims.shared:
        raise s.refuse("the model has no shared experts.", "Train with its moe_shared_expert_intermediate_size.")
    return f"{s.moe}.shared_experts"


def _shared_up(s: Spot) -> int:
    at = _shared(s)
    names = (f"{at}.gate_proj.weight", f"{at}.up_proj.weight")
    return _gate_up(s, names, s.dims.shared, (s.dims.hidden,), s.shape.share)


def _shared_down(s: Spot) -> int:
    return _down_columns(s, f"{_shared(s)}.down_proj.weight", s.dims.shared, s.shape.share)


def _router(s: Spot) -> int:
    _sparse(s)
    return whole(s, f"{s.moe}.gate.weight", s.dims.experts, s.dims.hidden)


def _router_bias(s: Spot) -> int:
    """A buffer, which the trainer keeps in FP32 whatever the dtype of the weights."""
    _sparse(s)
    if not s.dims.expert_bias:
        raise s.refuse("the checkpoint has no such bias.", "Train with moe_router_enable_expert_bias=False.")
    return whole(s, f"{s.moe}.gate.e_score_correction_bias", s.dims.experts, dtype="float32")


def _experts(s: Spot) -> Range:
    """The experts that live on this rank, by their number in the checkpoint."""
    _sparse(s)
    return s.split(s.dims.experts, "experts", (s.shape.ep_rank, s.shape.ep_size))


def _one_expert(s: Spot) -> str:
    first, stop = _experts(s)
    if not 0 <= s.expert < stop - first:
        raise LayoutError(
            f"{s.local.name!r}: a rank with {stop - first} experts has none with number {s.expert}.",
            remedy=CHECK_SIZES,
        )
    return f"{s.moe}.experts.{first + s.expert}"


def _expert_up(s: Spot) -> int:
    one, f = _one_expert(s), s.dims.family
    names = (f"{one}.{f.gate}.weight", f"{one}.{f.up}.weight")
    return _gate_up(s, names, s.dims.expert_width, (s.dims.hidden,), s.shape.expert_share)


def _expert_down(s: Spot) -> int:
    name = f"{_one_expert(s)}.{s.dims.family.down}.weight"
    return _down_columns(s, name, s.dims.expert_width, s.shape.expert_share)


def _turned_up(s: Spot) -> int:
    """All experts of the rank in one parameter: expert after expert, each [hidden, gate columns | up columns]."""
    (first, stop), d = _experts(s), s.dims
    lo, hi = s.split(d.expert_width, "columns of an expert", s.shape.expert_share)
    size = hi - lo
    s.expect(d.hidden, (stop - first) * 2 * size)
    for e in range(first, stop):
        for half, name in enumerate((d.family.gate, d.family.up)):
            meta = s.meta(f"{s.moe}.experts.{e}.{name}.weight", d.expert_width, d.hidden)
            at = (e - first) * d.hidden * 2 * size + half * size
            s.block(meta, (d.hidden, size), at, (2 * size, 1), lo * d.hidden, (1, d.hidden))
    return 0


def _turned_down(s: Spot) -> int:
    """All experts of the rank in one parameter: expert after expert, each [inner, hidden]."""
    (first, stop), d = _experts(s), s.dims
    lo, hi = s.split(d.expert_width, "rows of an expert", s.shape.expert_share)
    size = hi - lo
    s.expect((stop - first) * size, d.hidden)
    for e in range(first, stop):
        meta = s.meta(f"{s.moe}.experts.{e}.{d.family.down}.weight", d.hidden, d.expert_width)
        s.block(meta, (size, d.hidden), (e - first) * size * d.hidden, (d.hidden, 1), lo, (1, d.expert_width))
    return 0


# --- the list --------------------------------------------------------------------------------------------------------

_BEFORE = norm("post_attention_layernorm")

MLP_RULES: Mapping[str, Rule] = {
    "pre_mlp_layernorm.weight": _BEFORE,
    "mlp.linear_fc1.layer_norm_weight": _BEFORE,
    "mlp.linear_fc1.weight": _mlp_up("weight"),
    "mlp.linear_fc1.bias": _mlp_up("bias"),
    "mlp.linear_fc2.weight": _mlp_down,
    "mlp.linear_fc2.bias": _mlp_down_bias,
    "mlp.router.weight": _router,
    "mlp.router.expert_bias": _router_bias,
    "mlp.shared_experts.linear_fc1.weight": _shared_up,
    "mlp.shared_experts.linear_fc2.weight": _shared_down,
    "mlp.experts.local_experts.E.linear_fc1.weight": _expert_up,
    "mlp.experts.local_experts.E.linear_fc2.weight": _expert_down,
    "mlp.experts.linear_fc1.weightE": _expert_up,
    "mlp.experts.linear_fc2.weightE": _expert_down,
    "mlp.experts.weight1": _turned_up,
    "mlp.experts.weight2": _turned_down,
}
"""An expert's number stands as E."""
