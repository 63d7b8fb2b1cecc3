"""One of two trainer ranks in a real process group, each with a daemon double of its own: what tests of turns run."""

from __future__ import annotations

import datetime
import logging
import os
from typing import Any

import httpx
import torch
import torch.distributed as dist

from clients.protocol import JobState
from clients.trainer import OwnedSlice, TorchSource
from engine.errors import DteError
from tests.clients.trainer_double import FakeDaemon, problem
from tests.support.processes import Channel

WAIT_S = 20.0
"""How long a rank waits for the others in a collective call. A hang is an error of this one, not of the test run."""


class Checked(TorchSource):
    """A source whose check can fail, as a kind of trainer with masters of its own does."""

    broken: type[Exception] | None = None

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken("the masters are stale")


class Rank:
    """`rank` owns half of a tensor. Commands are its methods without the underscore."""

    def __init__(self, rank: int, meeting: str) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=WAIT_S)
        )
        self.daemon = FakeDaemon()
        self.part = torch.nn.Parameter(torch.full((8,), 1.0 + rank))
        self.optimizer = torch.optim.AdamW([self.part], lr=1e-2)
        slices = [OwnedSlice("w", (4, 4), self.part, offset=8 * rank)]
        self.source = Checked(None, self.optimizer, run="turns", slices=slices, transport=self.daemon.transport)
        self.source.register()

    def train(self, **_: Any) -> dict[str, Any]:
        self.part.grad = torch.ones_like(self.part)
        self.optimizer.step()
        return {}

    def check(self, fails: str | None) -> dict[str, Any]:
        self.source.broken = {"known": DteError, "any": RuntimeError, None: None}[fails]
        return {}

    def spoil(self, good: bool) -> dict[str, Any]:
        """A hyperparameter with which a step cannot be undone."""
        self.optimizer.param_groups[0]["weight_decay"] = 0.01 if good else 200.0
        return {}

    def refuse(self, status: int | None, code: str = "invalid-input") -> dict[str, Any]:
        """What the daemon answers to syncs. A status of 0: it is down altogether."""
        self.daemon.down = status == 0
        self.daemon.faults.pop("/sync", None)
        if status:

            def answer(_: httpx.Request) -> httpx.Response:
                assert status
                return problem(status, code)

            self.daemon.faults["/sync"] = answer
        return {}

    def number(self, version: int | None) -> dict[str, Any]:
        """The number that this rank's daemon gives out."""
        self.daemon.version = version
        return {}

    def sync(self, step: int, publish: bool = True) -> dict[str, Any]:
        handle = self.source.sync(step, publish=publish)
        state = None if handle.job_id is None else handle.poll().state.value
        return {"step": handle.step, "version": handle.version, "posted": handle.posted, "state": state}

    def write(self) -> dict[str, Any]:
        """The weights change under the step that was synced last."""
        with self.source.mutating(), torch.no_grad():
            self.part.add_(1.0)
        return {}

    def got(self) -> dict[str, Any]:
        """What the daemon was sent: step, number, whether anything is read under it, and the optimizer's step."""
        control = self.daemon.control
        assert control is not None
        return {
            "syncs": [(s.step, s.version, control.intact(s.generation, s.hold), s.steps[0]) for s in self.daemon.syncs]
        }

    def close(self) -> dict[str, Any]:
        self.source.close()
        return {}


def rank(channel: Channel, *, number: int, meeting: str) -> None:
    """Answers commands until the test is gone."""
    logging.basicConfig(level=logging.INFO)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    me = Rank(number, meeting)
    channel.send({"ok": True})
    while True:
        try:
            asked = channel.receive()
        except EOFError:
            return
        try:
            channel.send({"ok": True, **getattr(me, asked.pop("op"))(**asked)})
        except Exception as error:
            logging.exception("failed")
            channel.send({"ok": False, "error": type(error).__name__, "text": str(error)})


ACCUMULATED, COMMITTED = JobState.ACCUMULATED.value, JobState.COMMITTED.value
