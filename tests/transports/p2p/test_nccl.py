"""The NCCL carrier over a stand-in for torch's group, which is made of threads; benchmarks/gpu_p2p.py runs the real."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.transports.p2p.conformance import LONG_S, CarrierConformance
from tests.transports.p2p.synthetic import at_once
from transports.p2p.base import Bytes, Carrier
from transports.p2p.errors import CarrierUnavailable, DeviceShared, P2PError
from transports.p2p.memory import MemoryCarrier, MemoryGroup
from transports.p2p.nccl import NcclCarrier, environment, refuse_shared
from transports.p2p.process_group import connect, host_store

pytestmark = pytest.mark.p2p


class FakeWork:
    def __init__(self, call: Any) -> None:
        self._call = call

    def is_completed(self) -> bool:
        return self._call.done or self._call.error is not None

    def wait(self) -> None:
        if self._call.error is not None:
            raise RuntimeError("NCCL error: remote process exited or there was a network error")


class FakeGroup:
    """Takes no empty tensors, as one cannot rely on what NCCL makes of them."""

    def __init__(self, group: MemoryGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def _post(self, source: int, to: int, tensor: torch.Tensor, *, send: bool) -> FakeWork:
        assert tensor.numel()
        try:
            return FakeWork(self._group.post(source, to, tensor.numpy(), send=send))
        except P2PError as error:
            raise RuntimeError("NCCL error") from error

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> FakeWork:
        return self._post(self._rank, to, tensors[0], send=True)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> FakeWork:
        return self._post(source, self._rank, tensors[0], send=False)

    def abort(self) -> None:
        self._group.kill(self._rank)


class HostStaging:
    def put(self, data: Bytes) -> torch.Tensor:
        tensor = self.room(data.size)
        if data.size:
            tensor.copy_(torch.from_numpy(data))
        return tensor

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.empty(max(1, nbytes), dtype=torch.uint8)

    def take(self, tensor: torch.Tensor, into: Bytes) -> None:
        if into.size:
            torch.from_numpy(into).copy_(tensor)

    def run(self, post: Callable[[], Any]) -> Any:
        return post()


def members(size: int, peers: Callable[[int], Sequence[int]] | None = None) -> list[NcclCarrier]:
    group = MemoryGroup(size)
    out = []
    for rank in range(size):
        meeting: Any = MemoryCarrier(group, rank)  # it gathers and closes as a meeting does
        others = [m for m in (range(size) if peers is None else peers(rank)) if m != rank]
        out.append(NcclCarrier(FakeGroup(group, rank), meeting, {m: HostStaging() for m in others}))
    return out


class TestNccl(CarrierConformance):
    @pytest.fixture
    def carriers(self) -> Sequence[Carrier]:
        return members(3)


@pytest.mark.parametrize("senders", [1, 2, 3])
def test_pairs_are_connected_without_waiting_in_a_circle(senders: int) -> None:
    size = senders + 3
    sides = [range(senders), range(senders, size)]
    carriers = members(size, lambda rank: sides[rank < senders])
    deadline = time.monotonic() + LONG_S
    assert at_once(*(lambda c=c: c.warm(deadline) for c in carriers)) == [None] * size


def test_who_was_not_connected_cannot_be_sent_to() -> None:
    carriers = members(3, lambda rank: [0] if rank else [1, 2])
    with pytest.raises(CarrierUnavailable) as caught:
        carriers[1].send(np.zeros(1, np.uint8), 2)
    assert caught.value.member == 2


def test_two_members_on_one_gpu_are_refused() -> None:
    refuse_shared(["a", "b", "c"])
    with pytest.raises(DeviceShared, match="members 0 and 2 both use GPU a") as caught:
        refuse_shared(["a", "b", "a"])
    assert "gloo" in caught.value.remedy


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTE_TEST_SET", "before")
    monkeypatch.delenv("DTE_TEST_UNSET", raising=False)
    with environment({"DTE_TEST_SET": "x", "DTE_TEST_UNSET": "y"}):
        assert (os.environ["DTE_TEST_SET"], os.environ["DTE_TEST_UNSET"]) == ("x", "y")
    assert os.environ["DTE_TEST_SET"] == "before"
    assert "DTE_TEST_UNSET" not in os.environ


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_works() -> None:
    store, port = host_store("127.0.0.1")
    with pytest.raises(CarrierUnavailable) as caught:
        connect(("127.0.0.1", port), "g", 0, 1, kind="nccl", timeout_s=10)
    assert "gloo" in caught.value.remedy
    del store
