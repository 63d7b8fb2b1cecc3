"""The trainer's side of the protocol: holds, mutations, cuts, a daemon that is away, and what is refused."""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Iterator

import httpx
import pytest
import torch

from clients.errors import Conflict, DaemonUnavailable, InvalidRequest, JobFailed
from clients.protocol import JobState, Problem
from clients.trainer import OwnedSlice, TorchSource
from clients.trainer.watch import ignore
from engine.errors import InvalidInput, StateConflict, UnsupportedOptimizer
from tests.clients.trainer_double import FakeDaemon, problem
from transports.memory import shm


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    double = FakeDaemon()
    yield double
    double.close()


@pytest.fixture
def net() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def adamw(net: torch.nn.Module, **options: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=options.pop("lr", 1e-2), **options)  # type: ignore[arg-type]


def step_once(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def own_files(run: str) -> list[str]:
    return [n for n in os.listdir(shm.SHM_DIR) if n.startswith(f"dte-{run}-")]


# --- holds and mutations ----------------------------------------------------------------------------------------------


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


# --- cuts -------------------------------------------------------------------------------------------------------------


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


# --- a daemon that is away --------------------------------------------------------------------------------------------


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


# --- registration -----------------------------------------------------------------------------------------------------


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


def test_everything_is_declared_once(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 3, bias=False)
            self.b = torch.nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.low = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            self.ice = torch.nn.Parameter(torch.ones(2), requires_grad=False)
            self.loose = torch.nn.Parameter(torch.ones(2))
            self.none = torch.nn.Parameter(torch.empty(0))
            self.register_buffer("bias", torch.zeros(3))
            self.register_buffer("table", torch.zeros(3), persistent=False)

    odd = Odd()
    optimizer = torch.optim.AdamW([odd.a.weight, odd.low], lr=1e-2)
    names = {"a.weight": "model.weight"}
    with TorchSource(odd, optimizer, run="odd", transport=daemon.transport, names=names) as source:
        assert {n: s.detector for n, s in daemon.slices.items()} == {
            "model.weight": "certified", "low": "snapshot", "ice": "frozen", "loose": "snapshot", "bias": "snapshot",
        }  # fmt: skip
        assert daemon.registration is not None
        dtypes = {t.name: t.dtype for t in daemon.registration.tensors}
        assert dtypes["bias"] == "float32"
        assert dtypes["ice"] == "bfloat16"
        assert source.aliases == {"b.weight": "model.weight"}
        assert "low: the snapshot detector" in caplog.text
        odd.bias.add_(1.0)  # a router bias, updated outside the optimizer
        odd.bias = odd.bias.clone()
        source.sync(1)
        assert daemon.reads[-1]["bias"].tolist() == [1.0, 1.0, 1.0]


def test_a_frozen_parameter_that_may_have_been_written_is_said(
    daemon: FakeDaemon, net: torch.nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    net.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([net.weight], lr=1e-2)

    def writes() -> int:
        assert daemon.registration is not None
        (number,) = (s.slice for s in daemon.registration.slices if s.detector == "frozen")
        return daemon.syncs[-1].steps[number]

    with TorchSource(net, optimizer, run="ice", transport=daemon.transport) as source:
        for step in (1, 2):
            step_once(net, optimizer)
            source.sync(step)
            assert writes() == 0  # nobody has to read it
        with source.mutating():
            net.bias.data += 1.0  # which torch does not count
        source.sync(3)
        assert writes() == 1
        source.sync(4)
        assert writes() == 1
        assert "declared frozen and has been written" not in caplog.text
        with torch.no_grad():
            net.bias.add_(1.0)  # announced or not
        source.sync(5)
        assert writes() == 2
        net.load_state_dict(net.state_dict())
        source.sync(6)
        assert writes() == 3
        assert "bias was declared frozen and has been written" in caplog.text
        assert torch.equal(daemon.reads[-1]["bias"], net.bias)


def test_a_replaced_parameter_is_noticed(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    optimizer = adamw(net)
    with TorchSource(net, optimizer, run="repl", transport=daemon.transport) as source:
        optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(3, 4))
        with pytest.raises(StateConflict, match="replaced by another object"):
            source.sync(1)


def test_a_parameter_moved_to_another_dtype_is_noticed(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    with TorchSource(net, adamw(net), run="half", transport=daemon.transport) as source:
        net.bfloat16()
        with pytest.raises(StateConflict, match="not what was registered"):
            source.sync(1)


def test_unsupported_optimizers_say_what_would_work(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    class Mine(torch.optim.AdamW):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            return super().step(closure)

    for optimizer in (torch.optim.SGD(net.parameters(), lr=0.1), Mine(net.parameters())):
        with pytest.raises(UnsupportedOptimizer, match=r"detector='snapshot'.*detector='dense'"):
            TorchSource(net, optimizer, run="sgd", transport=daemon.transport).register()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with TorchSource(net, optimizer, run="sgd", transport=daemon.transport, detector={
        "weight": "snapshot", "bias": "dense",
    }) as source:  # fmt: skip
        step_once(net, optimizer)
        source.sync(1)
        assert {n: s.detector for n, s in daemon.slices.items()} == {"weight": "snapshot", "bias": "dense"}
        assert daemon.syncs[-1].hypers == []
        assert daemon.syncs[-1].steps == [0, 0]
        assert torch.equal(daemon.reads[-1]["weight"], net.weight.detach().reshape(-1))


def test_a_subclass_that_keeps_the_step_is_supported(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    class Named(torch.optim.AdamW):
        pass

    with TorchSource(net, Named(net.parameters()), run="sub", transport=daemon.transport):
        assert {s.detector for s in daemon.slices.values()} == {"certified"}


def test_slices_share_a_model_between_ranks(daemon: FakeDaemon) -> None:
    whole = torch.arange(24.0)
    part = torch.nn.Parameter(whole[7:19].clone())
    optimizer = torch.optim.AdamW([part], lr=1e-2)
    slices = [
        OwnedSlice("w", (4, 6), part, offset=7),
        OwnedSlice("router.bias", (3,), torch.ones(3), dtype="float32", side=True),
    ]
    with TorchSource(None, optimizer, run="s", slices=slices, rank=1, world=2, transport=daemon.transport) as source:
        assert daemon.registration is not None
        assert (daemon.registration.rank, daemon.registration.world) == (1, 2)
        spec = daemon.slices["w"]
        assert (spec.numel, spec.blocks, spec.detector) == (12, [([12], 0, [1], 7, [1])], "certified")
        assert {t.name: t.shape for t in daemon.registration.tensors} == {"w": (4, 6), "router.bias": (3,)}
        part.grad = torch.ones(12)
        optimizer.step()
        source.sync(1)
        assert torch.equal(daemon.reads[-1]["w"], part.detach())


def test_bad_declarations_are_refused(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    shared = torch.zeros(8)
    p = torch.nn.Parameter(torch.zeros(4))
    cases: list[tuple[str, dict[str, object]]] = [
        ("either a model or slices", {}),
        ("ends at element", {"slices": [OwnedSlice("w", (4,), p, offset=1)]}),
        ("declared twice", {"slices": [OwnedSlice("w", (4,), p), OwnedSlice("w", (4,), torch.zeros(4), side=True)]}),
        (
            "disagree",
            {"slices": [OwnedSlice("w", (4,), p), OwnedSlice("w", (2, 3), torch.zeros(2), offset=4, side=True)]},
        ),
        ("share memory", {"slices": [OwnedSlice("a", (6,), shared[:6]), OwnedSlice("b", (4,), shared[4:])]}),
        ("nothing to publish", {"slices": []}),
        ("not contiguous", {"slices": [OwnedSlice("w", (2,), shared[::4])]}),
        ("unknown detector", {"model": net, "detector": "guess"}),
        ("not declared", {"model": net, "detector": {"nope": "dense"}}),
        ("no parameter of the model", {"model": net, "masters": {"nope": p}}),
        ("stale", {"model": torch.nn.Linear(2, 2).bfloat16(), "masters": {"weight": torch.full((2, 2), 9.0)}}),
        ("cannot be published", {"model": torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2).cfloat())])}),
        ("cannot have the certified", {"model": net, "detector": {"weight": "certified"}}),
    ]
    for message, options in cases:
        with pytest.raises(InvalidInput, match=message):
            TorchSource(run="bad", transport=daemon.transport, **options).register()  # type: ignore[arg-type]
    assert daemon.calls == []
    assert own_files("bad") == []


def test_a_name_of_none_leaves_a_tensor_out(daemon: FakeDaemon, net: torch.nn.Linear) -> None:
    def names(name: str) -> str | None:
        return None if name == "bias" else f"model.{name}"

    with TorchSource(net, adamw(net), run="n", transport=daemon.transport, names=names):
        assert list(daemon.slices) == ["model.weight"]


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
