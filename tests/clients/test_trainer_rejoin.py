"""A daemon that has lost its spool and does not know the rank any more: the trainer registers again and goes on."""

from __future__ import annotations

from typing import Literal

import httpx
import pytest
import torch

from clients.errors import Conflict, NotFound
from clients.protocol import RankRegistration
from clients.trainer import TorchSource
from tests.clients.trainer_double import FakeDaemon, problem, step_once


def forget(daemon: FakeDaemon, *, opening: int = 0) -> list[RankRegistration]:
    """Answer 404 until the rank registers again, then "not open yet" `opening` times; returns what it registers."""
    joined: list[RankRegistration] = []
    left = [opening]

    def asked(request: httpx.Request) -> httpx.Response | None:
        if not joined:
            return problem(404, "unknown-rank")
        if left[0]:
            left[0] -= 1
            return problem(409, "epoch-not-open")
        return None

    def ranks(request: httpx.Request) -> httpx.Response | None:
        joined.append(RankRegistration.model_validate_json(request.content))
        return None

    daemon.faults |= {"/ranks/0/cut": asked, "/sync": asked, "/ranks": ranks}
    return joined


def make(daemon: FakeDaemon, net: torch.nn.Module, mode: Literal["continue", "wait"] = "continue") -> TorchSource:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    source = TorchSource(net, optimizer, run="again", transport=daemon.transport, on_daemon_down=mode)
    source.register()
    step_once(net, optimizer)
    return source


def test_the_rank_registers_again_under_its_launch(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    with make(daemon, net) as source:
        first = daemon.registration
        joined = forget(daemon, opening=1)
        handle = source.sync(1)
        assert not handle.posted, "the epoch is not known to the daemon yet; training goes on"
        (body,) = joined
        assert first is not None
        assert (body.launch, body.rank, body.step) == (first.launch, first.rank, 0)
        assert body.hold > first.hold
        assert daemon.control is not None
        assert daemon.control.revoked >= body.hold, "nothing is read now, so the trainer is not held"
        assert body.slices == first.slices
        assert not daemon.syncs
        handle = source.sync(2)
        assert (handle.posted, handle.version) == (True, 0)
        assert len(joined) == 1


def test_one_that_waits_is_back_before_the_sync_returns(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    with make(daemon, net, "wait") as source:
        joined = forget(daemon, opening=1)
        assert source.sync(1).posted
        assert len(joined) == 1


def test_the_step_at_hand_is_synced_after_it(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    with make(daemon, net) as source:
        assert source.sync(5).posted
        joined = forget(daemon)
        handle = source.sync(6)
        assert handle.posted
        assert [b.step for b in joined] == [5]
        assert [s.step for s in daemon.syncs] == [5, 6]


def test_a_sync_that_only_accumulates_finds_out_too(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    with make(daemon, net) as source:
        joined = forget(daemon)
        assert not source.sync(1, publish=False).posted
        assert [b.step for b in joined] == [0]
        assert source.sync(2, publish=False).posted


def test_what_is_not_a_lost_spool_is_not_taken_for_one(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    with make(daemon, net) as source:
        joined = forget(daemon)
        daemon.faults["/ranks/0/cut"] = lambda _: problem(404, "not-found")
        with pytest.raises(NotFound):
            source.sync(1)
        assert not joined


def test_a_refused_registration_is_said_and_lets_the_trainer_go(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    with make(daemon, net) as source:
        forget(daemon)
        daemon.faults["/ranks"] = lambda _: problem(409, "state-conflict", "this launch has ended here")
        with pytest.raises(Conflict, match="has ended"):
            source.sync(1)
        with source.mutating():
            pass
