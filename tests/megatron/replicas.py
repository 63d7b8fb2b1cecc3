"""What each rank does in the tests of replicas: one of them goes astray by one bit of one weight, and comes back."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from clients.protocol import JobState
from clients.trainer.megatron import MegatronSource
from clients.trainer.megatron.state import masters
from tests.megatron.scenarios import TIMEOUT_S, source_of
from tests.support.megatron.train import Trainer
from tests.support.megatron.worker import Context


def astray(trainer: Trainer, context: Context) -> list[tuple[str, int]]:
    """Three steps, each synced. Before the second sync the last rank flips a bit of the first weight that it holds as
    a replica, and before the third it has what it had. Returns what this rank declared as replicas, and their holders.

    Argument `digests`: whether replicas are declared at all.
    """
    with source_of(trainer, context, replica_digests=context.args["digests"]) as source:
        replicas = [s for s in source._registered().plan.shards if s.replica]
        for number in (1, 2, 3):
            trainer.step()
            trainer.sync_params()
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []
            if number == 2 and dist.get_rank() == dist.get_world_size() - 1 and replicas:
                kept = flip(trainer, replicas[0].home.memory(), replicas[0].pieces[0].start)
            ship(source, number)
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)
        return [(p.meta.name, s.holders or 0) for s in replicas for p in s.pieces]


def ship(source: MegatronSource, number: int) -> None:
    """Sync when nothing is in flight any more, and wait for the version."""
    until_s = time.monotonic() + TIMEOUT_S
    while source._daemon.cut(source.run, source.rank).version is None:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    dist.barrier()
    job = source.sync(number).wait(TIMEOUT_S)
    assert job.state is JobState.COMMITTED, job
    dist.barrier()


@torch.no_grad()
def flip(trainer: Trainer, memory: torch.Tensor, element: int) -> list[tuple[torch.Tensor, Any]]:
    """Flip the lowest published bit of an element of a master, and let its parameter follow: the master is not stale.
    Returns the tensors that changed, with what they were."""
    kept = [(memory, memory.clone())]
    memory.view(-1).view(torch.int32)[element] ^= 1 << 16
    for m in masters(trainer.optimizer):
        if m.master.data_ptr() == memory.data_ptr() and m.param.dtype != torch.float32:
            kept.append((m.param.data, m.param.data.clone()))
            m.param.data.view(-1)[m.start : m.stop].copy_(m.master.view(-1))
    assert memory.dtype == torch.float32
    return kept
