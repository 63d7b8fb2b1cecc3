"""The trainer's calls over HTTP: what is refused, with which problem, and what a refusal leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from clients.protocol import Job, RankRegistration
from tests.support.publishing import final_job, post
from tests.support.trainer import ScriptedTrainer

pytestmark = pytest.mark.anyio


@pytest.fixture
def trainer() -> Iterator[ScriptedTrainer]:
    made = ScriptedTrainer()
    yield made
    made.close()


async def registered(client: httpx.AsyncClient, trainer: ScriptedTrainer) -> Job:
    return await final_job(client, await post(client, "/ranks", trainer.registration()))


def refused(response: httpx.Response, status: int, code: str, *words: str) -> None:
    problem = response.json()
    assert response.status_code == status, problem
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["type"] == f"urn:dte:problem:{code}", problem
    assert problem["remedy"]
    for word in words:
        assert word in problem["detail"]


def broken(registration: RankRegistration, which: str, **changes: Any) -> RankRegistration:
    """The registration with the slice of tensor `which` changed."""
    slices = [s.model_copy(update=changes) if s.tensor == which else s for s in registration.slices]
    return registration.model_copy(update={"slices": slices})


async def test_registrations_that_cannot_work(client: httpx.AsyncClient, trainer: ScriptedTrainer) -> None:
    good = trainer.registration()
    norm = next(s for s in good.slices if s.tensor == "norm")
    cases: list[tuple[RankRegistration, str, tuple[str, ...]]] = [
        (broken(good, "norm", tensor="nobody"), "invalid-input", ("nobody",)),
        (broken(good, "norm", exp_avg=None), "invalid-input", ("norm", "exp_avg")),
        (broken(good, "norm", group=3), "invalid-input", ("group 3",)),
        (broken(good, "norm", theta=norm.theta.model_copy(update={"dtype": "float16"})), "invalid-input", ("float16",)),
        (broken(good, "norm", theta=norm.theta.model_copy(update={"numel": 95})), "invalid-input", ("95",)),
        (broken(good, "norm", blocks=[([95], 0, [1], 0, [1])]), "layout", ()),
        (broken(good, "norm", blocks=[([96], 0, [1], 1, [1])]), "layout", ()),
        (broken(good, "mask", numel=6, theta=trainer.piece("mask").ref.model_copy(update={"numel": 6}),
                blocks=[([6], 0, [1], 0, [1])]), "layout", ("mask",)),
        (broken(good, "norm", slice=77), "invalid-input", ("numbered",)),
        (good.model_copy(update={"rank": 4}), "invalid-input", ("rank 4",)),
        (good.model_copy(update={"groups": [good.groups[0].model_copy(update={"name": "lion"})]}),
         "unsupported-optimizer", ("lion",)),
        (good.model_copy(update={"tensors": [*good.tensors, good.tensors[0]]}), "invalid-input", ("twice",)),
    ]  # fmt: skip
    for registration, code, words in cases:
        refused(await post(client, "/ranks", registration), 422, code, *words)
    unsupported = (await post(client, "/ranks", cases[10][0])).json()
    assert "snapshot" in unsupported["remedy"]
    malformed = await client.post("/ranks", json={"run": "../etc", "rank": -1})
    refused(malformed, 422, "invalid-request")
    # nothing of these stayed: the rank is still unknown
    refused(await client.get("/ranks/0/cut"), 404, "unknown-rank")


async def test_memory_that_is_not_there_or_too_small(client: httpx.AsyncClient, trainer: ScriptedTrainer) -> None:
    good = trainer.registration()
    norm = next(s for s in good.slices if s.tensor == "norm")
    for change in ({"file": "dte-run-nothing-of-this-name"}, {"offset_bytes": 1 << 40}, {"offset_bytes": 2}):
        launch = f"bad-{len(str(change))}"
        bad = broken(good, "norm", theta=norm.theta.model_copy(update=change)).model_copy(update={"launch": launch})
        response = await post(client, "/ranks", bad)
        assert response.status_code == 202
        job = await final_job(client, response)
        assert job.state == "failed"
        assert job.problem is not None
        assert "norm" in job.problem.detail or "dte-" in job.problem.detail
    # every one of them gave the hold back
    assert trainer.ranks[0].control.released >= good.hold


async def test_syncs_that_do_not_fit(client: httpx.AsyncClient, trainer: ScriptedTrainer) -> None:
    refused(await post(client, "/sync", trainer.sync(0)), 404, "unknown-rank", "not registered")
    body = trainer.registration()
    first = await post(client, "/ranks", body)
    again = await post(client, "/ranks", body)
    assert again.json()["id"] == first.json()["id"]
    refused(await post(client, "/ranks", trainer.registration()), 409, "state-conflict", "another body")
    job = await final_job(client, first)
    assert (job.state, job.version, job.epoch) == ("committed", 0, 1)

    trainer.step()
    refused(await post(client, "/sync", trainer.sync(1, launch="other")), 404, "unknown-rank")
    refused(await post(client, "/sync", trainer.sync(1, epoch=2)), 409, "state-conflict", "epoch 2")
    refused(await post(client, "/sync", trainer.sync(5)), 409, "state-conflict", "version 5", "which is 1")
    refused(await post(client, "/sync", trainer.sync(None, step=0)), 409, "state-conflict", "step 0")
    refused(await post(client, "/sync", trainer.sync(None, steps=[1])), 422, "invalid-input", "step counters")
    refused(await post(client, "/sync", trainer.sync(None, hypers=[])), 422, "invalid-input", "hyperparameter")
    moved = trainer.specs(0)[0].model_copy(update={"detector": "dense"})
    refused(await post(client, "/sync", trainer.sync(None, handles=[moved])), 422, "invalid-input", "may only move")
    # a refused sync that had promised a number says so to the other ranks
    cut = (await client.get("/ranks/0/cut")).json()
    assert cut["version"] == 1
    hyper = trainer.sync(None).hypers[0].model_copy(update={"lr": 2.0, "weight_decay": 0.5})
    refused(await post(client, "/sync", trainer.sync(1, hypers=[hyper])), 422, "invalid-input", "cannot be undone")
    for _ in range(2000):
        cut = (await client.get("/ranks/0/cut")).json()
        if cut["version"] is not None:
            break
    assert cut["version"] == 2
    response = await post(client, "/sync", trainer.sync(2))
    assert response.status_code == 202
    job = await final_job(client, response)
    assert (job.state, job.version) == ("committed", 2)
    assert (await post(client, "/sync", trainer.sync(2))).status_code == 200
    refused(await client.get("/jobs/nothing"), 404, "unknown-job")
    metrics = (await client.get("/metrics")).text
    assert 'dte_jobs_total{kind="sync",state="committed"} 1.0' in metrics

    assert (await client.delete("/ranks/0")).status_code == 204
    refused(await client.delete("/ranks/0"), 404, "unknown-rank")
    trainer.step()
    refused(await post(client, "/sync", trainer.sync(3)), 404, "unknown-rank")


async def test_a_cover_with_a_gap_fails_the_registration(client: httpx.AsyncClient, trainer: ScriptedTrainer) -> None:
    piece = trainer.piece("norm")
    assert piece.m is not None
    assert piece.v is not None
    short = {
        "numel": 90,
        "blocks": [([90], 0, [1], 0, [1])],
        "theta": piece.ref.model_copy(update={"numel": 90}),
        "exp_avg": piece.m.model_copy(update={"numel": 90}),
        "exp_avg_sq": piece.v.model_copy(update={"numel": 90}),
    }
    response = await post(client, "/ranks", broken(trainer.registration(), "norm", **short))
    job = await final_job(client, response)
    assert job.state == "failed"
    assert job.problem is not None
    assert job.problem.type == "urn:dte:problem:layout"
    assert "norm" in job.problem.detail
    assert trainer.ranks[0].control.released >= trainer.ranks[0].hold
    refused(await client.get("/ranks/0/cut"), 422, "layout")
