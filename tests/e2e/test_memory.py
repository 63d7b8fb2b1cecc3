"""Trainers whose tensors are not moved: copies made at every sync, and devices that the daemon cannot map."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from clients.protocol import JobState
from clients.trainer import TorchSource
from engine.errors import InvalidInput
from tests.e2e.line import Line, bits
from tests.e2e.odd import Odd, give_gradients, stir_buffers
from tests.e2e.test_optimizers import ADAMS
from tests.support.fake_cuda import FakeCuda
from transports.memory.cuda_ipc import DeviceMemoryError

pytestmark = pytest.mark.slow

TROUBLES = ("mismatched_tiles", "slices_unjoined", "outside_tiles", "failed_tiles")


@pytest.mark.parametrize("kind", ["default", "foreach-amsgrad", "fused", "tensor-lr"])
def test_mirrored_tensors_arrive_and_stay_where_they_are(url: str, kind: str) -> None:
    torch.manual_seed(1)
    model = Odd()
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = ADAMS[kind](model.parameters()), ADAMS[kind](twin.parameters())
    at = {n: p.data_ptr() for n, p in model.named_parameters()}
    with Line(url, model, optimizer, memory="mirror") as line:
        assert line.source.stats.mirrored > 0
        assert line.source.stats.exported == 0
        assert line.control.versions().degraded["mirrored"] > 0
        for step in range(1, 6):
            for m, o in ((model, optimizer), (twin, twin_optimizer)):
                give_gradients(m.parameters(), step)
                o.step()
                stir_buffers(m, step)
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                model.load_state_dict(copy.deepcopy(model.state_dict()))
            job = line.ship()
            assert job.state is JobState.COMMITTED
            assert [job.detail.get(t, 0) for t in TROUBLES] == [0] * 4, job.detail
        assert at == {n: p.data_ptr() for n, p in model.named_parameters()}
        for (n, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (bits(mine) == bits(theirs)).all(), n
        with torch.no_grad():  # written through the back door, frozen or not
            model.frozen.add_(1)
            model.tile[5] += 3.0
        give_gradients(model.parameters(), 9)
        optimizer.step()
        job = line.ship()
        assert job.state is JobState.COMMITTED


def test_a_revoked_hold_is_made_good_by_the_next_sync(url: str) -> None:
    model = Odd()
    optimizer = ADAMS["default"](model.parameters())
    with Line(url, model, optimizer, memory="mirror") as line:
        give_gradients(model.parameters(), 1)
        optimizer.step()
        handle = line.source.sync(1)
        line.source._registered().gate.revoke("the test takes it back")
        handle.wait(60.0)
        give_gradients(model.parameters(), 2)
        optimizer.step()
        assert line.ship(2).state is JobState.COMMITTED


class OnFakeDevice(TorchSource):
    """A trainer on a device that only this process knows."""

    cuda: FakeCuda

    def _cuda(self) -> FakeCuda:
        return self.cuda


def device_model(cuda: FakeCuda) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    for p in model.parameters():
        p.data = cuda.tensor(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": cuda.tensor(torch.zeros_like(p)),
            "exp_avg_sq": cuda.tensor(torch.zeros_like(p)),
        }
    return model, optimizer


def on_device(cuda: FakeCuda, url: str, run: str, memory: str) -> tuple[OnFakeDevice, Line]:
    model, optimizer = device_model(cuda)
    line = Line(url, model, optimizer, run=run, register=False)
    line.source.close()
    source = OnFakeDevice(model, optimizer, daemon=url, run=run, hold_timeout_s=120.0, memory=memory)  # type: ignore[arg-type]
    source.cuda = cuda
    line.source = source
    return source, line


def test_a_device_that_the_daemon_cannot_map_is_mirrored(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with FakeCuda() as cuda:
        source, line = on_device(cuda, url, "unmapped", "auto")
        with line, caplog.at_level(logging.WARNING):
            source.register()
            assert "memory='mirror'" in caplog.text
            assert source.stats.mirrored == 3 * 6
            assert cuda.calls.count("share") == 3 * 6
            line.receive()
            line.arrived(0)
            optimizer = source._optimizers[0]
            for step in (1, 2):
                give_gradients(line.model.parameters(), step)
                optimizer.step()
                job = line.ship()
                assert job.state is JobState.COMMITTED
                assert [job.detail.get(t, 0) for t in TROUBLES] == [0] * 4, job.detail


def test_asked_for_in_place_it_is_refused_and_left_as_it_was(url: str) -> None:
    with FakeCuda() as cuda:
        source, line = on_device(cuda, url, "in-place-only", "ipc")
        before = [p.detach().clone() for p in line.model.parameters()]
        with line, pytest.raises(Exception, match="CUDA device") as refused:
            source.register()
        assert "ipc=host" in getattr(refused.value, "remedy", "")
        assert all(torch.equal(a, b) for a, b in zip(before, line.model.parameters(), strict=True))


def test_in_place_without_a_device_is_refused_clearly(url: str) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(InvalidInput, match="no declared tensor lies on a CUDA device"):
        TorchSource(model, torch.optim.AdamW(model.parameters()), daemon=url, run="none", memory="ipc").register()
    with pytest.raises(InvalidInput, match="'auto', 'ipc' or 'mirror'"):
        TorchSource(model, torch.optim.AdamW(model.parameters()), daemon=url, run="none", memory="disk")  # type: ignore[arg-type]


def test_an_export_that_cuda_refuses_is_mirrored_or_an_error(url: str) -> None:
    for memory in ("auto", "ipc"):
        with FakeCuda(refuses="share") as cuda:
            source, line = on_device(cuda, url, f"refused-{memory}", memory)
            with line:
                if memory == "ipc":
                    with pytest.raises(DeviceMemoryError, match="operation not supported"):
                        source.register()
                else:
                    source.register()
                    assert source.stats.mirrored == 3 * 6
