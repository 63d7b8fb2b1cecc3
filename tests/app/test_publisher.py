"""The publisher with real worker processes: every version it commits is exactly the trainer's bits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from clients.protocol import JobState
from tests.support.publishing import Rig, publisher
from tests.support.trainer import ScriptedTrainer

pytestmark = pytest.mark.anyio


@pytest.fixture
def trainer() -> Iterator[ScriptedTrainer]:
    made = ScriptedTrainer()
    yield made
    made.close()


@pytest.fixture
async def rig(tmp_path: Path, trainer: ScriptedTrainer) -> AsyncIterator[Rig]:
    async with publisher(tmp_path) as role:
        yield Rig(role, trainer)


async def test_versions_are_bit_exact_over_many_kinds_of_steps(rig: Rig) -> None:
    trainer = rig.trainer
    (job,) = await rig.register()
    assert job.state is JobState.COMMITTED
    assert job.version == 0
    assert trainer.released()

    # plain steps
    for _ in range(3):
        trainer.step()
        (job,) = await rig.sync()
        assert job.state is JobState.COMMITTED
        assert job.detail["failed_tiles"] == 0
        assert 0 < job.detail["entries"] < 80_000
        assert job.detail["dense_tiles"] == 0
    # several optimizer steps between two versions
    for _ in range(2):
        trainer.step()
        (job,) = await rig.sync(publish=False)
        assert job.state is JobState.ACCUMULATED
    trainer.step()
    (job,) = await rig.sync()
    assert job.detail["dense_tiles"] == 0
    # nothing changed: the number is spent, no version
    trainer.step_number += 1
    (job,) = await rig.sync()
    assert job.state is JobState.UNCHANGED
    # a parameter without a gradient, side tensors that move
    trainer.piece("bias").theta.add_(1.0)
    trainer.piece("mask").theta[6] = 201
    trainer.piece("table").theta[::7].mul_(1.5)
    trainer.step(without=["expert"])
    (job,) = await rig.sync()
    assert job.detail["slices_unchanged"] == 1
    assert job.detail["dense_tiles"] == 2
    # a step nobody read: the counters do not join up
    trainer.step()
    trainer.step(without=["norm"])
    (job,) = await rig.sync()
    assert job.detail["slices_unjoined"] == 3
    # lr 0, then a large one with much decay
    trainer.lr = 0.0
    trainer.step()
    await rig.sync()
    trainer.lr = 1.0
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.5
    trainer.step()
    await rig.sync()
    assert rig.chain.head is not None
    assert rig.chain.head.step == trainer.step_number
    await rig.check()


async def test_what_the_formula_cannot_explain_goes_dense_and_is_said(rig: Rig) -> None:
    trainer = rig.trainer
    await rig.register()
    trainer.step()
    await rig.sync()
    # a write outside the formula, in one parameter
    trainer.step()
    with trainer.ranks[0].control.mutating():
        trainer.piece("proj").theta.mul_(1.01)
    (job,) = await rig.sync()
    assert job.detail["failed_tiles"] + job.detail["mismatched_tiles"] >= 1
    # the same in a parameter that took no step
    trainer.step(without=["norm"])
    with trainer.ranks[0].control.mutating():
        trainer.piece("norm").theta[3] += 1.0
    (job,) = await rig.sync()
    assert job.detail["outside_tiles"] == 1
    # wrong hyperparameters
    trainer.step()
    sent = trainer.sync(None).hypers[0].model_copy(update={"lr": trainer.lr * 3})
    (job,) = await rig.sync(hypers=[sent])
    assert job.state is JobState.COMMITTED
    assert job.detail["dense_tiles"] > 0
    assert {"proof-failed", "write-outside-formula"} <= rig.role.node.degraded.snapshot().keys()
    await rig.check()


async def test_a_revoked_read_aborts_its_version_and_loses_nothing(rig: Rig) -> None:
    trainer = rig.trainer
    await rig.register()
    trainer.step()
    version = await rig.cut()
    assert version == 1
    request = trainer.sync(version)
    trainer.ranks[0].control.revoke()
    job, _ = await rig.role.sync(request)
    job = await rig.final(job)
    assert job.state is JobState.ABORTED
    assert job.problem is not None
    assert job.problem.type == "urn:dte:problem:revoked"
    await rig.chain.wait(1, 30)
    assert rig.chain.decisions[1].kind == "abort"
    trainer.step()
    (job,) = await rig.sync()
    assert job.state is JobState.COMMITTED
    assert job.version == 2
    await rig.check()


async def test_a_reposted_step_is_the_same_job(rig: Rig) -> None:
    trainer = rig.trainer
    await rig.register()
    trainer.step()
    request = trainer.sync(await rig.cut())
    first, new = await rig.role.sync(request)
    again, new_again = await rig.role.sync(request)
    assert (first.id, new, new_again) == (again.id, True, False)
    assert (await rig.final(first)).state is JobState.COMMITTED
    later, new_later = await rig.role.sync(request)
    assert (later.state, new_later) == (JobState.COMMITTED, False)


async def test_moved_memory_is_followed(rig: Rig) -> None:
    trainer = rig.trainer
    await rig.register()
    piece = trainer.piece("proj")
    assert piece.param is not None
    moved = trainer._alloc(piece.index.size, "float32")
    view = trainer._view(moved)
    view.copy_(piece.theta)
    piece.theta.fill_(float("nan"))
    piece.theta, piece.ref, piece.param.data = view, moved, view
    trainer.step()
    handles = [s for s in trainer.specs(0) if s.tensor == "proj"]
    (job,) = await rig.sync(handles=handles)
    assert job.state is JobState.COMMITTED
    assert job.detail["dense_tiles"] == 0
    assert torch.isfinite(piece.theta).all()
    trainer.step()
    await rig.sync()
    rig.expected.setdefault(0, trainer.bits())
    await rig.check(1, 2)


async def test_the_changed_fraction_is_observed_once_a_version(rig: Rig) -> None:
    await rig.register()
    rig.trainer.step()
    (job,) = await rig.sync()
    assert job.state is JobState.COMMITTED
    await rig.chain.refresh()
    registry = rig.role.node.metrics.registry
    assert registry.get_sample_value("dte_changed_fraction_count") == 2
    fractions = [c.totals.changed_fraction for c in rig.chain.commits()]
    assert registry.get_sample_value("dte_changed_fraction_sum") == pytest.approx(sum(fractions))
    assert fractions[0] == 0 < fractions[1]
