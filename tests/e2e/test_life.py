"""What happens to weights and optimizers in the life of a trainer, one thing after the other, over the whole way.

After every version the receiver holds the trainer's bits (`Line.ship` compares them); the tests say which of them a
delta could carry, which needed whole tiles, and what is refused.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from clients.protocol import Job, JobState
from engine.errors import InvalidInput, StateConflict
from tests.e2e.line import Line

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(300, 300) * 0.02)
        self.b = nn.Parameter(torch.randn(70000) * 0.02)
        self.late = nn.Parameter(torch.randn(50) * 0.02)
        self.frozen = nn.Parameter(torch.randn(40) * 0.02, requires_grad=False)
        self.base = nn.Parameter(torch.randn(40) * 0.02, requires_grad=False)
        self.register_buffer("side", torch.zeros(3))


class Life:
    def __init__(self, url: str) -> None:
        torch.manual_seed(11)
        self.net = Net()
        groups = [
            {"params": [self.net.a, self.net.frozen]},
            {"params": [self.net.b], "weight_decay": 0.1},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4)
        self.line = Line(url, self.net, self.optimizer)

    def gradients(self, *only: torch.Tensor) -> None:
        chosen = {id(p) for p in only or tuple(self.net.parameters())}
        for p in self.net.parameters():
            trained = p.requires_grad and id(p) in chosen
            p.grad = torch.randn_like(p) * 10 ** (torch.rand(()) * 4 - 3) if trained else None

    def step(self, *only: torch.Tensor) -> None:
        self.gradients(*only)
        self.optimizer.step()

    def exact(self) -> Job:
        """Ship what a delta must be able to carry."""
        job = self.line.ship()
        assert job.state is JobState.COMMITTED, job
        for trouble in ("dense_tiles", "failed_tiles", "mismatched_tiles"):
            assert job.detail.get(trouble, 0) == 0, job.detail
        return job

    def whole(self) -> Job:
        """Ship what no formula explains."""
        job = self.line.ship()
        assert job.state is JobState.COMMITTED, job
        assert job.detail["dense_tiles"] > 0, job.detail
        return job

    def unchanged(self) -> None:
        assert self.line.ship().state is JobState.UNCHANGED


@pytest.fixture
def life(url: str) -> Iterator[Life]:
    found = Life(url)
    yield found
    found.line.close()


def test_hyperparameters_and_gradients(life: Life) -> None:
    net, (first, second) = life.net, life.optimizer.param_groups
    life.step()
    life.exact()

    life.step()
    first["lr"], first["betas"], second["weight_decay"] = 5.0, (0.1, 0.2), 3.0  # after the step: none of its business
    life.exact()
    first["lr"], first["betas"], second["weight_decay"] = 1e-4, (0.5, 0.9), 0.1
    life.step()
    life.exact()

    life.step(net.a)
    assert life.exact().detail["slices_unchanged"] == 1
    for p in (net.a, net.b):
        p.grad = torch.zeros_like(p)
    life.optimizer.step()
    life.exact()

    first["lr"] = second["lr"] = 0.0
    life.step()
    life.unchanged()
    first["lr"] = second["lr"] = 1e-4

    def closure() -> float:
        life.gradients()
        return 1.0

    life.optimizer.step(closure)
    life.exact()

    def failing() -> float:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        life.optimizer.step(failing)
    life.unchanged()
    life.step()
    life.exact()

    second["lr"] = 20.0
    life.step()
    with pytest.raises(InvalidInput, match="is 1 or more"):
        life.line.ship()
    second["lr"] = 1e-4
    life.step()
    life.whole()
    life.step()
    life.exact()

    life.optimizer.add_param_group({"params": [net.late]})
    for _ in range(2):
        life.step()
        life.exact()  # no formula was registered for `late`: the worker keeps its previous bits

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for poison in (float("inf"), 0.0):
        life.optimizer.zero_grad()
        scaler.scale((net.a * net.a).sum()).backward()  # type: ignore[no-untyped-call]
        assert net.a.grad is not None
        net.a.grad[0] += poison
        scaler.step(life.optimizer)
        scaler.update()
        if poison:
            life.unchanged()
        else:
            life.exact()


def test_step_numbers(life: Life) -> None:
    line = life.line
    life.step()
    life.exact()
    assert line.source.sync(line.number).wait().version == 1
    life.step()
    with pytest.raises(StateConflict, match="weights have changed since"):
        line.source.sync(line.number)
    with pytest.raises(StateConflict, match="only go up"):
        line.source.sync(line.number - 1)
    assert line.ship(step=line.number + 7).detail["dense_tiles"] == 0  # numbers may be left out, steps may not
    life.step()
    life.step()
    assert life.whole().detail["slices_unjoined"] == 2
    life.step()
    assert line.ship(publish=False).state is JobState.ACCUMULATED
    life.step()
    life.exact()


def test_writes_beside_the_optimizer(life: Life) -> None:
    net, source = life.net, life.line.source
    life.step()
    life.exact()
    life.step()
    with source.mutating(), torch.no_grad():
        net.a.clamp_(-0.01, 0.01)
    life.whole()
    life.step()
    with torch.no_grad():
        net.a.clamp_(-0.009, 0.009)
    life.whole()
    with source.mutating(), torch.no_grad():
        net.a[0], net.a[1] = -0.0, 0.0
    life.whole()
    with source.mutating(), torch.no_grad():
        net.a[0], net.a[1] = 0.0, -0.0
    life.whole()

    weights = {n: p.detach().clone() for n, p in net.named_parameters()}
    life.step()
    assert life.line.ship(publish=False).state is JobState.ACCUMULATED
    with source.mutating(), torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(weights[name])
    life.unchanged()

    life.gradients()
    assert net.a.grad is not None
    assert net.b.grad is not None
    net.a.grad[0, 0], net.b.grad[3] = float("inf"), float("nan")
    life.optimizer.step()
    life.whole()
    life.step()
    life.whole()


def test_frozen_tensors_that_are_written_all_the_same(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    net, source = life.net, life.line.source
    life.step()
    life.exact()
    with source.mutating():
        net.base.data += 1.0  # as adapters are merged; torch does not count such a write
    life.whole()
    life.unchanged()
    with torch.no_grad():
        net.base.add_(1.0)
    life.whole()
    net.frozen.requires_grad_(True)
    for _ in range(2):
        life.step()
        life.whole()
    assert "frozen was declared frozen and has been written" in caplog.text


def test_checkpoints_and_copies(life: Life) -> None:
    net, optimizer = life.net, life.optimizer
    life.step()
    life.exact()
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    life.step()
    life.exact()
    net.load_state_dict(weights)
    life.whole()
    optimizer.load_state_dict(state)
    life.unchanged()
    life.step()
    life.exact()

    twin, saved = copy.deepcopy(net), io.BytesIO()
    torch.save(net.state_dict(), saved)
    assert saved.tell() < 1.1 * sum(t.numel() * t.element_size() for t in net.state_dict().values())
    copy.deepcopy(optimizer)
    with torch.no_grad():
        twin.a.zero_()
    life.unchanged()

    net.to(torch.bfloat16)
    with pytest.raises(StateConflict, match=r"is now torch\.bfloat16"):
        life.line.ship()
    net.to(torch.float32)
    life.line.ship()
    life.step()
    life.exact()

    net.register_buffer("side", torch.ones(3) * 7)
    life.line.ship()
    assert not life.line.differing()
