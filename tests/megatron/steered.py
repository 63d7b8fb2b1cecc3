"""What each rank of a real Megatron-Core run does while a test kills ranks and daemons around it: what it is told.

The ranks say after each command what came of it. Every trained step leaves its dense gather behind.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from clients.protocol import JobState
from clients.trainer import SyncHandle
from clients.trainer.group import default_agree
from clients.trainer.megatron import MegatronSource
from tests.megatron.scenarios import TIMEOUT_S, dump, source_of
from tests.support.megatron.train import Trainer
from tests.support.megatron.worker import Context


class Steered:
    """One rank. Commands are its methods without the underscore."""

    def __init__(self, trainer: Trainer, context: Context) -> None:
        self.trainer, self.context = trainer, context
        self.handle: SyncHandle | None = None
        self.agreed_last = False
        self._agree = default_agree()
        self.source: MegatronSource = source_of(trainer, context, agree=self._agreed)

    def _agreed(self, mine: int) -> int:
        found = self._agree(mine)
        if self.agreed_last:
            self.context.say({"agreed": found})
            self.context.hear()  # never: the test ends this rank here
        return found

    def register(self) -> dict[str, Any]:
        """Waits until the daemon has decided what the registration brought, too."""
        epoch = self.source.register(self.trainer.step_number)
        file = dump(self.trainer, self.context, self.trainer.step_number)
        until_s = time.monotonic() + TIMEOUT_S
        while self.source._daemon.cut(self.source.run, self.source.rank).version is None:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        dist.barrier()
        return {"epoch": epoch, "step": self.trainer.step_number, "file": file}

    def train(self, ends: int | None = None) -> dict[str, Any]:
        """One step, synced. Rank `ends` stands still once the step is agreed on and before it has posted it."""
        self.trainer.step()
        self.trainer.sync_params()
        step = self.trainer.step_number
        file = dump(self.trainer, self.context, step)
        self.agreed_last = ends == self.trainer.coordinates.rank
        self.handle = self.source.sync(step)
        return {"step": step, "version": self.handle.version, "posted": self.handle.posted, "file": file}

    def flush(self) -> dict[str, Any]:
        """Train on until a step has become a version of all ranks."""
        states = []
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            said = self.train()
            assert self.handle is not None
            state = self.handle.wait(TIMEOUT_S).state if self.handle.posted else None
            states.append("down" if state is None else state.value)
            if _everybody(state is JobState.COMMITTED):
                return said | {"state": "committed", "states": states}
            if _everybody(time.monotonic() > until_s):
                raise AssertionError(f"no version came to be: {states[-20:]}")
            time.sleep(0.05)

    def save(self, folder: str) -> dict[str, Any]:
        """A checkpoint of this moment."""
        self.trainer.save(Path(folder))
        return {}

    def stats(self) -> dict[str, Any]:
        s = self.source.stats
        return {"syncs": s.syncs, "down": s.down, "revoked": s.revoked}


def _everybody(yes: bool) -> bool:
    word = torch.tensor([int(yes)])
    dist.all_reduce(word, op=dist.ReduceOp.MIN)
    return bool(word.item())


def steered(trainer: Trainer, context: Context) -> None:
    """Arguments: those of `source_of`, and `checkpoint`, the folder to go on from."""
    if context.args["checkpoint"] is not None:
        trainer.load(Path(context.args["checkpoint"]))
    me = Steered(trainer, context)
    with contextlib.closing(me.source):
        while (asked := context.hear()) is not None:
            context.say(getattr(me, asked.pop("op"))(**asked))
