"""`FsdpSource`: a model that torch's FSDP2 (`fully_shard`) shards over many ranks. Each rank publishes its own shards.

One invariant: of the ranks that hold the same part of a tensor exactly one declares it, and all ranks know which from one
exchange at registration. Nothing is gathered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Unpack

import torch
from torch.distributed.tensor import DTensor

from clients.trainer.checks import persistent_buffers
from clients.trainer.formulas import begin_state
from clients.trainer.group import exchange, rank_and_world
from clients.trainer.options import SourceOptions
from clients.trainer.owners import spread
from clients.trainer.plan import Planner
from clients.trainer.sharded import Region, Sharded, region_of
from clients.trainer.source import Source

log = logging.getLogger(__name__)


class _Held(NamedTuple):
    """A tensor of the model under its first published name, with the part of it that this rank holds."""

    name: str
    tensor: torch.Tensor
    region: Region
    buffer: bool = False


class FsdpSource(Source):
    """One rank of an FSDP2 job: shards of DTensors, whole parameters that FSDP ignores, and buffers.

    All ranks of the job make one each, with the same `run`, and call `register`, `sync` and `close` together.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        run: str,
        **options: Unpack[SourceOptions],
    ) -> None:
        """Describe what to publish; nothing is touched before `register`.

        `model`: after `fully_shard`, or several (the stages of a pipeline on this rank, with names of the whole model).
        Its parameters and persistent buffers are published under their names, without what `torch.compile` and
        activation checkpointing put into those. `optimizer`: made from the sharded parameters. Options:
        `SourceOptions`.
        """
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        super().__init__(optimizers, models, run=run, **options)

    def _declare(self, planner: Planner) -> None:
        me = rank_and_world(self._group)[0]
        (sharded, held), said = exchange(
            lambda: (Sharded(self._models), [h for model in self._models for h in _held(model, planner)]),
            lambda found: [(h.region.key(h.name), me, h.region.numel) for h in found[1] if h.region.numel],
            self._group,
        )
        owners = spread(said)
        for h in held:
            key = h.region.key(h.name)
            taken = bool(h.region.numel) and owners.first[key] != me
            cell = key if key in owners.shared and self._replica_digests else None
            holders = me if taken else None
            if not h.region.numel or (taken and cell is None):
                planner.add_elsewhere(h.name, h.tensor)
            elif h.buffer:
                planner.add_buffer(h.name, h.tensor, cell=cell, holders=holders)
            elif isinstance(h.tensor, DTensor):
                planner.add_shard(sharded.owned(h.name, h.tensor, h.region, cell, holders))
            else:
                planner.add_parameter(h.name, h.tensor, cell=cell, holders=holders)
        self._begin_state(planner)
        mine = sum(not s.replica for s in planner.plan.shards)
        log.info("run %s: rank %d publishes %d of %d tensors", self.run, me, mine, len(held))

    def _begin_state(self, planner: Planner) -> None:
        """Give every trained parameter its optimizer state, also those that other ranks publish.

        Some states are created at registration. `torch.distributed.checkpoint.state_dict` takes an optimizer that has
        some for one that has all.
        """
        for number in sorted({key.optimizer for key in planner.plan.groups}):
            optimizer = self._optimizers[number]
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.requires_grad:
                        begin_state(optimizer, group, param)


def _held(model: torch.nn.Module, planner: Planner) -> Iterable[_Held]:
    """Every parameter once, under the first of its names that is published, and every persistent buffer."""
    owners: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        canonical = planner.canonical(name)
        if id(param) in owners:
            planner.add_alias(name, owners[id(param)])
        elif canonical is None:
            log.info("parameter %s is not published (renamed to None)", name)
        else:
            owners[id(param)] = canonical
            yield _Held(name, param, region_of(name, param))
    for name, buffer in persistent_buffers(model):
        yield _Held(name, buffer, region_of(name, buffer), buffer=True)
