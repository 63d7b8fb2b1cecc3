"""A daemon whose ranks hold replicas: what differs is said loudly, and what is published stays what it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients.protocol import Job, JobState, RankRegistration, SliceSpec, VersionInfo, Versions
from tests.support.publishing import Rig, final_job, post, publisher
from tests.support.trainer import ScriptedTrainer

pytestmark = pytest.mark.anyio


@pytest.fixture
def trainer() -> Iterator[ScriptedTrainer]:
    made = ScriptedTrainer(2)
    yield made
    made.close()


async def finals(client: httpx.AsyncClient, responses: list[httpx.Response]) -> list[Job]:
    return [await final_job(client, r) for r in responses]


async def register(client: httpx.AsyncClient, trainer: ScriptedTrainer) -> list[Job]:
    return await finals(client, [await post(client, "/ranks", trainer.registration(r)) for r in range(trainer.world)])


async def version(client: httpx.AsyncClient, trainer: ScriptedTrainer, number: int) -> tuple[Versions, VersionInfo]:
    """Publish the last step as version `number`; what `/versions` and `/versions/{number}` say then."""
    jobs = await finals(client, [await post(client, "/sync", trainer.sync(number, rank=r)) for r in range(2)])
    assert [j.state for j in jobs] == [JobState.COMMITTED] * 2, [j.problem for j in jobs]
    one = VersionInfo.model_validate_json((await client.get(f"/versions/{number}")).content)
    return Versions.model_validate_json((await client.get("/versions")).content), one


def diverged(metrics: str) -> list[float]:
    """The gauge of replicas that differ now, and how often that was counted."""
    lines = [x.rsplit(" ", 1) for x in metrics.splitlines()]
    names = ('dte_diverged_replicas{run="run"}', 'dte_degraded_total{name="diverged-replicas"}')
    return [float(v) for n in names for k, v in lines if k == n]


async def test_a_replica_that_diverged_is_said_until_it_is_equal_again(
    client: httpx.AsyncClient, trainer: ScriptedTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    norm, table = trainer.replicate("norm", 1), trainer.replicate("table", 1)
    assert [j.state for j in await register(client, trainer)] == [JobState.COMMITTED] * 2
    assert "diverged-replicas" not in (await client.get("/versions")).text

    trainer.step()
    trainer.flip(norm, element=95)
    trainer.flip(table)
    with caplog.at_level(logging.ERROR, "app.decision_events"):
        found, one = await version(client, trainer, 1)
    assert found.degraded["diverged-replicas"] == one.detail["diverged_replicas"] == 2
    assert "version 1: the ranks from 1 on hold another norm than the ranks from 0 on publish" in caplog.text
    assert "another table" in caplog.text
    assert diverged((await client.get("/metrics")).text) == [2, 2]

    trainer.step()
    trainer.flip(norm, bit=0)  # below what receivers store: the published bits are the same
    found, one = await version(client, trainer, 2)
    assert "diverged-replicas" not in found.degraded
    assert "diverged_replicas" not in one.detail
    assert [v.detail.get("diverged_replicas", 0) for v in found.versions] == [0, 2, 0]
    assert diverged((await client.get("/metrics")).text) == [0, 2]


async def test_it_is_an_event_and_the_published_bits_are_what_they_are(
    tmp_path: Path, trainer: ScriptedTrainer
) -> None:
    replica = trainer.replicate("norm", 1)
    async with publisher(tmp_path) as role:
        rig = Rig(role, trainer)
        await rig.register()
        events = role.node.events.subscribe()
        trainer.step()
        trainer.flip(replica)
        await rig.sync()
        await rig.check()
        event = await anext(events)
        while event.kind != "replicas-diverged":
            event = await anext(events)
        assert (event.run, event.data["version"], event.data["step"], event.data["replicas"]) == ("run", 1, 1, 1)
        assert event.data["first"] == {"tensor": "norm", "writer": 0, "holders": 1}


def changed(registration: RankRegistration, **changes: Any) -> RankRegistration:
    replicas = [registration.replicas[0].model_copy(update=changes), *registration.replicas[1:]]
    return registration.model_copy(update={"replicas": replicas})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slice": 1}, "numbered 0, 1, 2"),
        ({"cell": None}, "needs a cell"),
        ({"holders": None}, "needs a cell"),
        ({"detector": "certified"}, "detector 'dense'"),
        ({"holders": 2}, "in a world of 2"),
        ({"tensor": "nothing"}, "belongs to no declared tensor"),
        ({"numel": 95}, "has 96 elements"),
    ],
)
async def test_replicas_that_cannot_be_compared_are_refused(
    client: httpx.AsyncClient, trainer: ScriptedTrainer, changes: dict[str, Any], words: str
) -> None:
    trainer.replicate("norm", 1)
    response = await post(client, "/ranks", changed(trainer.registration(1), **changes))
    assert response.status_code == 422, response.text
    assert words in response.json()["detail"]
    slices = [s.model_copy(update={"holders": 0}) for s in trainer.registration(1).slices]
    response = await post(client, "/ranks", trainer.registration(1, slices=slices))
    assert "has holders" in response.json()["detail"]


async def test_holders_of_half_a_cell_fail_the_registration(
    client: httpx.AsyncClient, trainer: ScriptedTrainer
) -> None:
    trainer.replicate("norm", 1, stop=48)
    jobs = await register(client, trainer)
    assert [j.state for j in jobs] == [JobState.FAILED] * 2
    assert "hold 48 lanes of 'norm'" in (jobs[0].problem.detail if jobs[0].problem else "")


async def test_replicas_may_move_and_nothing_else(client: httpx.AsyncClient, trainer: ScriptedTrainer) -> None:
    replica = trainer.replicate("norm", 1)
    await register(client, trainer)
    trainer.step()

    async def refused(spec: SliceSpec, words: str) -> None:
        response = await post(client, "/sync", trainer.sync(None, rank=1, replica_handles=[spec]))
        assert response.status_code == 422, response.text
        assert words in response.json()["detail"]

    spec = trainer.replica_specs(1)[0]
    await refused(spec.model_copy(update={"slice": 1}), "replica 1 was never registered")
    await refused(spec.model_copy(update={"holders": 0}), "replica 0 may only move")
    replica.ref = trainer._alloc(96, "float32")
    replica.theta = trainer._view(replica.ref)
    replica.follow()
    trainer.flip(replica)
    moved = [
        trainer.sync(1, rank=0),
        trainer.sync(1, rank=1, replica_handles=trainer.replica_specs(1)),
    ]
    jobs = await finals(client, [await post(client, "/sync", m) for m in moved])
    assert [j.state for j in jobs] == [JobState.COMMITTED] * 2
    one = VersionInfo.model_validate_json((await client.get("/versions/1")).content)
    assert one.detail["diverged_replicas"] == 1
