"""A trainer on a CUDA device, as its daemon sees it: what is exported, when again, for how long it is kept alive."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as torch_optimizer

from clients.protocol import CudaRef, MemoryRef
from clients.trainer import TorchSource
from clients.trainer.binding import Binding
from clients.trainer.formulas import formula_name, new_step_counter, unsupported_reason
from clients.trainer.home import PlainHome
from clients.trainer.places import Places
from clients.trainer.plan import Planner
from clients.trainer.shards import OwnedRun, OwnedShard
from engine.errors import StateConflict
from engine.layout.algebra import contiguous
from tests.clients.trainer_double import FakeDaemon
from tests.support.fake_cuda import UUID, FakeCuda
from tests.support.fused_adam import FusedAdam


class OnDevice(TorchSource):
    cuda: FakeCuda

    def _cuda(self) -> FakeCuda:
        return self.cuda


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as made:
        yield made


def source_of(daemon: FakeDaemon, cuda: FakeCuda) -> tuple[OnDevice, torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(12, 5)
    model.weight.data = cuda.tensor(model.weight)  # the bias lies on the host
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.state[model.weight] = {
        "step": torch.tensor(0.0),
        "exp_avg": cuda.tensor(torch.zeros(5, 12)),
        "exp_avg_sq": cuda.tensor(torch.zeros(5, 12)),
    }
    source = OnDevice(model, optimizer, run="r", transport=daemon.transport)
    source.cuda = cuda
    return source, model, optimizer


def step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_only_what_moved_is_exported_again(daemon: FakeDaemon, cuda: FakeCuda) -> None:
    source, model, optimizer = source_of(daemon, cuda)
    at = model.weight.data_ptr()
    with source:
        assert model.weight.data_ptr() == at
        spec = daemon.slices["weight"]
        assert isinstance(spec.theta, CudaRef)
        assert (spec.theta.device, spec.theta.numel, spec.theta.offset_bytes) == (UUID, 60, 0)
        assert isinstance(spec.exp_avg, CudaRef)
        assert isinstance(daemon.slices["bias"].theta, MemoryRef)
        assert daemon.registration is not None
        assert daemon.registration.mirrored == 0
        assert (source.stats.exported, source.stats.mirrored) == (3, 0)
        shared = cuda.calls.count("share")
        for number in (1, 2):
            cuda.calls.clear()
            step(model, optimizer)
            assert cuda.calls == ["record"]
            source.sync(number)
            assert cuda.calls == ["record", "record"]
            assert daemon.syncs[-1].handles == []
        assert shared == 3

        state = copy.deepcopy(optimizer.state_dict())
        for key in ("exp_avg", "exp_avg_sq"):
            state["state"][0][key] = cuda.tensor(state["state"][0][key])
        optimizer.load_state_dict(state)
        step(model, optimizer)
        source.sync(3)
        moved = daemon.syncs[-1].handles
        assert [s.tensor for s in moved] == ["weight", "bias"]  # the bias moves back into shared memory
        assert moved[0].theta == spec.theta
        assert moved[0].exp_avg != spec.exp_avg

        cuda.reallocated = True  # resized in place: same address, other memory
        source.sync(4)
        assert [s.tensor for s in daemon.syncs[-1].handles] == ["weight"]
        cuda.reallocated = False
        model.weight.data = cuda.tensor(torch.zeros(5, 13))
        with pytest.raises(StateConflict, match="shape"):
            source.sync(5)


def test_memory_lives_until_the_read_is_over_and_no_longer(daemon: FakeDaemon, cuda: FakeCuda) -> None:
    source, model, optimizer = source_of(daemon, cuda)
    with source:
        step(model, optimizer)
        source.sync(1)
        old = model.weight.data.untyped_storage()
        alive = weakref.ref(old)
        del old
        model.weight.data = cuda.tensor(torch.zeros(5, 12))  # unannounced, while the daemon may read
        exporter: Any = source._registered().binding.places._exporter
        assert len(exporter._kept) == 3
        with source.mutating():
            assert exporter._kept == []
        assert alive() is None


def group(**options: Any) -> dict[str, Any]:
    with FakeTensorMode():
        params = [torch.empty(4, device=options.pop("device", "cuda"), requires_grad=True) for _ in range(2)]
    return {
        "params": params, "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "foreach": None,
        "fused": None, "capturable": False, "differentiable": False, "amsgrad": False,
    } | options  # fmt: skip


def test_part_of_a_buffer_is_read_in_place_on_a_device_and_copied_on_the_host(cuda: FakeCuda) -> None:
    """What a precision-aware optimizer steps: a range of the model's own weights, which cannot be moved out of them."""
    buffer = torch.arange(64).bfloat16()
    for on_device in (True, False):
        kept = cuda.tensor(buffer) if on_device else buffer.clone()
        shard = kept[16:48]
        optimizer = FusedAdam([shard], master_weights=True, store_param_remainders=True)
        optimizer.initialize_state(shard, store_param_remainders=True)
        if on_device:
            state = optimizer.state[shard]
            state.update({key: cuda.tensor(value) for key, value in state.items()})
        planner = Planner([optimizer], names=None, detector=None, dtypes=None)
        run = OwnedRun("w", (32,), 0, 32, contiguous(0, 32, 32))
        planner.add_shard(OwnedShard("w", PlainHome(shard), (run,), mirrored=True))
        binding = Binding(planner.finish(), [optimizer], [], Places("auto", cuda))
        binding.move_in(lambda k, n=on_device: f"dte-part-{os.getpid()}-{int(n)}-{k}")
        (spec,) = binding.specs()
        refs = (spec.theta, spec.exp_avg, spec.exp_avg_sq, spec.remainder)
        assert {type(r) for r in refs} == {CudaRef if on_device else MemoryRef}
        assert [r and r.dtype for r in refs] == ["bfloat16", "float32", "float32", "int16"]
        assert shard.data_ptr() == kept.data_ptr() + 32
        assert binding.adopt() == []
        binding.refresh_mirrors()
        binding.move_out()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "foreach"),
        ({"foreach": False}, "single"),
        ({"fused": True}, "fused"),
        ({"fused": True, "capturable": True}, "fused"),
        ({"capturable": True}, "capturable"),
        ({"capturable": True, "lr": torch.tensor(1e-3)}, "capturable"),
        ({"fused": True, "lr": torch.tensor(1e-3)}, "fused"),
    ],
)
def test_a_group_on_a_device_has_the_formula_torch_runs(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr(
        torch_optimizer, "_foreach_supported_types", [*torch_optimizer._foreach_supported_types, FakeTensor]
    )
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    assert formula_name(optimizer, group(**options)) == f"torch-adamw/cuda/{name}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"capturable": True, "foreach": False}, "another order"),
        ({"foreach": False, "lr": torch.tensor(1e-3)}, "neither fused nor capturable"),
        ({"fused": True, "lr": torch.tensor(1e-3, dtype=torch.float64)}, "tensor of torch.float64"),
        ({"betas": (torch.tensor(0.9), 0.99), "foreach": False}, "betas are tensors"),
    ],
)
def test_what_no_formula_covers_on_a_device_is_said(options: dict[str, Any], reason: str) -> None:
    found = unsupported_reason(torch.optim.AdamW([torch.zeros(1)]), group(**options))
    assert found is not None
    assert reason in found


def test_a_group_on_two_kinds_of_devices_is_said() -> None:
    mixed = group(foreach=False)
    mixed["params"] = [*mixed["params"], torch.zeros(2, requires_grad=True)]
    assert unsupported_reason(torch.optim.AdamW([torch.zeros(1)]), mixed) == (
        "its parameters lie on several kinds of devices"
    )


def test_step_counters_lie_where_torch_puts_them() -> None:
    with FakeTensorMode():
        param = torch.empty(3, device="cuda")
        for options, device in (({}, "cpu"), ({"fused": True}, "cuda"), ({"capturable": True}, "cuda")):
            assert new_step_counter(group() | options, param).device.type == device
