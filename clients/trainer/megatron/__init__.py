"""Megatron-Core trainers: every rank publishes the optimizer shard it owns, under Hugging Face names.

from clients.trainer.megatron import MegatronSource

source = MegatronSource(model_chunks, optimizer, hf_config, run="my-run")
source.register()
...
optimizer.step()
source.sync(step)
"""

from __future__ import annotations

from clients.trainer.megatron.source import MegatronSource

__all__ = ["MegatronSource"]
