"""A publisher role over a real store, with real worker processes, driven without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from app.chain import Chain
from app.chains import Chains
from app.decision_events import observer
from app.main import build_node
from app.roles.base import Node
from app.roles.publisher import PublisherRole
from app.settings import Settings
from clients.protocol import Cut, Job, JobState
from tests.support.nursery import ForkedWorker, nursery
from tests.support.replay import Bits, assert_same, replay
from tests.support.trainer import ScriptedTrainer
from transports.errors import StoreUnavailable
from transports.store.base import ChunkStore, ObjectInfo

TIMEOUT_S = 120.0


class Rig:
    """One daemon's publisher. `versions` keeps what the trainer held when each version's step was posted."""

    def __init__(self, role: PublisherRole, trainer: ScriptedTrainer) -> None:
        self.role = role
        self.trainer = trainer
        self.chain = role.node.chains.get(trainer.run)
        assert isinstance(role.node.store, FaultyStore)
        self.store = role.node.store
        self.expected: dict[int, Bits] = {}
        self.epoch = 1

    async def final(self, job: Job) -> Job:
        """The job once it is final."""
        for _ in range(1000):
            found = await self.role.jobs.wait(job.id, TIMEOUT_S)
            assert found is not None
            if found.state.final:
                return found
        raise AssertionError(f"{job.id} never ended")

    async def until(self, job: Job, *states: JobState) -> Job:
        """The job once it is in one of `states` (or final)."""
        found = self.role.jobs.get(job.id)
        while found is not None and found.state not in states and not found.state.final:
            found = await self.role.jobs.wait(job.id, TIMEOUT_S)
        assert found is not None
        return found

    async def register(self, **changes: Any) -> list[Job]:
        """Register all ranks and wait for their jobs."""
        trainer = self.trainer
        bits = trainer.bits()
        jobs = [await self.role.register(trainer.registration(r, **changes)) for r in range(trainer.world)]
        done = [await self.final(j) for j in jobs]
        for job in done:
            assert job.problem is None, job.problem
            assert job.epoch is not None
            self.epoch = job.epoch
            if job.state is JobState.COMMITTED:
                assert job.version is not None
                self.expected[job.version] = bits
        return done

    async def cut(self) -> int | None:
        """What the ranks agree on."""
        cuts: list[Cut] = [await self.role.session(self.trainer.run, r).cut() for r in range(self.trainer.world)]
        assert all(c.epoch == self.epoch for c in cuts)
        numbers = [c.version for c in cuts]
        return None if None in numbers else min(n for n in numbers if n is not None)

    async def post(self, version: int | None, **changes: Any) -> list[Job]:
        """Post the last step from every rank."""
        trainer = self.trainer
        if version is not None:
            self.expected[version] = trainer.bits()
        return [
            (await self.role.sync(trainer.sync(version, rank=r, epoch=self.epoch, **changes)))[0]
            for r in range(trainer.world)
        ]

    async def sync(self, *, publish: bool = True, **changes: Any) -> list[Job]:
        """Cut, post, wait until every job is final; the trainer's holds must be released by then."""
        version = await self.cut() if publish else None
        assert not publish or version is not None
        jobs = [await self.final(j) for j in await self.post(version, **changes)]
        for r in range(self.trainer.world):
            assert self.trainer.released(r)
        return jobs

    async def check(self, *versions: int) -> None:
        """These versions (default: all commits), rebuilt from the store, are what the trainer held, bit for bit."""
        await self.chain.refresh()
        for version in versions or [c.version for c in self.chain.commits()]:
            assert_same(await replay(self.chain, version), self.expected[version])

    def moved_to(self, role: PublisherRole) -> Rig:
        """The same trainer with the next life of its daemon."""
        rig = Rig(role, self.trainer)
        rig.expected, rig.epoch = self.expected, self.epoch
        return rig

    def worker_pid(self, rank: int = 0) -> int:
        pid = self.role.session(self.trainer.run, rank).worker_pid
        assert pid is not None
        return pid


def settings_for(root: Path, **changes: Any) -> Settings:
    """Settings of a daemon with an embedded store under `root`."""
    base: dict[str, Any] = {
        "data_dir": root / "data",
        "store": str(root / "store"),
        "poll_interval_s": 0.02,
        "detect_threads": 1,
        "chunk_bytes": 1 << 16,
    }
    return Settings(**{**base, **changes})


class FaultyStore(ChunkStore):
    """A store that can be away: while `away` names verbs, these raise StoreUnavailable (and are counted)."""

    def __init__(self, inner: ChunkStore) -> None:
        self.inner = inner
        self.away: set[str] = set()
        self.refused = 0

    def _check(self, verb: str) -> None:
        if verb in self.away:
            self.refused += 1
            raise StoreUnavailable("the store is away.")

    async def put(self, key: str, data: bytes | Path) -> None:
        self._check("put")
        await self.inner.put(key, data)

    async def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        self._check("put")
        self._check(key.split("/")[4] if key.count("/") > 3 else "other")
        return await self.inner.put_if_absent(key, data)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        self._check("get")
        return await self.inner.get(key, max_bytes=max_bytes)

    def stream(self, key: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        return self.inner.stream(key, start=start, length=length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await self.inner.head(key)

    def list(self, prefix: str) -> AsyncIterator[str]:
        return self.inner.list(prefix)

    async def delete(self, key: str) -> bool:
        return await self.inner.delete(key)

    async def aclose(self) -> None:
        await self.inner.aclose()


def faulty_node(settings: Settings) -> tuple[Node, FaultyStore]:
    """A node whose store can be taken away."""
    node = build_node(settings, launch_worker=partial(ForkedWorker.launch, nursery()))
    store = FaultyStore(node.store)
    watch = observer(node.events, node.metrics)
    chains = Chains(
        lambda run: Chain(run, store, poll_interval_s=settings.poll_interval_s, observer=watch), settings.run
    )
    return replace(node, store=store, chains=chains), store


@asynccontextmanager
async def publisher(root: Path, **changes: Any) -> AsyncIterator[PublisherRole]:
    """A running publisher role over a local store (a FaultyStore, all verbs working)."""
    node, _ = faulty_node(settings_for(root, **changes))
    role = PublisherRole(node)
    await role.start()
    try:
        yield role
    finally:
        await role.stop()
        await role.node.store.aclose()


async def post(client: httpx.AsyncClient, path: str, body: BaseModel) -> httpx.Response:
    return await client.post(path, content=body.model_dump_json(), headers={"Content-Type": "application/json"})


async def final_job(client: httpx.AsyncClient, response: httpx.Response) -> Job:
    """The job that was accepted, once it is final."""
    assert response.status_code == 202, response.text
    job = Job.model_validate_json(response.content)
    while not job.state.final:
        job = Job.model_validate_json((await client.get(f"/jobs/{job.id}", params={"wait": 30})).content)
    return job
