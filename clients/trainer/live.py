"""What a registered source consists of, and what it counts.

One invariant: what `registration` declares is what the parts here do: the same slices, the same memory, the same hold.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from clients.errors import PROBLEM_PREFIX, JobFailed
from clients.protocol import FormulaSpec, RankRegistration, SyncRequest
from clients.trainer.binding import Binding
from clients.trainer.checks import warn_of_views
from clients.trainer.gate import Gate
from clients.trainer.places import Places
from clients.trainer.shards import Plan
from clients.trainer.watch import Watch
from transports.memory.cuda_ipc import DeviceMemoryError
from transports.memory.generation import shm_name


@dataclass(frozen=True)
class SourceStats:
    """What happened to training because of us.

    `hold_ms` is how long mutations waited for reads in all, `last_hold_ms` the latest one; `revoked` how many reads
    were taken back, `down` how many syncs found no daemon, `moved` how many tensors were moved in again,
    `shared_bytes` the shared memory in use. `exported` tensors of devices (weights and moments) are read where they
    are, `mirrored` ones as copies made at every sync.
    """

    syncs: int
    down: int
    hold_ms: float
    last_hold_ms: float
    revoked: int
    moved: int
    shared_bytes: int
    exported: int = 0
    mirrored: int = 0


log = logging.getLogger(__name__)


def move_in(
    run: str,
    launch: str,
    rank: int,
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[torch.nn.Module],
    places: Places,
    gate: Gate,
) -> Live:
    """Put everything where the daemon can read it. On an error all is as it was, and the gate is closed."""
    binding = Binding(plan, optimizers, models, places)
    gate.on_unread = places.drop
    try:
        places.check(s.home.memory() for s in plan.shards)
        warn_of_views(s for s in plan.shards if places.moves(s.home.memory(), side=s.mirrored))
        with gate.control.mutating():
            binding.move_in(lambda k: shm_name(run, launch, rank, f"m{k}"))
        if places.mirrored:
            log.warning("run %s: rank %d copies %d tensors to the host at every sync", run, rank, places.mirrored)
        return Live(launch, plan, binding, gate, Watch(plan, optimizers, models, binding, gate))
    except BaseException:
        gate.close()
        raise


def unmappable(error: BaseException) -> bool:
    """Whether memory of a device could not be shared with the daemon; copies of it could."""
    if isinstance(error, JobFailed):
        problem = error.job.problem
        return problem is not None and problem.type == PROBLEM_PREFIX + DeviceMemoryError.code
    return isinstance(error, DeviceMemoryError)


@dataclass(frozen=True)
class Live:
    """What exists between `register` and `close`, in the process `pid` that registered and in no fork of it."""

    launch: str
    plan: Plan
    binding: Binding
    gate: Gate
    watch: Watch
    pid: int = field(default_factory=os.getpid)

    @property
    def ours(self) -> bool:
        """Whether this is the process that registered."""
        return self.pid == os.getpid()

    def drop(self) -> None:
        self.watch.remove()
        self.binding.close()
        self.gate.close()

    def registration(self, run: str, rank: int, world: int, step: int, *, hold: int) -> RankRegistration:
        """`POST /ranks` for the weights as they are after step `step`, under `hold`."""
        return RankRegistration(
            run=run,
            launch=self.launch,
            rank=rank,
            world=world,
            step=step,
            control=self.gate.control.name,
            hold=hold,
            generation=self.gate.control.generation,
            tensors=self.plan.tensors,
            groups=[FormulaSpec(name=f) for f in self.plan.formulas],
            slices=self.binding.specs(),
            replicas=self.binding.specs(replicas=True),
            mirrored=self.binding.mirrored_slices,
        )

    def request(self, run: str, rank: int, epoch: int, step: int, version: int | None, *, hold: int) -> SyncRequest:
        """`POST /sync` for the weights as they are after step `step`, under `hold`."""
        return SyncRequest(
            run=run,
            launch=self.launch,
            epoch=epoch,
            rank=rank,
            step=step,
            hold=hold,
            generation=self.gate.control.generation,
            version=version,
            hypers=self.watch.hypers(),
            steps=self.watch.steps,
            scales=self.watch.scales,
            handles=self.watch.moved(),
            replica_handles=self.watch.moved(replicas=True),
        )
