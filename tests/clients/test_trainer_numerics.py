"""Training under a TorchSource computes, bit for bit, what it computes without one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from clients.protocol import JobState
from clients.trainer import TorchSource
from clients.trainer.formulas import implementation
from tests.clients.trainer_double import FakeDaemon, read


class Net(torch.nn.Module):
    """Tied weights, a transposed parameter, a scalar, a buffer, an unused parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(17, 12)
        self.body = torch.nn.Linear(12, 12)
        self.head = torch.nn.Linear(12, 17, bias=False)
        self.head.weight = self.embed.weight
        self.mix = torch.nn.Parameter(torch.randn(9, 12).t())
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.unused = torch.nn.Parameter(torch.randn(5))
        self.frozen = torch.nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        h = torch.tanh(self.body(self.embed(ids))) * self.scale
        return self.head(h) + (h @ self.mix).sum(-1, keepdim=True)


def train(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 17, (6,), generator=generator)
    loss = torch.nn.functional.cross_entropy(net(ids), ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(net: Net, optimizer: torch.optim.Optimizer, twin: Net, twin_optimizer: torch.optim.Optimizer) -> None:
    for (name, a), b in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(bits(a), bits(b)), name
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        mine, theirs = optimizer.state[p], twin_optimizer.state[q]
        for key in theirs:
            assert torch.equal(bits(mine[key]), bits(theirs[key])), key
            assert mine[key].dtype == theirs[key].dtype
            assert mine[key].stride() == theirs[key].stride()
        if theirs:
            assert list(mine) == list(theirs)


CASES: list[tuple[type[torch.optim.Adam], dict[str, Any], str]] = [
    (torch.optim.AdamW, {}, "single"),
    (torch.optim.AdamW, {"foreach": False}, "single"),
    (torch.optim.AdamW, {"foreach": True}, "foreach"),
    (torch.optim.AdamW, {"fused": True}, "fused"),
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True, "foreach": True}, "foreach"),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True}, "fused"),
    (torch.optim.Adam, {"weight_decay": 0.1}, "single"),
    (torch.optim.Adam, {"lr": torch.tensor(1e-2)}, "single-tensor-lr"),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "fused": True}, "fused-tensor-lr"),
]


@pytest.mark.parametrize(("kind", "options", "formula"), CASES)
def test_training_is_bitwise_unchanged(
    daemon: FakeDaemon, kind: type[torch.optim.Adam], options: dict[str, Any], formula: str
) -> None:
    torch.manual_seed(1)
    net = Net()
    twin = copy.deepcopy(net)
    options = {"lr": 1e-2} | options
    optimizer, twin_optimizer = kind(net.parameters(), **options), kind(twin.parameters(), **options)
    with TorchSource(net, optimizer, run="r", transport=daemon.transport) as source:
        assert daemon.registration is not None
        assert [g.name for g in daemon.registration.groups] == [f"torch-adamw/cpu/{formula}"]
        for step in range(1, 6):
            train(net, optimizer, step)
            source.sync(step)
            train(twin, twin_optimizer, step)
            assert_same(net, optimizer, twin, twin_optimizer)
            for name, spec in daemon.slices.items():
                if spec.exp_avg is None or spec.exp_avg_sq is None:
                    continue
                p = dict(net.named_parameters())[name]
                second = "max_exp_avg_sq" if options.get("amsgrad") else "exp_avg_sq"
                assert torch.equal(read(spec.exp_avg), physical(optimizer.state[p]["exp_avg"]))
                assert torch.equal(read(spec.exp_avg_sq), physical(optimizer.state[p][second]))
                assert torch.equal(read(spec.theta), physical(p))
    for step in range(6, 8):  # after close training goes on as before
        train(net, optimizer, step)
        train(twin, twin_optimizer, step)
        assert_same(net, optimizer, twin, twin_optimizer)


def physical(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in memory order."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))


def test_existing_state_is_kept_and_resumed(daemon: FakeDaemon) -> None:
    torch.manual_seed(2)
    net = Net()
    twin = copy.deepcopy(net)
    optimizer, twin_optimizer = (torch.optim.AdamW(n.parameters(), lr=1e-2) for n in (net, twin))
    for step in range(1, 4):
        train(net, optimizer, step)
        train(twin, twin_optimizer, step)
    with TorchSource(net, optimizer, run="r", transport=daemon.transport) as source:
        train(net, optimizer, 4)
        train(twin, twin_optimizer, 4)
        source.sync(4)
        assert_same(net, optimizer, twin, twin_optimizer)
        steps = dict(zip((s.tensor for s in daemon.slices.values()), daemon.syncs[-1].steps, strict=True))
        assert steps["body.weight"] == 4
        assert steps["unused"] == 0  # its gradient was None throughout
        assert steps["frozen"] == 0


def test_loading_optimizer_state_moves_it_in_again_and_is_said(daemon: FakeDaemon) -> None:
    torch.manual_seed(3)
    net = Net()
    twin = copy.deepcopy(net)
    optimizer, twin_optimizer = (torch.optim.AdamW(n.parameters(), lr=1e-2) for n in (net, twin))
    with TorchSource(net, optimizer, run="r", transport=daemon.transport) as source:
        for step in range(1, 3):
            train(net, optimizer, step)
            train(twin, twin_optimizer, step)
        saved, twin_saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(twin_optimizer.state_dict())
        train(net, optimizer, 3)
        train(twin, twin_optimizer, 3)
        source.sync(3)
        before = daemon.syncs[-1].generation
        optimizer.load_state_dict(saved)
        twin_optimizer.load_state_dict(twin_saved)
        train(net, optimizer, 4)
        train(twin, twin_optimizer, 4)
        assert_same(net, optimizer, twin, twin_optimizer)
        source.sync(4)
        sent = daemon.syncs[-1]
        assert sent.generation > before
        assert sent.generation % 2 == 0
        trained = {s.slice for s in daemon.slices.values() if s.detector == "certified"}
        assert {s.slice for s in sent.handles} == trained
        spec = daemon.slices["body.weight"]
        assert spec.exp_avg is not None
        assert torch.equal(read(spec.exp_avg), physical(optimizer.state[net.body.weight]["exp_avg"]))
        source.sync(4)
        train(net, optimizer, 5)
        source.sync(5)
        assert daemon.syncs[-1].handles == []


def test_parameter_data_swapped_away_is_brought_back(daemon: FakeDaemon) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with TorchSource(net, optimizer, run="r", transport=daemon.transport) as source:
        with source.mutating():
            net.body.weight.data = net.body.weight.data * 2
        expected = net.body.weight.detach().clone()
        source.sync(1)
        assert torch.equal(daemon.reads[-1]["body.weight"], expected.reshape(-1))
        assert [s.tensor for s in daemon.syncs[-1].handles] == ["body.weight"]
        assert source.stats.moved == 1


def test_hyperparameters_are_those_of_the_step_not_those_a_scheduler_set_after_it(daemon: FakeDaemon) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(
        [{"params": [net.body.weight]}, {"params": [net.body.bias], "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (n + 1))
    with TorchSource(net, optimizer, run="r", transport=daemon.transport) as source:
        for step in range(1, 4):
            used = [group["lr"] for group in optimizer.param_groups]
            train(net, optimizer, step)
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] != used[0]
            for group in optimizer.param_groups:
                group["weight_decay"] = 7.0
            source.sync(step)
            for group, decay in zip(optimizer.param_groups, (0.01, 0.0), strict=True):
                group["weight_decay"] = decay
            first, second = daemon.syncs[-1].hypers
            assert (first.lr, first.weight_decay) == (used[0], 0.01)
            assert (second.lr, second.weight_decay) == (used[1], 0.0)


def test_coupled_decay_is_reported_as_none(daemon: FakeDaemon) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=0.3)
    with TorchSource(net, optimizer, run="r", transport=daemon.transport) as source:
        train(net, optimizer, 1)
        source.sync(1)
        assert daemon.syncs[-1].hypers[0].weight_decay == 0.0


def test_masters_beside_bf16_parameters(daemon: FakeDaemon) -> None:
    torch.manual_seed(4)
    net = torch.nn.Linear(8, 8).bfloat16()
    masters = {n: p.detach().float().clone() for n, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    with TorchSource(net, optimizer, run="r", masters=masters, transport=daemon.transport) as source:
        for step in range(1, 4):
            for n, p in net.named_parameters():
                masters[n].grad = torch.randn_like(p, dtype=torch.float32)
            optimizer.step()
            with torch.no_grad():
                for n, p in net.named_parameters():
                    p.copy_(masters[n])
            source.sync(step)
            assert daemon.syncs[-1].steps == [step, step]
            for n, p in net.named_parameters():
                assert torch.equal(daemon.reads[-1][n].bfloat16(), p.detach().reshape(-1))
        assert {s.detector for s in daemon.slices.values()} == {"certified"}
        assert daemon.registration is not None
        assert {t.dtype for t in daemon.registration.tensors} == {"bfloat16"}


def test_default_implementation_is_torchs_own_choice() -> None:
    """The name must say what `adam()` really calls: seen here by replacing nothing, only by asking the profiler."""
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    for options in ({}, {"foreach": True}, {"fused": True}, {"foreach": False}):
        optimizer = torch.optim.AdamW([p], **options)  # type: ignore[arg-type]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
        ops = {e.key for e in profile.key_averages()}
        ran = "fused" if any("_fused_adamw" in o for o in ops) else None
        ran = ran or ("foreach" if any("_foreach_addcdiv" in o for o in ops) else "single")
        assert implementation(optimizer.param_groups[0]) == ran


def test_version_job_is_reported_through_the_handle(daemon: FakeDaemon) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with TorchSource(net, optimizer, run="r", transport=daemon.transport) as source:
        daemon.version = 3
        train(net, optimizer, 1)
        handle = source.sync(1)
        assert handle.version == 3
        assert handle.wait(5).state is JobState.COMMITTED
