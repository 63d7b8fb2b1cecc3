"""What a registered source consists of, and what it counts.

One invariant: what `registration` declares is what the parts here do: the same slices, the same memory, the same hold.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from clients.protocol import FormulaSpec, RankRegistration
from clients.trainer.binding import Binding
from clients.trainer.gate import Gate
from clients.trainer.shards import Plan
from clients.trainer.watch import Watch


@dataclass(frozen=True)
class SourceStats:
    """What happened to training because of us.

    `hold_ms` is how long mutations waited for reads in all, `last_hold_ms` the latest one; `revoked` how many reads
    were taken back, `down` how many syncs found no daemon, `moved` how many tensors were moved in again,
    `shared_bytes` the shared memory in use.
    """

    syncs: int
    down: int
    hold_ms: float
    last_hold_ms: float
    revoked: int
    moved: int
    shared_bytes: int


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
        )
