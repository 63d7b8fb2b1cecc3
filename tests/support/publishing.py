"""A publisher role over a real store, with real worker processes, driven without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.main import build_node
from app.roles.publisher import PublisherRole
from app.settings import Settings
from clients.protocol import Cut, Job, JobState
from tests.support.replay import Bits, assert_same, replay
from tests.support.trainer import ScriptedTrainer

TIMEOUT_S = 120.0


class Rig:
    """One daemon's publisher. `versions` keeps what the trainer held when each version's step was posted."""

    def __init__(self, role: PublisherRole, trainer: ScriptedTrainer) -> None:
        self.role = role
        self.trainer = trainer
        self.chain = role.node.chains.get(trainer.run)
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


@asynccontextmanager
async def publisher(root: Path, **changes: Any) -> AsyncIterator[PublisherRole]:
    """A running publisher role; its node's store may be replaced by `store`."""
    role = PublisherRole(build_node(settings_for(root, **changes)))
    await role.start()
    try:
        yield role
    finally:
        await role.stop()
        await role.node.store.aclose()
