"""A server of two ranks that is sent its versions rank to rank, while the engine's own collectives go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from torch import nn

from clients.control import ControlClient
from clients.protocol import JobState
from clients.trainer import OwnedSlice, TorchSource
from tests.e2e.line import TIMEOUT_S
from tests.p2p.rig import p2p_daemon
from tests.support.daemon_process import Daemon
from tests.support.sglang.checkpoints import read, write
from tests.support.sglang.server import Server
from tests.support.sglang.world import PATIENCE_S

pytestmark = pytest.mark.p2p

RUN = "direct"


class Trainer:
    """Two ranks of real AdamW over the checkpoint's tensors, which they own in turns."""

    def __init__(self, url: str, base: Path) -> None:
        torch.manual_seed(3)
        metas, state = read(base)
        self.names = [m.name for m in metas]
        self.params = {
            m.name: nn.Parameter(
                torch.from_numpy(state[m.name].view(np.int16).copy()).view(torch.bfloat16).float().reshape(m.shape)
            )
            for m in metas
        }
        owned = [self.names[0::2], self.names[1::2]]
        self.optimizers = [torch.optim.AdamW([self.params[n] for n in mine], lr=2e-4) for mine in owned]
        self.sources = [
            TorchSource(
                None,
                self.optimizers[rank],
                slices=[OwnedSlice(n, tuple(self.params[n].shape), self.params[n]) for n in owned[rank]],
                run=RUN,
                daemon=url,
                rank=rank,
                world=2,
                launch="one",
                hold_timeout_s=TIMEOUT_S,
            )
            for rank in range(2)
        ]
        threads = [threading.Thread(target=s.register) for s in self.sources]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.number = 0

    def ship(self) -> int:
        self.number += 1
        for p in self.params.values():
            p.grad = torch.randn(p.shape)
        for optimizer in self.optimizers:
            optimizer.step()
        jobs = [h.wait(TIMEOUT_S) for h in [s.sync(self.number) for s in self.sources]]
        assert [j.state for j in jobs] == [JobState.COMMITTED] * 2, jobs
        assert jobs[0].version is not None
        return jobs[0].version

    def state(self) -> dict[str, np.ndarray]:
        return {
            n: p.detach().bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(-1)
            for n, p in self.params.items()
        }

    def close(self) -> None:
        for source in self.sources:
            source.close()


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    place = folder / "p2p"
    place.mkdir()
    running = p2p_daemon(place)
    yield running
    running.end()


def test_two_scheduler_ranks_are_sent_every_version(
    folder: Path, start: Callable[..., Server], qwen3: Path, daemon: Daemon
) -> None:
    server = start(qwen3, tp=2)
    trainer = Trainer(daemon.url, qwen3)
    server.wait_ready()
    body = {"name": "actor", "kind": "sglang", "run": RUN, "url": server.url, "transport": "p2p"}
    assert httpx.post(f"{daemon.url}/receivers", json=body, timeout=60.0).status_code == 200
    with ControlClient(daemon.url, run=RUN) as control:
        control.wait_for_receivers(version=0, timeout_s=PATIENCE_S)
        until_s = time.monotonic() + PATIENCE_S
        while (view := httpx.get(f"{daemon.url}/p2p/{RUN}").json())["group"] is None or (
            view["group"]["state"] != "open"
        ):
            assert time.monotonic() < until_s, view
            time.sleep(0.05)
        assert len(view["group"]["members"]) == 4
        stop = threading.Event()
        answers: list[int] = []

        def ask() -> None:
            while not stop.is_set():
                answers.append(len(server.generate()["output_ids"]))

        asking = threading.Thread(target=ask)
        asking.start()  # generation goes on while versions arrive
        try:
            for _ in range(3):
                version = trainer.ship()
                control.wait_for_receivers(version=version, timeout_s=PATIENCE_S)
                info = control.receivers()[0]
                assert (info.path, info.proof, info.resyncs, info.installed) == ("p2p", "proven", 0, version)
        finally:
            stop.set()
            asking.join()
        assert answers
        assert control.versions().degraded.get("p2p-missed", 0) == 0
    assert server.weight_version == str(version)
    sums, answer = server.checksums(), server.generate()["output_ids"]
    copy = write(qwen3, trainer.state(), folder / "trained")
    assert server.post("/update_weights_from_disk", model_path=str(copy)).status_code == 200
    assert server.checksums() == sums
    assert server.generate()["output_ids"] == answer
    trainer.close()
