"""A run with its store, a publisher without training, and a rollout daemon that drives one server."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from engine.records import CommitDecision
from tests.support.daemon_process import Daemon
from tests.support.sglang.checkpoints import read, trained, write
from tests.support.sglang.server import Server
from tests.support.versions import Publisher, State
from transports.store.local import LocalStore

_numbers = itertools.count()
PATIENCE_S = 120.0
VERSIONS = 5


class World:
    """`base`: the checkpoint the trainer starts from, published dense as version 0."""

    def __init__(self, folder: Path, base: Path, *, without_chunks: bool = False) -> None:
        self.number = next(_numbers)
        self.folder = folder / f"world-{self.number}"
        self.folder.mkdir()
        self.run = f"run-{self.number}"
        self.store = LocalStore(self.folder / "store")
        metas, self.state = read(base)
        self.publisher = Publisher(self.store, metas, run=self.run)
        self.rng = np.random.default_rng(self.number)
        self.publish(self.state, without_chunks=without_chunks)
        self.daemon = self.start_daemon()

    def start_daemon(self) -> Daemon:
        return Daemon(
            self.folder,
            roles="subscriber",
            store=str(self.folder / "store"),
            data_dir=str(self.folder / "daemon"),
            run=self.run,
            port=0,
            poll_interval_s=0.05,
        )

    def publish(self, state: State, **more: Any) -> CommitDecision:
        self.state = state
        return asyncio.run(self.publisher.publish(state, **more))

    def step(self) -> CommitDecision:
        """One more version, as after a training step."""
        return self.publish(trained(self.state, self.rng))

    def register(self, server: Server, name: str = "actor", **more: Any) -> httpx.Response:
        body = {"name": name, "kind": "sglang", "run": self.run, "url": server.url, **more}
        return httpx.post(f"{self.daemon.url}/receivers", json=body, timeout=60.0)

    def receiver(self, name: str = "actor") -> dict[str, Any]:
        answer = httpx.get(f"{self.daemon.url}/receivers/{name}", timeout=60.0)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def wait(self, name: str = "actor", **want: Any) -> dict[str, Any]:
        """Until the receiver shows all of `want`; AssertionError with what it shows instead."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self.receiver(name)
            if all(found[key] == value for key, value in want.items()):
                return found
            assert time.monotonic() < deadline, f"{want} not reached: {found}\n{self.log()}"
            time.sleep(0.05)

    def wait_version(self, version: int, name: str = "actor") -> dict[str, Any]:
        return self.wait(name, installed=version, ready=True)

    def follow(self, server: Server, *, answers: bool = True) -> dict[str, Any]:
        """Several versions, one after the other; a greedy answer at the end."""
        assert self.register(server).status_code == 200
        # The server was started from the trainer's checkpoint: nothing needed to be written.
        found = self.wait_version(0)
        assert (found["resyncs"], found["ranks"], found["proof"]) == (0, server.tp, "proven")
        assert server.weight_version == "0"
        before = server.generate() if answers else {}
        for _ in range(VERSIONS):
            version = self.step().version
        found = self.wait_version(version)
        assert found["resyncs"] == 0
        assert found["last_install_ms"]["pause"] > 0
        assert server.weight_version == str(version)
        after = server.generate() if answers else {}
        if answers:
            assert after["output_ids"] != before["output_ids"]
            assert after["meta_info"]["weight_version"] == str(version)
        assert server.get("/model_info")["model_path"] == str(server.model)
        return after

    def expect_newest(self, server: Server, *, answers: bool = True) -> None:
        """The server has the run's newest state: the engine's own loading of it from disk gives the same bits."""
        newest = str(self.publisher.next - 1)
        assert server.weight_version == newest
        assert not answers or server.generate()["meta_info"]["weight_version"] == newest
        sums = server.checksums()
        copy = write(server.model, self.state, self.folder / f"checkpoint-{self.publisher.next}")
        answer = server.post("/update_weights_from_disk", model_path=str(copy))
        assert answer.status_code == 200, answer.text
        assert server.checksums() == sums
        # Give the engine its own path back.
        assert server.post("/update_weights_from_disk", model_path=str(server.model)).status_code == 200

    def log(self, lines: int = 40) -> str:
        return "\n".join((self.folder / "daemon.log").read_text(errors="replace").splitlines()[-lines:])

    def end(self) -> None:
        self.daemon.end()
