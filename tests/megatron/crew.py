"""The test's end of steered Megatron-Core ranks at nodes that may be killed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clients.protocol import VersionInfo
from tests.megatron.follower import TIMEOUT_S, Follower
from tests.support.megatron.job import Job
from tests.support.megatron.launch import Rig, Session, Task
from tests.support.nodes import Nodes
from tests.support.nursery import nursery

NEVER = frozenset({"proof-failed", "formula-mismatch", "write-outside-formula", "version-rejected", "inexact-replay"})
"""Degraded modes that no fault here explains: they would mean that lists or bits were wrong."""


class MegatronNodes(Nodes):
    """Two node daemons, of which rank r has number r mod 2, a store daemon and a rollout daemon."""

    world = 2

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "run", workers=nursery(), poll_interval_s=0.05, dense_fraction=1.0)
        self.start_store()
        self.start_daemons(2)
        self.start_rollout()

    def ranks_at(self, number: int) -> Iterable[int]:
        return range(number, self.world, 2)


class Crew:
    """`world` ranks of `job` in a run of their own, and a receiver that follows them."""

    def __init__(self, rig: Rig, nodes: MegatronNodes, run: str, world: int, job: Job) -> None:
        self.nodes, self.world, self.job = nodes, world, job
        self.follower = Follower(rig, [nodes.url("rollout")], run)
        nodes.run, nodes.world = run, world
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    def launch(self, checkpoint: str | None = None) -> dict[str, Any]:
        """Start all ranks, as a launcher does; what rank 0 says of its registration."""
        self._session = self.follower.rig.session(self.world)
        daemons = [self.nodes.url(f"daemon{n}") for n in range(2)]
        args = {"daemons": daemons, "run": self.nodes.run, "checkpoint": checkpoint}
        self.session.start(Task(self.job, "tests.megatron.steered:steered", args), timeout_s=TIMEOUT_S)
        return self.ask("register")

    def tell(self, op: str, **values: Any) -> None:
        self.session.say({"op": op, **values})

    def answers(self) -> list[dict[str, Any]]:
        return [self.session.hear(rank) for rank in range(self.world)]

    def ask(self, op: str, **values: Any) -> dict[str, Any]:
        """The same command to all ranks; what rank 0 answers."""
        self.tell(op, **values)
        answer: dict[str, Any] = self.answers()[0]
        return answer

    def publish_step(self) -> dict[str, Any]:
        """One step whose sync carries a number; train on until the ranks agree on one."""
        for _ in range(200):
            said = self.ask("train")
            if said["version"] is not None:
                return said
        raise AssertionError(f"the ranks never agreed on a number\n{self.nodes.tails()}")

    def settle(self) -> VersionInfo:
        """Train until a step has become a version; the receiver must hold that step's dense gather."""
        return self.arrived(self.ask("flush"))

    def arrived(self, said: dict[str, Any]) -> VersionInfo:
        """The receiver holds what the trainer said, bit for bit; the version."""
        self.follower.compare(self.job, {"state": "committed"} | said)
        found = self.follower.control.version(said["version"])
        assert found.step == said["step"]
        return found

    def end(self) -> None:
        """The end of training."""
        self.session.say(None)
        self.session.wait()

    def die(self, *ranks: int) -> None:
        """kill -9 of `ranks`; then of all the others, as a launcher does when one has died."""
        for rank in ranks:
            self.session.kill(rank)
        self.session.close()

    def check(self) -> list[VersionInfo]:
        """All versions, after a look for what no fault explains."""
        for number in self.nodes.daemons:
            wrong = NEVER & self.nodes.degraded(number).keys()
            assert not wrong, f"daemon {number}: {wrong}"
        return self.follower.control.versions().versions

    def close(self) -> None:
        self.nodes.clear_holds()
        self.follower.close()
