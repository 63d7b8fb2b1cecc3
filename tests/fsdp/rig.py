"""The processes of the FSDP2 tests, started once: four trainer ranks, two daemons with one store, one receiver.

One invariant: the verdict compares what the receiver's model holds with dense gathers that the ranks wrote down;
nothing of dte takes part in it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np

from clients.control import ControlClient
from tests.support.nursery import nursery
from tests.support.processes import PATIENCE_S, PRELOADED, Child

_PRELOADED = [
    *PRELOADED,
    "tests.fsdp.worker",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]


class Job:
    """Some ranks under one process group."""

    def __init__(self, rig: Rig, ranks: Sequence[Child], **options: Any) -> None:
        self.rig, self.ranks, self.run = rig, ranks, ""
        meeting = str(rig.folder / f"meeting-{next(rig.numbers)}")
        for number, child in enumerate(ranks):
            child.send("begin", rank=number, world=len(ranks), meeting=meeting, **options)
        self.answers()

    def ask(self, op: str, **values: Any) -> list[dict[str, Any]]:
        """The same command to all ranks; their answers."""
        for child in self.ranks:
            child.send(op, **values)
        return self.answers()

    def answers(self, *, ok: bool = True) -> list[dict[str, Any]]:
        """Of all ranks; with `ok`, an error of any is one of the test's."""
        found = [child.receive() for child in self.ranks]
        bad = [(a, c.tail()) for a, c in zip(found, self.ranks, strict=True) if ok and not a["ok"]]
        assert not bad, bad[0][0]["text"] + "\n" + bad[0][1]
        return found

    def register(self, run: str, *, ok: bool = True, **options: Any) -> list[dict[str, Any]]:
        """Rank r at daemon r mod 2."""
        self.run = run
        for number, child in enumerate(self.ranks):
            child.send("register", run=run, daemon=self.rig.urls[number % 2], **options)
        return self.answers(ok=ok)

    def publish(self, steps: int = 1, **options: Any) -> list[dict[str, Any]]:
        """Train step by step; each must become a version, and the receiver hold it. The steps as rank 0 saw them."""
        done = []
        for _ in range(steps):
            answers = self.ask("train", folder=str(self.rig.folder / self.run), **options)
            said = {(s["state"], s["version"], s["step"]) for a in answers for s in a["steps"]}
            assert len(said) == 1, said
            state, version, step = said.pop()
            assert state == "committed"
            self.rig.arrived(self.run, version, step)
            done.append(answers[0]["steps"][0])
        return done

    def digests(self, steps: int) -> list[list[str]]:
        """What each rank holds after each of the next steps."""
        return [[s["digest"] for s in a["steps"]] for a in self.ask("train", steps=steps)]


class Rig:
    """`job()` starts a training job, `follow` the receiver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count()
        multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()
        self.children = [Child(f"rank{r}", "tests.fsdp.worker:rank", folder) for r in range(4)]
        self.receiver = Child("receiver", "tests.fsdp.worker:receiver", folder)
        self.urls: list[str] = []
        settings = {"port": 0, "poll_interval_s": 0.02, "detect_threads": 1, "anchor_every": 4, "dense_fraction": 0.95}
        roles = ("publisher,coordinator,store,subscriber", "publisher,coordinator")
        self.daemons = []
        for number in range(2):
            store = {"store": f"{self.urls[0]}/store"} if number else {}
            daemon = Child(
                f"daemon{number}", "tests.support.daemon_process:serve", folder, workers=nursery(),
                data_dir=str(folder / f"node{number}"), roles=roles[number], **settings, **store,
            )  # fmt: skip
            self.daemons.append(daemon)
            self.urls.append(daemon.receive()["url"])

    @contextmanager
    def job(self, world: int, **options: Any) -> Iterator[Job]:
        """A job of the first `world` ranks; it ends, without a goodbye to the daemons if it failed, with the block."""
        job = Job(self, self.children[:world], **options)
        yield job
        job.ask("end")

    @contextmanager
    def follow(self, run: str, spec: dict[str, Any]) -> Iterator[None]:
        """The receiver follows `run` meanwhile."""
        socket = str(self.folder / f"s{next(self.numbers)}.sock")
        self.receiver.ask("follow", run=run, spec=spec, daemon=self.urls[0], socket=socket)
        yield
        self.receiver.ask("leave")

    def arrived(self, run: str, version: int, step: int) -> None:
        """Wait until the receiver serves `version`, and compare all its bits with what the trainer wrote down."""
        path = self.folder / "receiver.npz"
        until_s = time.monotonic() + PATIENCE_S
        while True:
            has = self.receiver.ask("dump", path=str(path))
            if has["ready"] and (has["version"] or -1) >= version:
                break
            assert time.monotonic() < until_s, f"{has}\n{self.receiver.tail()}"
            time.sleep(0.02)
        assert (has["version"], has["step"]) == (version, step)
        with np.load(path) as found, np.load(self.folder / run / f"step-{step}.npz") as truth:
            assert set(found.files) == set(truth.files)
            wrong = {n: int(np.count_nonzero(found[n] != truth[n])) for n in truth.files}
        assert not any(wrong.values()), {n: k for n, k in wrong.items() if k}

    def control(self, run: str) -> ControlClient:
        return ControlClient(self.urls[0], run=run)

    def close(self) -> None:
        for child in (*self.children, self.receiver, *reversed(self.daemons)):
            child.end()
