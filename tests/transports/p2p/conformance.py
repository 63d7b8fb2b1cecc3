"""What any `Carrier` owes, as a class of tests: subclass it, give it a `carriers` fixture of three members, run it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from tests.transports.p2p.synthetic import at_once
from transports.p2p.base import Bytes, Carrier
from transports.p2p.errors import CarrierClosed, ExchangeTimeout, P2PError, PeerLost

pytestmark = pytest.mark.p2p
LONG_S = 60.0


def soon() -> float:
    return time.monotonic() + LONG_S


def numbers(seed: int, n: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


@pytest.mark.p2p
class CarrierConformance:
    def test_members_know_their_numbers(self, carriers: Sequence[Carrier]) -> None:
        assert [(c.rank, c.size) for c in carriers] == [(0, 3), (1, 3), (2, 3)]

    def test_bytes_arrive_in_order_and_empty_calls_match(self, carriers: Sequence[Carrier]) -> None:
        lengths = [0, 1, 0, 0, 70_000, 5, 0, 1_500_000, 3]
        sent = [numbers(seed, n) for seed, n in enumerate(lengths)]
        got = [np.zeros(n, np.uint8) for n in lengths]

        def send() -> None:
            for data in sent:
                carriers[0].send(data, 2).wait(soon())

        def receive() -> None:
            pending = [carriers[2].receive(into, 0) for into in got]
            for p in pending:
                p.wait(soon())

        assert at_once(send, receive) == [None, None]
        assert all(np.array_equal(a, b) for a, b in zip(sent, got, strict=True))

    def test_what_may_not_be_written_to_can_be_sent(self, carriers: Sequence[Carrier]) -> None:
        got = np.zeros(3, np.uint8)
        data = np.frombuffer(b"abc", np.uint8)
        pending = carriers[1].receive(got, 0)
        carriers[0].send(data, 1).wait(soon())
        pending.wait(soon())
        assert got.tobytes() == b"abc"

    @pytest.mark.parametrize("seed", range(3))
    def test_all_pairs_at_once(self, carriers: Sequence[Carrier], seed: int) -> None:
        rng = random.Random(seed)
        pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
        data = {p: [numbers(rng.getrandbits(30), rng.choice([0, 0, 1, 900])) for _ in range(40)] for p in pairs}
        got = {p: [np.zeros(d.size, np.uint8) for d in data[p]] for p in pairs}

        def send(a: int, b: int) -> None:
            for d in data[a, b]:
                carriers[a].send(d, b).wait(soon())

        def receive(a: int, b: int) -> None:
            for into in got[a, b]:
                carriers[b].receive(into, a).wait(soon())

        calls = [lambda f=f, p=p: f(*p) for p in pairs for f in (send, receive)]
        assert at_once(*calls) == [None] * len(calls)
        for pair in pairs:
            assert all(np.array_equal(a, b) for a, b in zip(data[pair], got[pair], strict=True))

    def test_gather_gives_everybody_everything(self, carriers: Sequence[Carrier]) -> None:
        for round_ in range(3):
            values = [bytes([round_, c.rank, 0]) for c in carriers]
            found = at_once(*(lambda c=c, v=v: c.gather(v, soon()) for c, v in zip(carriers, values, strict=True)))
            assert found == [values] * 3

    def test_gather_names_who_is_missing(self, carriers: Sequence[Carrier]) -> None:
        with pytest.raises(ExchangeTimeout) as caught:
            carriers[0].gather(b"x", time.monotonic() + 0.2)
        assert caught.value.member == 1
        assert caught.value.remedy

    def test_a_member_that_does_nothing_costs_the_deadline_and_the_group(self, carriers: Sequence[Carrier]) -> None:
        with pytest.raises(ExchangeTimeout) as caught:
            carriers[0].receive(np.zeros(4, np.uint8), 1).wait(time.monotonic() + 0.2)
        assert caught.value.member == 1

    def test_a_send_to_a_member_that_does_nothing(self, carriers: Sequence[Carrier]) -> None:
        with pytest.raises(ExchangeTimeout):
            carriers[0].send(np.zeros(30_000_000, np.uint8), 1).wait(time.monotonic() + 0.2)

    def test_a_member_that_leaves_is_lost_to_the_others_and_only_it(self, carriers: Sequence[Carrier]) -> None:
        got = np.zeros(2, np.uint8)
        waiting = carriers[0].receive(np.zeros(4, np.uint8), 1)
        other = carriers[0].receive(got, 2)
        carriers[1].close()
        with pytest.raises(PeerLost) as caught:
            waiting.wait(soon())
        assert caught.value.member == 1
        with pytest.raises(PeerLost):
            carriers[0].send(np.zeros(4, np.uint8), 1).wait(soon())
        carriers[2].send(numbers(1, 2), 0).wait(soon())
        other.wait(soon())
        assert np.array_equal(got, numbers(1, 2))

    def test_close_ends_what_waits_here(self, carriers: Sequence[Carrier]) -> None:
        posted = threading.Event()

        def wait() -> None:
            pending = carriers[0].receive(np.zeros(4, np.uint8), 1)
            posted.set()
            pending.wait(soon())

        def close() -> None:
            posted.wait()
            carriers[0].close()

        outcome, closed = at_once(wait, close)
        assert isinstance(outcome, CarrierClosed)
        assert closed is None

    def test_close_ends_a_gather(self, carriers: Sequence[Carrier]) -> None:
        outcome, _ = at_once(lambda: carriers[0].gather(b"x", soon()), carriers[0].close)
        assert isinstance(outcome, CarrierClosed)

    def test_closed_stays_closed(self, carriers: Sequence[Carrier]) -> None:
        carriers[0].close()
        carriers[0].close()
        for call in (
            lambda: carriers[0].send(np.zeros(1, np.uint8), 1).wait(soon()),
            lambda: carriers[0].receive(np.zeros(1, np.uint8), 1).wait(soon()),
            lambda: carriers[0].gather(b"", soon()),
        ):
            with pytest.raises(P2PError):
                call()
