"""Megatron-Core's precision-aware optimizer where Transformer Engine is not: its FusedAdam is emulated.

Everything around it (which shards it steps, where gradients are, who writes the model) is Megatron-Core's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as mcore
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from tests.support.fused_adam import FusedAdam
from tests.support.megatron.job import Job


def make(job: Job, config: OptimizerConfig, chunks: list[Any]) -> Any:
    """What `get_megatron_optimizer` makes of the job."""
    if not job.optimizer.startswith("aware"):
        return get_megatron_optimizer(config, chunks)
    split = job.optimizer == "aware-split"
    # Set behind the configuration's back: it would look for Transformer Engine.
    config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    config.store_param_remainders = split
    config.exp_avg_dtype, config.exp_avg_sq_dtype = torch.bfloat16, torch.float16

    def fused(*, exp_avg_dtype: torch.dtype, exp_avg_sq_dtype: torch.dtype, **options: Any) -> FusedAdam:
        return FusedAdam(moments=(exp_avg_dtype, exp_avg_sq_dtype), **options | {"store_param_remainders": split})

    with _patched(fused):
        return get_megatron_optimizer(config, chunks)


@contextmanager
def _patched(adam: Any) -> Iterator[None]:
    with mock.patch.object(mcore, "Adam", adam), mock.patch.object(mcore, "USING_PYTORCH_OPTIMIZER", new=False):
        yield
