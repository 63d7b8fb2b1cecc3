"""The publisher when things break: killed workers, full disk, absent store, restarts. Nothing is lost or mixed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.protocol import JobState
from engine.errors import StateConflict
from tests.support.publishing import Rig, publisher
from tests.support.trainer import ScriptedTrainer

pytestmark = [pytest.mark.anyio, pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def trainer() -> Iterator[ScriptedTrainer]:
    made = ScriptedTrainer()
    yield made
    made.close()


async def test_a_killed_worker_costs_nothing(tmp_path: Path, trainer: ScriptedTrainer) -> None:
    async with publisher(tmp_path) as role:
        rig = Rig(role, trainer)
        await rig.register()
        # between two syncs
        os.kill(rig.worker_pid(), signal.SIGKILL)
        trainer.step()
        (job,) = await rig.sync()
        assert job.state is JobState.COMMITTED
        assert job.detail["dense_tiles"] == 0
        # while the read is on its way
        trainer.step()
        (posted,) = await rig.post(await rig.cut())
        os.kill(rig.worker_pid(), signal.SIGKILL)
        job = await rig.final(posted)
        assert job.state is JobState.COMMITTED
        assert trainer.released()
        # after the trainer was released, while the version is encoded or uploaded
        rig.store.away = {"chunks"}
        trainer.step()
        (posted,) = await rig.post(await rig.cut())
        await rig.until(posted, JobState.UPLOADING)
        os.kill(rig.worker_pid(), signal.SIGKILL)
        rig.store.away = set()
        job = await rig.final(posted)
        assert job.state is JobState.COMMITTED
        trainer.step()
        (job,) = await rig.sync()
        assert job.detail["dense_tiles"] == 0
        assert role.node.degraded.snapshot()["worker-restarted"] == 3
        await rig.check()


async def test_a_full_disk_drops_the_read_and_says_so(tmp_path: Path, trainer: ScriptedTrainer) -> None:
    async with publisher(tmp_path) as role:
        rig = Rig(role, trainer)
        await rig.register()
        trainer.step()
        await rig.sync()  # what the worker compiles is cached in files, which must not meet the limit
        pid = rig.worker_pid()
        old = resource.prlimit(pid, resource.RLIMIT_FSIZE, (256, resource.RLIM_INFINITY))
        trainer.step()
        (job,) = await rig.sync()
        assert job.state is JobState.FAILED
        assert job.problem is not None
        assert job.problem.type == "urn:dte:problem:spool-full"
        assert job.problem.remedy
        trainer.step()
        (job,) = await rig.sync(publish=False)
        assert job.state is JobState.FAILED
        spool = tmp_path / "data" / "spool" / trainer.run / trainer.launch / "0"
        # the daemon, which has no limit, may be writing the list of jobs at this very moment
        names = {p.name for p in spool.iterdir()} - {"jobs.json.part"}
        assert names == {"jobs.json", "ledger.dtl", "rank.json"}
        resource.prlimit(pid, resource.RLIMIT_FSIZE, old)
        trainer.step()
        (job,) = await rig.sync()
        assert job.state is JobState.COMMITTED
        assert job.detail["dense_tiles"] > 0
        await rig.check(0, job.version or -1)


async def test_a_store_that_is_away_holds_up_versions_but_not_the_trainer(
    tmp_path: Path, trainer: ScriptedTrainer
) -> None:
    async with publisher(tmp_path) as role:
        rig = Rig(role, trainer)
        await rig.register()
        rig.store.away = {"put", "get"}
        trainer.step()
        # the cut was agreed just before the store went away
        (posted,) = await rig.post(1)
        job = await rig.until(posted, JobState.UPLOADING)
        assert job.state is JobState.UPLOADING
        assert trainer.released()
        assert await rig.cut() is None
        for _ in range(2):
            trainer.step()
            (job,) = await rig.sync(publish=False)
            assert job.state is JobState.ACCUMULATED
        rig.store.away = set()
        assert (await rig.final(posted)).state is JobState.COMMITTED
        assert role.node.degraded.snapshot()["store-unavailable"] > 0
        trainer.step()
        (job,) = await rig.sync()
        assert job.state is JobState.COMMITTED
        assert job.detail["dense_tiles"] == 0
        await rig.check()


async def test_a_restarted_daemon_goes_on(tmp_path: Path, trainer: ScriptedTrainer) -> None:
    async with publisher(tmp_path) as role:
        rig = Rig(role, trainer)
        await rig.register()
        trainer.step()
        await rig.sync(publish=False)
        # a version is in flight and its chunks are not in the store
        rig.store.away = {"chunks"}
        trainer.step()
        (posted,) = await rig.post(await rig.cut())
        await rig.until(posted, JobState.UPLOADING)
        trainer.step()
        (job,) = await rig.sync(publish=False)
        assert job.state is JobState.ACCUMULATED
    async with publisher(tmp_path) as role:
        rig = rig.moved_to(role)
        assert (await rig.final(posted)).state is JobState.COMMITTED
        request = trainer.sync(None)
        again, new = await role.sync(request)
        assert (again.state, new) == (JobState.ACCUMULATED, False)
        # accepted, and not read before the daemon ends
        trainer.step()
        (unread,) = await rig.post(await rig.cut())
    async with publisher(tmp_path) as role:
        rig = rig.moved_to(role)
        assert (await rig.final(unread)).state is JobState.COMMITTED
        assert trainer.released()
        trainer.step()
        (job,) = await rig.sync()
        assert job.state is JobState.COMMITTED
        assert job.detail["dense_tiles"] == 0
        await rig.check()


async def test_a_lost_ledger_makes_the_next_version_dense(tmp_path: Path, trainer: ScriptedTrainer) -> None:
    async with publisher(tmp_path) as role:
        rig = Rig(role, trainer)
        await rig.register()
        trainer.step()
        await rig.sync()
        ledger = tmp_path / "data" / "spool" / trainer.run / trainer.launch / "0" / "ledger.dtl"
        data = bytearray(ledger.read_bytes())
        data[len(data) // 2] ^= 1
        ledger.write_bytes(bytes(data))
        os.kill(rig.worker_pid(), signal.SIGKILL)
        trainer.step()
        (job,) = await rig.sync()
        assert job.state is JobState.COMMITTED
        assert job.detail["dense_tiles"] == 9
        assert role.node.degraded.snapshot()["ledger-lost"] == 1
        trainer.step()
        (job,) = await rig.sync()
        assert job.detail["dense_tiles"] == 0
        await rig.check()


async def test_three_ranks_and_a_rank_that_misses_its_turn(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(world=3)
    try:
        async with publisher(tmp_path) as role:
            rig = Rig(role, trainer)
            jobs = await rig.register()
            assert {j.state for j in jobs} == {JobState.COMMITTED}
            trainer.step(without=["expert"])
            jobs = await rig.sync()
            assert {j.state for j in jobs} == {JobState.COMMITTED}
            # rank 2's sync never comes, and training goes on
            trainer.step()
            number = await rig.cut()
            early = [(await role.sync(trainer.sync(number, rank=r)))[0] for r in (0, 1)]
            for r in (0, 1):
                assert await asyncio.to_thread(trainer.released, r)
            trainer.step()
            assert await rig.cut() is None
            jobs = await rig.sync(publish=False)
            assert {j.state for j in jobs} == {JobState.ACCUMULATED}
            assert {(await rig.final(j)).state for j in early} == {JobState.ABORTED}
            trainer.step()
            jobs = await rig.sync()
            assert {j.state for j in jobs} == {JobState.COMMITTED}
            # ranks 0 and 1 know every step; rank 2 missed one
            assert [j.detail["dense_tiles"] > 0 for j in jobs] == [False, False, True]
            await rig.check()
    finally:
        trainer.close()


async def test_a_resumed_launch_supersedes_and_rewinds(tmp_path: Path, trainer: ScriptedTrainer) -> None:
    resumed = ScriptedTrainer(seed=0)
    other = ScriptedTrainer(seed=5)
    try:
        async with publisher(tmp_path) as role, publisher(tmp_path / "two", store=str(tmp_path / "store")) as second:
            rig = Rig(role, trainer)
            await rig.register()
            # the same weights under a new launch, at another daemon: an epoch without a first version
            rig2 = Rig(second, resumed)
            (job,) = await rig2.register()
            assert (job.state, rig2.epoch) == (JobState.ACCUMULATED, 2)
            with pytest.raises(StateConflict, match="this launch has ended"):
                await rig.cut()
            with pytest.raises(StateConflict, match="this launch has ended"):
                await rig.role.sync(trainer.sync(1))
            resumed.step()
            (job,) = await rig2.sync()
            assert job.state is JobState.COMMITTED
            assert job.detail["dense_tiles"] == 0
            # other weights: the first version is dense on top of the head
            rig3 = Rig(role, other)
            (job,) = await rig3.register()
            assert (job.state, rig3.epoch) == (JobState.COMMITTED, 3)
            assert rig3.chain.head is not None
            assert rig3.chain.head.rewound
            rig3.expected |= rig.expected | rig2.expected
            await rig3.check()
            # the superseded launch left nothing behind
            await asyncio.gather(*role._retiring.values())
            assert [d.name for d in (tmp_path / "data" / "spool" / trainer.run).iterdir()] == [other.launch]
    finally:
        resumed.close()
        other.close()


async def test_a_read_that_holds_the_trainer_too_long_is_given_up(tmp_path: Path, trainer: ScriptedTrainer) -> None:
    async with publisher(tmp_path, hold_timeout_s=1e-9) as role:
        rig = Rig(role, trainer)
        await rig.register()
        trainer.step()
        (job,) = await rig.sync()
        assert job.state is JobState.FAILED
        assert job.problem is not None
        assert job.problem.type == "urn:dte:problem:hold-timeout"
        assert "hold_timeout_s" in job.problem.remedy
        assert role.node.degraded.snapshot()["read-revoked"] == 1
        session = role.session(trainer.run, 0)
        await session.state.until(lambda: not session._busy and session.state.undecided is None, 60)
    async with publisher(tmp_path) as role:
        rig = rig.moved_to(role)
        session = role.session(trainer.run, 0)
        await session.state.until(lambda: session._ready, 60)
        trainer.step()
        (job,) = await rig.sync()
        assert job.state is JobState.COMMITTED
        assert job.detail["dense_tiles"] > 0, "the step given up counts as unread"
        await rig.check(0, job.version or -1)


async def until(reached: Callable[[], bool]) -> None:
    """Another process or task gets there; nobody tells."""
    async with asyncio.timeout(60):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def maps(pid: int, trainer: ScriptedTrainer) -> bool:
    """Whether the process has the trainer's memory mapped."""
    return trainer._file.name in Path(f"/proc/{pid}/maps").read_text()


async def test_a_dead_trainers_memory_is_free_before_its_last_version_is_uploaded(
    tmp_path: Path, trainer: ScriptedTrainer
) -> None:
    async with publisher(tmp_path) as role:
        rig = Rig(role, trainer)
        await rig.register()
        session = role.session(trainer.run, 0)
        await session.state.look()
        assert session.state.ended is None, "it lives"
        rig.store.away = {"chunks"}
        trainer.step()
        (posted,) = await rig.post(await rig.cut())
        await rig.until(posted, JobState.UPLOADING)
        pid = rig.worker_pid()
        assert maps(pid, trainer)
        trainer.ranks[0].control.close()  # its lock is free now; the names stay, as after a SIGKILL
        await session.state.look()
        with pytest.raises(StateConflict, match="process has ended"):
            await session.cut()
        await until(lambda: not maps(pid, trainer))
        rig.store.away = set()
        assert (await rig.final(posted)).state is JobState.COMMITTED
        await rig.check()
        assert session._main is not None
        await session._main
        assert session.worker_pid is None
        assert not (tmp_path / "data" / "spool" / trainer.run).exists()


async def test_a_rank_whose_trainer_dies_before_the_others_come_ends(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(world=2)
    try:
        async with publisher(tmp_path) as role:
            rig = Rig(role, trainer)
            job = await role.register(trainer.registration(0))
            await rig.until(job, JobState.READING)
            trainer.ranks[0].control.close()
            session = role.session(trainer.run, 0)
            await session.state.look()
            job = await rig.final(job)
            assert job.state is JobState.FAILED
            assert job.problem is not None
            assert job.problem.type == "urn:dte:problem:trainer-gone"
            assert session._main is not None
            await session._main
            assert session.worker_pid is None
    finally:
        trainer.close()


async def test_a_rank_that_a_smaller_new_world_has_no_longer_winds_up(tmp_path: Path) -> None:
    wide, narrow = ScriptedTrainer(world=2), ScriptedTrainer(world=1)
    try:
        async with publisher(tmp_path) as role:
            await Rig(role, wide).register()
            left = role.session(wide.run, 1)
            await Rig(role, narrow).register()
            await left.state.look()
            assert left.state.ended is not None
            assert left.state.ended.code == "launch-ended"
            assert left._main is not None
            await left._main
            assert left.worker_pid is None
            assert not (tmp_path / "data" / "spool" / wide.run / wide.launch / "1").exists()
            assert role.session(narrow.run, 0).state.ended is None
    finally:
        wide.close()
        narrow.close()
