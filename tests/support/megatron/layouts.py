"""A scenario that holds every real parameter of a job against its tables and the dense reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from engine.layout.mapping import map_partial
from engine.layout.placement import Placement
from engine.models.megatron import MegatronShape, MegatronTable, check_transformer_config
from tests.support.megatron.gather import ROUTER_BIAS, gather_hf
from tests.support.megatron.train import Trainer
from tests.support.megatron.worker import Context


def held(trainer: Trainer, context: Context) -> dict[str, Any]:
    """One step, then `wrong`: names of tensors whose elements lie elsewhere than the tables say; `placements`: of each
    tensor here, as JSON; and `hf_config`. Padding is not compared."""
    trainer.step()
    full = gather_hf(trainer, dtype=None)
    if full is not None:
        save_file(full, context.folder / "full.safetensors")
    dist.barrier()
    full = load_file(context.folder / "full.safetensors")
    at, job = trainer.coordinates, trainer.job
    check_transformer_config(trainer.config)
    shape = MegatronShape(at.tp, job.tp, at.ep, job.ep, at.etp, trainer.config.expert_tensor_parallel_size)
    table = MegatronTable(trainer.hf_config, shape)
    wrong, found = [], []
    for wrapped in trainer.model_chunks:
        model: Any = wrapped
        while hasattr(model, "module"):
            model = model.module
        biases = [(n, b) for n, b in model.named_buffers() if n.endswith(ROUTER_BIAS) and b is not None]
        for name, tensor in [*model.named_parameters(), *biases]:
            inside = name.split(".")
            layer = model.decoder.layers[int(inside[2])].layer_number - 1 if inside[1] == "layers" else None
            placements = table.placements(name, tuple(tensor.shape), layer=layer)
            found.append([p.to_json() for p in placements])
            if not all(_same(tensor, p, full[p.tensor.name]) for p in placements):
                wrong.append(name)
    return {"wrong": wrong, "placements": found, "hf_config": trainer.hf_config}


def _same(local: torch.Tensor, placement: Placement, canonical: torch.Tensor) -> bool:
    at = map_partial(placement.layout, np.arange(local.numel()))
    here = local.detach().reshape(-1)[at >= 0]
    return tuple(placement.tensor.shape) == tuple(canonical.shape) and torch.equal(
        here.float(), canonical.reshape(-1)[at[at >= 0]].float()
    )
