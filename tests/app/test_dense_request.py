"""A run whose early chunks are damaged and that has no anchor: receivers ask for a dense version, and start from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import nn

from app.chain import Chain
from app.committer import Committer
from app.subscriber.targets import Targets
from clients.protocol import Cut, Job, JobState, ReceiverInfo, ReceiverState
from clients.rollout.torch import TorchReceiver
from engine.records import DenseRequest, keys, parse_record
from tests.app.test_chain import V0, first, publish
from tests.app.test_coordinator import make_node
from tests.model.build import RUN
from tests.support.daemon_process import Daemon
from tests.support.replay import assert_same
from tests.support.trainer import ScriptedTrainer
from transports.store.local import LocalStore

PATIENCE_S = 120.0


class Model(nn.Module):
    """The scripted trainer's tensors as a receiver holds them."""

    def __init__(self, trainer: ScriptedTrainer, fill: float) -> None:
        super().__init__()
        for meta in trainer.tensors:
            self.register_buffer(meta.name, torch.full(meta.shape, fill).to(getattr(torch, meta.dtype)))

    def lanes(self) -> dict[str, np.ndarray]:
        out = {}
        for name, tensor in self.named_buffers():
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            out[name] = np.pad(raw, (0, raw.size % 2)).view(np.uint16).copy()
        return out


class Line:
    """A trainer's daemon with the store, a rollout daemon, and a trainer in this process."""

    def __init__(self, folder: Path, trainer: ScriptedTrainer) -> None:
        self.trainer = trainer
        self.folder = folder
        quick = {"port": 0, "run": trainer.run, "poll_interval_s": 0.05}
        home = {"data_dir": str(folder / "a"), "roles": "publisher,coordinator,store", "detect_threads": 1}
        self.home = Daemon(folder, **quick, **home)
        self.away = Daemon(
            folder, **quick, data_dir=str(folder / "b"), roles="subscriber", store=self.home.url + "/store"
        )
        self.http = httpx.Client(trust_env=False, timeout=PATIENCE_S)

    def close(self) -> None:
        self.http.close()
        self.away.end()
        self.home.end()

    def final(self, response: httpx.Response) -> Job:
        assert response.status_code in (200, 202), response.text
        job = Job.model_validate_json(response.content)
        deadline_s = time.monotonic() + PATIENCE_S
        while not job.state.final:
            assert time.monotonic() < deadline_s, job
            found = self.http.get(f"{self.home.url}/jobs/{job.id}", params={"wait": 10})
            job = Job.model_validate_json(found.content)
        return job

    def post(self, path: str, body: Any) -> Job:
        headers = {"Content-Type": "application/json"}
        return self.final(self.http.post(self.home.url + path, content=body.model_dump_json(), headers=headers))

    def sync(self) -> Job:
        cut = Cut.model_validate_json(
            self.http.get(f"{self.home.url}/ranks/0/cut", params={"run": self.trainer.run}).content
        )
        assert cut.version is not None, cut.reason
        return self.post("/sync", self.trainer.sync(cut.version, epoch=cut.epoch))

    def receiver(self, name: str) -> ReceiverInfo | None:
        found = self.http.get(f"{self.away.url}/receivers/{name}")
        return ReceiverInfo.model_validate_json(found.content) if found.status_code == 200 else None

    def until(self, name: str, what: Any) -> ReceiverInfo:
        deadline_s = time.monotonic() + PATIENCE_S
        while (info := self.receiver(name)) is None or not what(info):
            assert time.monotonic() < deadline_s, info
            time.sleep(0.05)
        return info

    def in_sync(self, name: str, version: int) -> ReceiverInfo:
        return self.until(name, lambda i: i.state is ReceiverState.IN_SYNC and i.installed == version)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    trainer = ScriptedTrainer()
    made = Line(tmp_path, trainer)
    yield made
    made.close()
    trainer.close()


def flip(folder: Path) -> None:
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_receiver_that_nothing_leads_to_is_in_sync_after_the_next_version(line: Line, damage: str) -> None:
    trainer = line.trainer
    assert line.post("/ranks", trainer.registration()).state is JobState.COMMITTED
    for _ in range(2):
        trainer.step()
        assert line.sync().detail["dense_tiles"] == 0
    store = line.folder / "a" / "store"
    chunks = store / keys.version_prefix(trainer.run, 0) / "chunks"
    if damage == "flipped":
        flip(chunks)
    else:
        for path in chunks.iterdir():
            path.unlink()

    def receiver(name: str, model: Model) -> TorchReceiver:
        return TorchReceiver(
            model, name=name, run=trainer.run, daemon=line.away.url, socket_path=line.folder / f"{name}.sock"
        )

    one, two = Model(trainer, 1.0), Model(trainer, 2.0)
    with receiver("one", one):
        info = line.until("one", lambda i: "nothing intact" in i.last_error)
        assert not info.ready
        assert "asked to be dense" in info.last_error
        request = store / keys.dense_request(trainer.run, 2)
        assert parse_record(DenseRequest, request.read_bytes()) == DenseRequest(run=trainer.run, version=2)
        # Nothing changed since version 2; it is published all the same.
        trainer.step_number += 1
        job = line.sync()
        assert (job.state, job.version) == (JobState.COMMITTED, 3)
        info = line.in_sync("one", 3)
        assert_same(one.lanes(), trainer.bits())
        # One is enough.
        trainer.step()
        assert line.sync().detail["dense_tiles"] == 0
        line.in_sync("one", 4)
        with receiver("two", two):
            assert line.in_sync("two", 4).resyncs == 1
            assert_same(one.lanes(), trainer.bits())
            assert_same(two.lanes(), trainer.bits())
    degraded = line.http.get(line.home.url + "/versions").json()["degraded"]
    assert degraded == {"dense-on-request": 1}
    assert line.http.get(line.away.url + "/versions").json()["degraded"]["no-intact-chain"] == 1
    asked = list((store / keys.requests_prefix(trainer.run)).iterdir())
    assert [path.name for path in asked] == ["dense-2.json"]


@pytest.mark.anyio
async def test_a_request_counts_until_a_later_version_is_dense(tmp_path: Path) -> None:
    node = make_node(tmp_path)
    chain: Chain = node.chains.get(RUN)
    committer = Committer(chain)
    await first(committer)
    assert not await chain.dense_asked()
    await publish(committer, 1, V0, ({"w": 5}, {"w": 2}))
    await node.store.put(keys.dense_request(RUN, 1), b"{}")
    await node.store.put(keys.requests_prefix(RUN) + "dense-x.json", b"{}")
    assert await chain.dense_asked()
    await publish(committer, 2, ({"w": 5}, {"w": 2}), ({"w": 6}, {"w": 2}), dense=True)
    assert not await chain.dense_asked()
    # The dense version itself turned out to be damaged.
    await node.store.put(keys.dense_request(RUN, 2), b"{}")
    assert await chain.dense_asked()


@pytest.mark.anyio
async def test_the_request_of_many_receivers_is_one_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    chain = Chain(RUN, store)
    node = make_node(tmp_path)
    await first(Committer(node.chains.get(RUN)))
    await chain.refresh()

    assert chain.head is not None
    asked = await asyncio.gather(*(Targets(chain, None).ask_for_dense(chain.head) for _ in range(4)))  # type: ignore[arg-type]
    assert sorted(asked) == [False, False, False, True]
