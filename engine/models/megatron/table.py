"""`MegatronTable`: from the name of a Megatron-Core parameter to the canonical tensors in it.

One invariant: `placements` either accounts for every element of the local parameter (a canonical element, or padding
of the vocabulary), or refuses by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidInput
from engine.layout.placement import Placement
from engine.models.boxes import Local
from engine.models.megatron.attention import ATTENTION_RULES
from engine.models.megatron.dimensions import Dimensions
from engine.models.megatron.kinds import Rule, output, vocabulary, whole
from engine.models.megatron.mlp import MLP_RULES
from engine.models.megatron.shape import MegatronShape
from engine.models.megatron.spot import Spot

MODEL_RULES: Mapping[str, Rule] = {
    "embedding.word_embeddings.weight": lambda s: vocabulary(s, "model.embed_tokens.weight"),
    "output_layer.weight": output,
    "decoder.final_layernorm.weight": lambda s: whole(s, "model.norm.weight", s.dims.hidden),
}
LAYER_RULES: Mapping[str, Rule] = {**ATTENTION_RULES, **MLP_RULES}
"""By the name inside a layer; an expert's number stands as E."""

_LAYER = re.compile(r"decoder\.layers\.\d+\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(\..+)?")


class MegatronTable:
    """One rank's table. `hf_config`: the model's `config.json` as a mapping.

    `dtypes`: canonical name → dtype for tensors that rollouts store otherwise than the configuration's dtype says
    (a router's correction bias is FP32 unless it is named here). InvalidInput if there is no table for the model.
    """

    def __init__(
        self, hf_config: Mapping[str, Any], shape: MegatronShape, *, dtypes: Mapping[str, str] | None = None
    ) -> None:
        self._dims = Dimensions.of(hf_config)
        self._shape = shape
        self._dtypes = dict(dtypes or {})

    def placements(self, name: str, local_shape: Sequence[int], *, layer: int | None = None) -> list[Placement]:
        """The canonical tensors of which parts lie in a parameter (or buffer), which is contiguous with `local_shape`.

        `name`: as the model chunk has it, without wrappers' prefixes. `layer`: the global number, 0-based, for names
        under `decoder.layers.`, whose own number counts from the chunk's first layer. Padding of the vocabulary
        belongs to no placement, so that a rank may hold none of it. With tied embeddings `output_layer.weight` is
        `model.embed_tokens.weight`, too. InvalidInput for a name without a rule, LayoutError if sizes do not fit.
        """
        rule, number, expert = self._rule(name, layer)
        spot = Spot(Local(name, tuple(local_shape)), self._dims, self._shape, self._dtypes, number, expert)
        return spot.done(padded=rule(spot))

    def _rule(self, name: str, layer: int | None) -> tuple[Rule, int, int]:
        """(rule, global layer number or −1, number in an expert's name or −1)."""
        if name in MODEL_RULES:
            return MODEL_RULES[name], -1, -1
        inside = _LAYER.fullmatch(name)
        if inside is None:
            raise _unknown(name)
        key, expert = inside[1], -1
        if numbered := _EXPERT.fullmatch(key):
            key, expert = f"{numbered[1]}E{numbered[3] or ''}", int(numbered[2])
        rule = LAYER_RULES.get(key)
        if rule is None:
            raise _unknown(name)
        if layer is None or not 0 <= layer < self._dims.layers:
            raise InvalidInput(
                f"{name!r}: {layer} is not the global number of one of {self._dims.layers} layers.",
                remedy="Pass layer=module.layer_number - 1 of the transformer layer that holds the parameter.",
            )
        return rule, layer, expert


def _unknown(name: str) -> InvalidInput:
    if name.startswith("mtp."):
        return InvalidInput(
            f"{name!r}: layers of multi-token prediction are not supported.", remedy="Train with mtp_num_layers=None."
        )
    if name.startswith("module."):
        return InvalidInput(f"{name!r} is a wrapper's name.", remedy="Strip every leading 'module.'.")
    if name.endswith(("linear_fc1.weight", "linear_fc2.weight")) and ".experts." in name:
        return InvalidInput(
            f"{name!r}: experts in a single grouped tensor are not supported.",
            remedy="Train with moe_single_grouped_weight=False.",
        )
    return InvalidInput(
        f"there is no rule for the Megatron-Core parameter {name!r}.",
        remedy="Describe its layout yourself, or declare it frozen if rollouts do not need it.",
    )
