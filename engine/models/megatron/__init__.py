"""Rule tables: from the parameters of a Megatron-Core rank to the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from engine.models.megatron.check import check_transformer_config
from engine.models.megatron.checkpoint import canonical_tensors
from engine.models.megatron.runs import Run, restrict
from engine.models.megatron.shape import MegatronShape
from engine.models.megatron.table import MegatronTable

__all__ = ["MegatronShape", "MegatronTable", "Run", "canonical_tensors", "check_transformer_config", "restrict"]
