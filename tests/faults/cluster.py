"""A whole system of real processes, and what must be true of it after any fault.

Three trainer daemons (publisher and coordinator) with a trainer rank each, a store daemon, a rollout daemon, a
receiver. Every daemon reaches the store through a proxy of its own.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from app.chain import Chain
from app.cli.verifying import run_verify
from clients.control import ControlClient
from engine.records import AbortDecision, CommitDecision, Decision, EpochStartDecision
from tests.faults.model import SHAPES
from tests.support.nodes import Nodes
from tests.support.nursery import nursery
from tests.support.processes import PATIENCE_S, Child
from tests.support.replay import replay
from transports.store.local import LocalStore

RUN = "run"
_NEVER = frozenset({"proof-failed", "formula-mismatch", "write-outside-formula", "version-rejected", "inexact-replay"})
"""Degraded modes that no fault here explains: they would mean that lists or bits were wrong."""


class Cluster(Nodes):
    """Start what is wanted with `start_*`; `settle` trains on until a version is committed, `check` compares it all."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, RUN, workers=nursery(), chunk_bytes=64 << 10, anchor_every=10, dense_fraction=0.9)
        self.trainers: list[Child] = []
        self.launches: list[tuple[str, int]] = []
        self.jobs: list[str] = []
        self.healthy = True
        self.receiver: Child
        self._checked = -1
        self._bits: dict[str, np.ndarray] | None = None
        self._meetings = 0

    # --- processes -------------------------------------------------------------------------------------------------

    def start_receiver(self) -> None:
        self.receiver = self.child(
            "receiver",
            "tests.faults.receiver:receiver",
            name="actor",
            run=RUN,
            daemon=self.url("rollout"),
            socket=str(self.folder / "actor.sock"),
            folder=str(self.folder),
        )
        self.receiver.receive()

    def begin_launch(
        self, world: int = 3, *, seed: int = 0, checkpoint: str | None = None, at: list[int] | None = None, **more: Any
    ) -> list[Child]:
        """Start the trainer ranks, at daemons 0, 1, … or at those named; does not wait."""
        self._meetings += 1
        return [
            self.child(
                f"trainer{r}-{self._meetings}",
                "tests.faults.trainer:rank",
                folder=str(self.folder),
                rank=r,
                world=world,
                run=RUN,
                daemon=self.url(f"daemon{r if at is None else at[r]}"),
                meeting=str(self.folder / f"meeting-{self._meetings}"),
                seed=seed,
                checkpoint=checkpoint,
                **more,
            )
            for r in range(world)
        ]

    def launch(self, world: int = 3, **options: Any) -> dict[str, Any]:
        """Start trainer ranks and wait until their epoch is open."""
        self.trainers = self.begin_launch(world, **options)
        return self.registered()

    def registered(self) -> dict[str, Any]:
        answers = self.gather()
        self.launches.append((answers[0]["launch"], len(self.trainers)))
        return answers[0]

    def end_trainers(self) -> None:
        """kill -9 of whatever is left of the job, as a launcher does when a rank dies."""
        for child in self.trainers:
            child.end()
        self.trainers = []

    def start_all(self, **options: Any) -> None:
        self.start_store()
        self.start_daemons(3)
        self.start_rollout()
        self.start_receiver()
        self.launch(3, **options)

    # --- training --------------------------------------------------------------------------------------------------

    def tell(self, op: str, **values: Any) -> None:
        for trainer in self.trainers:
            trainer.send(op, **values)

    def gather(self) -> list[dict[str, Any]]:
        try:
            answers = [t.receive() for t in self.trainers]
        except AssertionError as error:
            # A rank that gave up leaves the others waiting in a collective: what it says is what went wrong.
            raise AssertionError(f"{error}\n{self.tails()}") from None
        for t, a in zip(self.trainers, answers, strict=True):
            assert a["ok"], f"{t.name}: {a}\n{t.tail()}"
        return answers

    def train(self, steps: int = 1, *, publish: bool = True) -> list[dict[str, Any]]:
        self.tell("train", steps=steps, publish=publish)
        return self.gather()

    def publish_step(self) -> int:
        """One step whose sync carries a number; train on until the ranks agree on one. `jobs` are the ranks' jobs."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            syncs = [a["syncs"][0] for a in self.train()]
            if syncs[0]["version"] is not None:
                self.jobs = [s["job"] for s in syncs]
                return int(syncs[0]["version"])
            time.sleep(0.05)
        raise AssertionError(f"the ranks never agreed on a number\n{self.tails()}")

    def outcome(self) -> list[dict[str, Any]]:
        """How the newest sync of every rank ended."""
        self.tell("wait")
        return self.gather()

    def settle(self) -> tuple[int, int]:
        """Train until one step has become a version; (version, step)."""
        self.tell("flush")
        answer = self.gather()[0]
        return answer["version"], answer["step"]

    def checkpoint(self) -> str:
        self.tell("save")
        return str(self.gather()[0]["checkpoint"])

    # --- looking ---------------------------------------------------------------------------------------------------

    # --- what must be true -----------------------------------------------------------------------------------------

    def truth(self, launch: str, step: int) -> np.ndarray:
        """The trainer's BF16 bits, all tensors in flat order."""
        world = dict(self.launches)[launch]
        folder = self.folder / "truth" / launch / str(step)
        bits: np.ndarray = np.concatenate([np.load(folder / f"{r}.npz")["bits"] for r in range(world)])
        return bits

    def check(self, version: int, *, superseded: frozenset[int] = frozenset()) -> dict[int, Decision]:
        """Everything is as it must be, and the receiver is at `version`, bit for bit; returns all decisions."""
        decisions = asyncio.run(self._check_chain(superseded))
        head = decisions[version]
        assert isinstance(head, CommitDecision)
        with ControlClient(self.url("rollout"), run=RUN) as control:
            try:
                (info,) = control.wait_for_receivers(version, PATIENCE_S)
            except Exception as error:
                raise AssertionError(f"{error}\n{self.tails()}") from None
        assert info.proof == "proven"
        assert info.installed == version
        self.receiver.ask("dump")
        held = np.load(self.folder / "receiver.npy")
        wrong = np.flatnonzero(held != self.truth(head.launch, head.step))
        assert wrong.size == 0, f"the receiver is wrong in {wrong.size} elements, first {wrong[:5]}"
        assert run_verify(str(self.store_dir), RUN, None, workdir=None, as_json=True) == 0
        for number, daemon in self.daemons.items():
            if daemon.alive and not daemon.stopped:
                wrong_reads = _NEVER & self.degraded(number).keys()
                assert not wrong_reads, f"daemon {number}: {wrong_reads}"
        return decisions

    async def _check_chain(self, superseded: frozenset[int]) -> dict[int, Decision]:
        store = LocalStore(self.store_dir)
        try:
            chain = Chain(RUN, store)
            await chain.refresh()
            effective = dict(chain.decisions)
            assert set(range(chain.next_version)) - effective.keys() == superseded, "a number is taken by nothing"
            _check_linear(effective)
            for commit in chain.commits():
                if commit.version <= self._checked:
                    continue
                base = commit.base if self._bits is not None else None
                assert base is None or base == self._checked
                self._bits = await replay(chain, commit.version, self._bits, base)
                flat = np.concatenate([self._bits[n] for n in SHAPES])
                wrong = np.flatnonzero(flat != self.truth(commit.launch, commit.step))
                assert wrong.size == 0, f"version {commit.version} is wrong in {wrong.size} elements"
                self._checked = commit.version
            return effective
        finally:
            await store.aclose()


def _check_linear(decisions: dict[int, Decision]) -> None:
    """One chain: each commit on the one before it, epochs never going back, steps growing within one."""
    head: int | None = None
    epoch, step = 1, -1
    for number in sorted(decisions):
        decision = decisions[number]
        assert decision.version == number
        assert decision.epoch >= epoch
        if isinstance(decision, EpochStartDecision):
            assert decision.epoch > epoch
            assert decision.base == head
            step = -1
        if isinstance(decision, CommitDecision):
            assert decision.base == head
            assert decision.step > step
            head, step = number, decision.step
        if isinstance(decision, AbortDecision):
            assert decision.reason != "rejected"
        epoch = decision.epoch
