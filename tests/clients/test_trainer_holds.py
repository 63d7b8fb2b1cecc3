"""Holds and mutations: a step waits for the read that is running, and for nothing else."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch

from clients.protocol import JobState
from clients.trainer import TorchSource
from clients.trainer.watch import ignore
from tests.clients.trainer_double import FakeDaemon, adamw, step_once


def test_step_waits_for_the_running_read_and_only_for_it(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="hold", transport=daemon.transport) as source:
        step_once(net, optimizer)
        daemon.auto_release = False
        source.sync(1)
        control = daemon.control
        assert control is not None
        before = net.weight.detach().clone()
        seen: list[bool] = []

        def reader() -> None:
            # The optimizer step below cannot have begun: its hold is not released.
            seen.append(torch.equal(before, net.weight.detach()) and control.generation == daemon.syncs[-1].generation)
            control.release(daemon.syncs[-1].hold)

        thread = threading.Timer(0.05, reader)
        thread.start()
        step_once(net, optimizer)
        thread.join()
        assert seen == [True]
        assert not torch.equal(before, net.weight.detach())
        assert control.generation == daemon.syncs[-1].generation + 2
        assert source.stats.revoked == 0
        assert source.stats.last_hold_ms > 0


def test_a_read_that_takes_too_long_is_revoked(
    daemon: FakeDaemon, net: torch.nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="slow", transport=daemon.transport, hold_timeout_s=0.01) as source:
        daemon.auto_release = False
        source.sync(1)
        request = daemon.syncs[-1]
        step_once(net, optimizer)
        assert source.stats.revoked == 1
        assert "revoked" in caplog.text
        assert daemon.control is not None
        assert not daemon.control.intact(request.generation, request.hold)
        daemon.control.release(request.hold)  # too late, and harmless
        daemon.auto_release = True
        source.sync(2)
        assert daemon.control.intact(daemon.syncs[-1].generation, daemon.syncs[-1].hold)


@pytest.mark.parametrize("how", ["gone", "failed", "unknown"])
def test_a_read_nobody_works_on_does_not_hold_the_trainer(
    daemon: FakeDaemon, net: torch.nn.Linear, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clients.trainer.gate._LOOK_S", 0.01)
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="dead", transport=daemon.transport, hold_timeout_s=3600) as source:
        daemon.auto_release = False
        handle = source.sync(1)
        assert handle.job_id is not None
        if how == "gone":
            daemon.down = True
        elif how == "failed":
            daemon.set_job(handle.job_id, state=JobState.FAILED)
        else:
            daemon.jobs.clear()
        step_once(net, optimizer)
        assert source.stats.revoked == 1


def test_generation_is_odd_inside_and_even_outside_every_mutation(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    optimizer = adamw(net)
    inside: list[int] = []
    with TorchSource(net, optimizer, run="gen", transport=daemon.transport) as source:
        control = daemon.control
        assert control is not None

        def closure() -> torch.Tensor:
            inside.append(control.generation)
            return net(torch.ones(1, 4)).sum()

        optimizer.step(closure)
        with source.mutating():
            inside.append(control.generation)
        handle = optimizer.register_load_state_dict_post_hook(lambda _: inside.append(control.generation), prepend=True)
        optimizer.load_state_dict(optimizer.state_dict())
        handle.remove()
        model_hook = net.register_load_state_dict_pre_hook(lambda *_: inside.append(control.generation))
        net.load_state_dict(net.state_dict())
        model_hook.remove()
        assert len(inside) == 4
        assert all(g % 2 == 1 for g in inside)
        assert len(set(inside)) == 4
        assert control.generation % 2 == 0


def test_a_step_that_raised_does_not_leave_memory_locked(
    daemon: FakeDaemon, net: torch.nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="raise", transport=daemon.transport) as source:

        def closure() -> float:
            raise RuntimeError("out of luck")

        with pytest.raises(RuntimeError, match="out of luck"):
            optimizer.step(closure)
        source.sync(1)
        assert daemon.syncs[-1].generation % 2 == 0
        assert "did not return" in caplog.text


def test_copies_and_pickles_of_the_model_do_not_touch_the_source(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="copy", transport=daemon.transport):
        control = daemon.control
        assert control is not None
        before = control.generation
        copy.deepcopy(net).load_state_dict(net.state_dict())
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        torch.load(file, weights_only=False).load_state_dict(net.state_dict())
        small = io.BytesIO()
        torch.save(net.weight, small)
        assert small.tell() < 4096  # a tensor's storage is its own bytes, not the whole shared file
        assert control.generation == before
        assert ignore(1, 2) is None  # type: ignore[func-returns-value]
