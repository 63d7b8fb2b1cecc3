"""What cannot be published is refused before anything is touched, and the refusal says what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clients.rollout.torch import ModuleWeights
from clients.trainer import TorchSource
from engine.errors import InvalidInput, UnsupportedOptimizer
from tests.clients.trainer_double import FakeDaemon


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    double = FakeDaemon()
    yield double
    double.close()


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **options)


def files_of(run: str) -> list[str]:
    """What this process has in shared memory for a run."""
    return [f.name for f in Path("/dev/shm").glob(f"dte-{run}-*-{os.getpid()}-*")]


@pytest.mark.parametrize("name", ["a b", "a/b", "été", "x" * 600, "-a", "$", "a\n"])
def test_a_name_that_no_record_takes(daemon: FakeDaemon, name: str) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(3))})
    weights = model[name].detach().clone()
    with pytest.raises(InvalidInput, match="cannot be published under this name") as caught:
        TorchSource(model, adamw(model), run="odd-name", transport=daemon.transport).register()
    assert "names=" in caught.value.remedy
    assert not files_of("odd-name")
    assert torch.equal(model[name], weights)
    with TorchSource(model, adamw(model), run="odd-name", names={name: "fine"}, transport=daemon.transport):
        assert daemon.registration is not None
        assert [t.name for t in daemon.registration.tensors] == ["fine"]


@pytest.mark.parametrize(
    ("what", "ids"),
    [(w, {w: i}) for w in ("run", "launch") for i in ("bad id", "../x", "", "x" * 200, "é")],
)
def test_an_id_that_no_key_takes(what: str, ids: dict[str, str]) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidInput, match=f"cannot name a {what}"):
        TorchSource(model, adamw(model), **{"run": "fine", **ids})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": {"weight": "fp8"}}, "no receiver stores weight as 'fp8'"),
        ({"dtypes": {"wieght": "float16"}}, "dtypes names tensors that are not declared"),
        ({"detector": {"wieght": "dense"}}, "detector names tensors that are not declared"),
        ({"dtypes": {"weight": "float16"}, "detector": "certified"}, "certified detection is for bfloat16"),
    ],
)
def test_a_wish_that_cannot_be_met(daemon: FakeDaemon, options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidInput, match=message):
        TorchSource(model, adamw(model), run="wish", transport=daemon.transport, **options).register()
    assert not files_of("wish")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": torch.tensor(0.1, dtype=torch.bfloat16)}, "learning rate is a tensor of torch.bfloat16"),
        ({"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.95))}, "betas are tensors"),
        ({"capturable": True}, "capturable"),
        ({"differentiable": True}, "differentiable"),
    ],
)
def test_a_step_that_no_formula_has(daemon: FakeDaemon, options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedOptimizer, match=message) as caught:
        TorchSource(model, adamw(model, **options), run="step", transport=daemon.transport).register()
    assert "snapshot" in caught.value.remedy
    assert "dense" in caught.value.remedy


def test_a_double_learning_rate_is_a_float(daemon: FakeDaemon) -> None:
    model = nn.Linear(2, 2)
    lr = torch.tensor(0.1, dtype=torch.float64)
    with TorchSource(model, adamw(model, lr=lr), run="double", transport=daemon.transport) as source:
        source.sync(1)
        assert daemon.registration is not None
        assert [g.name for g in daemon.registration.groups] == ["torch-adamw/cpu/single"]
        assert (daemon.syncs[-1].hypers[0].lr, daemon.syncs[-1].hypers[0].lr_is_tensor) == (0.1, False)


def test_a_compiled_model_has_the_names_of_a_plain_one(daemon: FakeDaemon) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = set(model.state_dict())
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    with TorchSource(compiled, adamw(model), run="compiled", transport=daemon.transport):
        assert daemon.registration is not None
        assert {t.name for t in daemon.registration.tensors} == names
    assert {n for t in ModuleWeights(compiled).live().tensors for n in t.names} == names


def test_buffers_can_be_stored_in_another_dtype(daemon: FakeDaemon) -> None:
    model = nn.BatchNorm1d(2)
    with TorchSource(model, adamw(model), run="norm", dtypes={"running_mean": "bfloat16"}, transport=daemon.transport):
        assert daemon.registration is not None
        found = {t.name: t.dtype for t in daemon.registration.tensors}
        assert (found["running_mean"], found["running_var"]) == ("bfloat16", "float32")


def test_tensors_without_elements_are_not_missed(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(3)), "none": nn.Parameter(torch.zeros(0, 3))})
    with TorchSource(model, adamw(model), run="empty", transport=daemon.transport):
        assert daemon.registration is not None
        assert [t.name for t in daemon.registration.tensors] == ["w"]
    assert "not published" not in caplog.text
    assert [t.names for t in ModuleWeights(model).live().tensors] == [("w",)]
