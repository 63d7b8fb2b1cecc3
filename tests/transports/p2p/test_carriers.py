"""Both carriers under the conformance suite; Gloo's members are threads here, processes in test_processes.py."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.transports.p2p.conformance import CarrierConformance
from tests.transports.p2p.synthetic import at_once, closing
from transports.p2p.base import Carrier
from transports.p2p.errors import ExchangeTimeout, P2PError, PeerLost
from transports.p2p.memory import MemoryGroup
from transports.p2p.process_group import connect, host_store

pytestmark = pytest.mark.p2p
HOST = "127.0.0.1"


class TestMemory(CarrierConformance):
    @pytest.fixture
    def carriers(self) -> Sequence[Carrier]:
        group = MemoryGroup(3)
        return [group.member(rank) for rank in range(3)]

    def test_unequal_lengths_are_an_error_on_both_sides(self, carriers: Sequence[Carrier]) -> None:
        received = carriers[1].receive(np.zeros(3, np.uint8), 0)
        sent = carriers[0].send(np.zeros(4, np.uint8), 1)
        for pending in (received, sent):
            with pytest.raises(P2PError, match="4 bytes were sent where 3"):
                pending.wait(time.monotonic() + 1)


def gloo_group(port: int, name: str, size: int) -> list[Carrier]:
    made = at_once(*(lambda r=r: connect((HOST, port), name, r, size, timeout_s=60) for r in range(size)))
    for carrier in made:
        if isinstance(carrier, Exception):
            raise carrier
    return made


class TestGloo(CarrierConformance):
    @pytest.fixture
    def carriers(self) -> Iterator[Sequence[Carrier]]:
        store, port = host_store(HOST)
        members = gloo_group(port, "a", 3)
        yield members
        closing(members)
        del store

    def test_a_new_group_works_after_a_broken_one(self) -> None:
        store, port = host_store(HOST)
        first = gloo_group(port, "first", 3)
        with pytest.raises(ExchangeTimeout):
            first[0].receive(np.zeros(1, np.uint8), 2).wait(time.monotonic() + 0.1)
        closing(first)
        second = gloo_group(port, "second", 2)
        got = np.zeros(1, np.uint8)
        pending = second[1].receive(got, 0)
        second[0].send(np.full(1, 7, np.uint8), 1).wait(time.monotonic() + 60)
        pending.wait(time.monotonic() + 60)
        assert got[0] == 7
        closing(second)
        del store


def test_what_never_comes_is_named() -> None:
    store, port = host_store(HOST)
    for error in at_once(*(lambda r=r: connect((HOST, port), "g", r, 3, timeout_s=0.7) for r in (0, 2))):
        assert isinstance(error, ExchangeTimeout)
        assert error.member == 1
        assert "1 of 3 members did not come in time: 1" in error.message
    del store


def test_nobody_hosts_the_store() -> None:
    store, port = host_store(HOST)
    del store
    with pytest.raises(ExchangeTimeout, match="nobody answers") as caught:
        connect((HOST, port), "g", 1, 2, timeout_s=0.3)
    assert caught.value.remedy


def test_the_store_goes_away_before_everybody_came() -> None:
    store, port = host_store(HOST)
    stores = [store]
    del store

    def lose() -> None:
        while not stores[0].check(["g/gather/1/1"]):
            pass
        stores.clear()

    found, _ = at_once(lambda: connect((HOST, port), "g", 1, 2, timeout_s=60), lose)
    assert isinstance(found, PeerLost)
    assert found.member == 0


def test_the_store_listens_on_one_address_only() -> None:
    store, port = host_store(HOST)
    with open("/proc/net/tcp") as v4, open("/proc/net/tcp6") as v6:
        listening = [line.split()[1] for line in [*v4, *v6] if line.split()[3] == "0A"]
    assert f"0100007F:{port:04X}" in listening
    assert not [a for a in listening if a.endswith(f":{port:04X}") and not a.startswith("0100007F")]
    del store


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        host_store("192.0.2.1")
