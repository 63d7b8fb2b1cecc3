"""A receiver is ready only while its ranks say themselves what they were proven to be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from app.chain import Chain
from app.degraded import Degraded
from app.main import build_node
from app.metrics import Metrics
from app.settings import Settings
from app.subscriber.cache import ChunkCache
from app.subscriber.dense import DenseRequests
from app.subscriber.receiver import Receiver
from app.subscriber.targets import NoSource, Targets
from app.subscriber.units import NoRoom, UnitFiles
from clients.protocol import ReceiverInfo, ReceiverRegistration, ReceiverState
from clients.rollout.protocol import ReceiverError
from engine.errors import ProofError
from engine.records import keys
from tests.support.sglang_stand_in import GOOD, Rank, StandIn
from tests.support.versions import Publisher, digest_of, metas_of
from transports.store.local import LocalStore

pytestmark = pytest.mark.anyio


class World:
    """A run with version 0, and one receiver that has it."""

    def __init__(self, folder: Path, rank: Rank, registration: ReceiverRegistration) -> None:
        self.rank = rank
        self.store = LocalStore(folder / "store")
        node = build_node(Settings(data_dir=folder / "d"))
        self.events, self.metrics = node.events, node.metrics
        self.cache = ChunkCache(
            folder / "c", self.store, max_bytes=1 << 20, parallel=1, metrics=node.metrics, degraded=node.degraded
        )
        targets = Targets(Chain("r", self.store), self.cache)
        files = UnitFiles(targets, folder / "units", max_bytes=0)
        self.receiver = Receiver(node, registration, targets, files, owner="me", fence=1)

    async def until(self, what: Callable[[ReceiverInfo], bool]) -> ReceiverInfo:
        cursor = self.events.last_id
        async with asyncio.timeout(30):
            while not what(self.receiver.standing.info()):
                found = await self.events.after(cursor, 0.2)
                cursor = found[-1].id if found else cursor
        return self.receiver.standing.info()

    def audits(self) -> int:
        return self.rank.seen.count("audit")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    weights = np.arange(32, dtype=np.uint16)
    async with Rank(tmp_path / "rank.sock") as rank:
        rank.tensors = [{"names": ["w"], "shape": [4, 8], "dtype": "bfloat16", "held": 32}]
        rank.digests = {"w": digest_of("w", weights)}
        world = World(tmp_path, rank, ReceiverRegistration(name="a", run="r", sockets=[str(rank.path)]))
        await Publisher(world.store, metas_of({"w": ((4, 8), "bfloat16")})).publish({"w": weights})
        world.receiver.start()
        await world.until(lambda i: i.ready)
        yield world
        await world.receiver.stop()
        world.events.close()


async def test_a_rank_that_has_lost_its_version_is_unready_until_it_is_proven_again(world: World) -> None:
    """As while an engine has released its weights' memory: no number changes but the version."""
    released = [ReceiverError("its memory is released", code="state-conflict") for _ in range(1000)]
    world.rank.refuse["audit"] = list(released)
    world.rank.status |= {"version": None, "step": None, "ready": False}
    world.receiver.kick(1)
    info = await world.until(lambda i: i.state is ReceiverState.FAILED)
    assert (info.ready, info.installed) == (False, None)
    assert "released" in info.last_error
    world.receiver.kick(1)
    seen = world.audits()
    await world.until(lambda _: world.audits() > seen)
    assert not world.receiver.standing.ready
    world.rank.refuse.clear()
    world.receiver.kick(1)
    await world.until(lambda i: i.ready)
    assert world.rank.status["version"] == 0


async def test_a_rank_that_cannot_say_how_it_is_is_proven_again(world: World) -> None:
    assert world.audits() == 1
    world.rank.refuse["status"] = [ReceiverError("busy", code="receiver-error")]
    world.receiver.kick(1)
    await world.until(lambda i: not i.ready)
    await world.until(lambda i: i.ready)
    assert world.audits() == 2


async def test_a_full_disk_asks_no_trainer_for_a_dense_version(tmp_path: Path) -> None:
    """Its weights are no version's, so that it is resynced, for which its converted tensor has no room."""
    server = StandIn()
    form = {"shape": [4, 8], "dtype": "bfloat16"}
    async with Rank(tmp_path / "rank.sock") as rank:
        announced = {"protocol": 1, "boot": "b", "sockets": [str(rank.path)], "error": None}
        server.info = GOOD | {"internal_states": [{"dte": announced}]}
        rank.tensors = [{"names": ["w"], "held": 32, **form}]
        rank.units = [{"tensors": [{"names": ["q"], **form}], "parameters": ["p"]}]
        rank.digests = {"w": "0" * 16}
        world = World(tmp_path, rank, ReceiverRegistration(name="a", kind="sglang", run="r", url=server.url))
        await world.cache.open()
        weights = {n: np.full(32, i, np.uint16) for i, n in enumerate("wq")}
        await Publisher(world.store, metas_of(dict.fromkeys("wq", ((4, 8), "bfloat16")))).publish(weights)
        world.receiver.start()
        info = await world.until(lambda i: i.state is ReceiverState.FAILED)
        assert "cache_bytes" in info.last_error
        assert not info.ready
        assert await world.store.head(keys.dense_request("r", 0)) is None
        await world.receiver.stop()
        world.events.close()
    server.close()


def test_no_room_is_nothing_that_a_dense_version_helps(tmp_path: Path) -> None:
    metrics = Metrics()
    store = LocalStore(tmp_path)
    cache = ChunkCache(tmp_path, store, max_bytes=0, parallel=1, metrics=metrics, degraded=Degraded(metrics))
    requests = DenseRequests(Targets(Chain("r", store), cache), Degraded(metrics), "a")
    assert not requests.helps(NoRoom("full"), None)
    assert not requests.helps(NoRoom("full"), 0)
    assert requests.helps(NoSource("gone"), None)
    assert requests.helps(ProofError("lies"), 0)
