"""Rule tables: from a model's configuration to what each of its serving parameters holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidInput
from engine.models.decoder import FAMILIES, Decoder, ExpertNames, ParameterLayouts
from engine.models.parallel import Shares

__all__ = ["ParameterLayouts", "Shares", "has_table", "layouts_for"]


def has_table(config: Mapping[str, Any]) -> bool:
    """True when `layouts_for` knows the architecture."""
    return _architecture(config) in FAMILIES


def layouts_for(
    config: Mapping[str, Any],
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    *,
    expert_names: ExpertNames = "separate",
) -> ParameterLayouts:
    """Parameter name in SGLang → placements: which canonical elements its local elements are.

    `config`: the model's `config.json`. `expert_names`: whether the trainer publishes each expert's projections under
    checkpoint names, or all experts of a layer stacked, as transformers holds them. Padding belongs to no placement.
    InvalidInput if there is no table (then probe), LayoutError if the sizes do not divide by the ranks.
    """
    family = FAMILIES.get(_architecture(config))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise InvalidInput(
            f"there is no layout table for {_architecture(config) or 'a model without architecture'}.",
            remedy=f"Probe the engine's loader; tables exist for {known}.",
        )
    return Decoder(family, config, Shares(tp_rank, tp_size, ep_rank, ep_size), expert_names).all()


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [""]
    return str(names[0])
