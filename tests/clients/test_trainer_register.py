"""Registration: it waits for the epoch, and one that fails leaves everything as it was."""

from __future__ import annotations

import os

import httpx
import pytest
import torch

from clients.errors import InvalidRequest
from clients.protocol import JobState
from clients.trainer import TorchSource
from tests.clients.trainer_double import FakeDaemon, adamw, own_files, problem, step_once
from transports.memory import shm


def test_a_failed_registration_leaves_everything_as_it_was(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    optimizer = adamw(net)
    before = net.weight.detach().clone()
    daemon.faults["/ranks"] = lambda _: problem(422, "layout", "gap in weight")
    source = TorchSource(net, optimizer, run="fail", transport=daemon.transport)
    with pytest.raises(InvalidRequest, match="gap in weight"):
        source.register()
    assert own_files("fail") == []
    assert torch.equal(net.weight, before)
    step_once(net, optimizer)
    del daemon.faults["/ranks"]
    assert source.register() == 1
    source.close()
    assert own_files("fail") == []


def test_no_room_in_shared_memory_leaves_everything_as_it_was(
    daemon: FakeDaemon, net: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = adamw(net)
    monkeypatch.setattr("clients.trainer.arena.SEGMENT_BYTES", 1)
    real, made = shm.allocate, []

    def tight(name: str, size_bytes: int) -> shm.ShmFile:
        made.append(name)
        if len(made) == 3:
            raise shm.SharedMemoryFull("/dev/shm has no room.", remedy="Make it larger.")
        return real(name, size_bytes)

    monkeypatch.setattr("clients.trainer.arena.allocate", tight)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(shm.SharedMemoryFull, match="Make it larger"):
        TorchSource(net, optimizer, run="full", transport=daemon.transport).register()
    assert len(made) == 3
    assert own_files("full") == []
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    step_once(net, optimizer)


def test_registration_waits_for_the_epoch(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    polls: list[int] = []

    def opens_late(_: httpx.Request) -> httpx.Response | None:
        polls.append(1)
        daemon.set_job("register-0-0", epoch=None if len(polls) < 3 else 4, state=JobState.RELEASED)
        return None

    daemon.faults["/jobs/register-0-0"] = opens_late
    source = TorchSource(net, adamw(net), run="late", transport=daemon.transport)
    assert source.register() == 4
    assert len(polls) == 3
    source.close()


def test_files_of_dead_trainers_are_removed_at_the_next_start(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    pid = os.fork()
    if pid == 0:
        shm.allocate("dte-crashed-l-0-1-m0", 4096)
        os._exit(1)  # no handler runs: as after kill -9
    os.waitpid(pid, 0)
    assert own_files("crashed") != []
    with TorchSource(net, adamw(net), run="next", transport=daemon.transport):
        assert own_files("crashed") == []
        assert len(own_files("next")) == 2
    assert own_files("next") == []
