"""What a source declares of a model, an optimizer or slices, and what it refuses or says of them."""

from __future__ import annotations

import pytest
import torch

from clients.trainer import OwnedSlice, TorchSource
from clients.trainer.places import MemoryMode
from engine.errors import InvalidInput, StateConflict, UnsupportedOptimizer
from tests.clients.trainer_double import FakeDaemon, adamw, own_files, step_once


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


@pytest.mark.parametrize("memory", ["auto", "mirror"])
def test_views_of_a_larger_buffer_are_said_where_they_are_moved_out_of_it(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, memory: MemoryMode
) -> None:
    flat = torch.zeros(8)
    part = torch.nn.Parameter(flat[:4])
    slices = [OwnedSlice("w", (4,), part)]
    optimizer = torch.optim.AdamW([part], lr=1e-2)
    with TorchSource(None, optimizer, run="view", slices=slices, transport=daemon.transport, memory=memory):
        with torch.no_grad():
            part.fill_(1.0)
        assert (flat[0].item() == 1.0) is (memory == "mirror")
    assert ("moved out of them" in caplog.text) is (memory == "auto")
