"""Syncs: the number that ranks agree on, the same step again, refusals, and a daemon that is away."""

from __future__ import annotations

import httpx
import pytest
import torch

from clients.errors import Conflict, DaemonUnavailable, JobFailed
from clients.protocol import JobState, Problem
from clients.trainer import TorchSource
from engine.errors import InvalidInput, StateConflict
from tests.clients.trainer_double import FakeDaemon, adamw, problem, step_once


def test_publish_follows_the_cut_and_the_slowest_rank(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    optimizer = adamw(net)
    others = [-1, 5, 5, 5]
    asked: list[int] = []

    def agree(mine: int) -> int:
        asked.append(mine)
        return min(mine, others.pop(0))

    with TorchSource(net, optimizer, run="cut", transport=daemon.transport, agree=agree) as source:
        daemon.version = 5
        assert source.sync(1).version is None  # another rank's last version is undecided
        assert source.sync(2).version == 5
        daemon.version = None
        assert source.sync(3).version is None  # ours is
        daemon.version = 5
        assert source.sync(4, publish=False).version is None
        assert asked == [5, 5, -1, -1]
        assert [r.version for r in daemon.syncs] == [None, 5, None, None]


def test_every_rank_agrees_even_when_it_has_an_error(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    """A rank that raised before the collective would leave the others waiting in it."""
    optimizer = adamw(net)
    asked: list[int] = []

    def agree(mine: int) -> int:
        asked.append(mine)
        return mine

    with TorchSource(net, optimizer, run="err", transport=daemon.transport, agree=agree) as source:
        optimizer.param_groups[0]["weight_decay"] = 200.0
        step_once(net, optimizer)
        with pytest.raises(InvalidInput, match="lr·weight_decay"):
            source.sync(1)
        assert asked == [-2], "the others learn that it failed"
        assert daemon.syncs == []
        optimizer.param_groups[0]["weight_decay"] = 0.0
        step_once(net, optimizer)
        source.sync(2)
        assert daemon.syncs[-1].steps == [2, 2]


def test_a_superseded_trainer_is_told(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    with TorchSource(net, adamw(net), run="old", transport=daemon.transport) as source:
        daemon.epoch = 2
        with pytest.raises(StateConflict, match="superseded"):
            source.sync(1)


def test_the_same_step_again_is_the_same_job(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="again", transport=daemon.transport) as source:
        step_once(net, optimizer)
        first = source.sync(7)
        assert source.sync(7).job_id == first.job_id
        assert len(daemon.syncs) == 1
        with pytest.raises(StateConflict, match="only go up"):
            source.sync(6)
        step_once(net, optimizer)
        with pytest.raises(StateConflict, match="changed since"):
            source.sync(7)


def test_a_lost_answer_is_asked_for_again(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    """The daemon took the sync, the answer was lost: the same request is posted again, not a new one."""
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="lost", transport=daemon.transport) as source:
        lost: list[httpx.Request] = []

        def lose_first(request: httpx.Request) -> httpx.Response | None:
            if lost:
                return None
            lost.append(request)
            raise httpx.ReadTimeout("lost", request=request)

        daemon.faults["/sync"] = lose_first
        assert source.sync(1).posted
        assert daemon.syncs[-1].model_dump_json().encode() == lost[0].content


def test_training_goes_on_without_a_daemon_and_the_next_sync_catches_up(
    daemon: FakeDaemon, net: torch.nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="down", transport=daemon.transport) as source:
        daemon.down = True
        for step in (1, 2):
            step_once(net, optimizer)
            handle = source.sync(step)
            assert not handle.posted
            with pytest.raises(DaemonUnavailable, match="was not posted"):
                handle.wait(1)
        assert source.stats.down == 2
        assert "Training goes on" in caplog.text
        daemon.down = False
        step_once(net, optimizer)
        assert source.sync(3).posted
        assert daemon.syncs[-1].steps == [3, 3]  # two steps went unread: the daemon sees it here


def test_a_version_that_could_not_be_posted_is_confessed(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    """Other ranks already work on that version: this rank's daemon must learn that its part will not come."""
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="confess", transport=daemon.transport) as source:
        step_once(net, optimizer)
        daemon.faults["/sync"] = lambda _: problem(503, "busy")
        assert not source.sync(1).posted
        del daemon.faults["/sync"]
        step_once(net, optimizer)
        source.sync(2)
        confessed, now = daemon.syncs
        assert (confessed.step, confessed.version, now.step) == (1, 0, 2)
        assert daemon.control is not None
        assert not daemon.control.intact(confessed.generation, confessed.hold)
        assert daemon.control.intact(now.generation, now.hold)


def test_waiting_for_the_daemon_when_told_to(
    daemon: FakeDaemon, net: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clients.trainer.daemon._RETRY_S", 0.0)
    optimizer = adamw(net)
    source = TorchSource(net, optimizer, run="wait", transport=daemon.transport, on_daemon_down="wait")
    with source:
        tries: list[int] = []

        def busy(_: httpx.Request) -> httpx.Response | None:
            tries.append(1)
            return problem(503, "busy") if len(tries) < 8 else None

        daemon.faults["/sync"] = busy
        assert source.sync(1).posted
        assert len(tries) == 8


def test_refusals_carry_the_problem_and_release_the_hold(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="refuse", transport=daemon.transport) as source:
        daemon.faults["/sync"] = lambda _: problem(409, "state-conflict", "epoch 1 is over")
        with pytest.raises(Conflict, match="epoch 1 is over") as refused:
            source.sync(1)
        assert refused.value.remedy == "Do better."
        assert refused.value.problem_code == "state-conflict"
        assert daemon.control is not None
        assert daemon.control.revoked == daemon.control.hold_number
        step_once(net, optimizer)


def test_a_failed_sync_is_said_at_the_next_one(
    daemon: FakeDaemon, net: torch.nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchSource(net, adamw(net), run="said", transport=daemon.transport) as source:
        handle = source.sync(1)
        assert handle.job_id is not None
        daemon.set_job(
            handle.job_id, state=JobState.FAILED, problem=Problem(title="Disk full", status=507, detail="no room")
        )
        with pytest.raises(JobFailed, match="no room"):
            handle.wait(1)
        source.sync(2)
        assert "Disk full" in caplog.text
