"""Ranks as processes over Gloo: the fuzz, and what is left when one of them dies or stops at an exact point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.transports.p2p.ranks import Pool, RankProcess, connected, every
from transports.p2p.process_group import host_store

pytestmark = [pytest.mark.p2p, pytest.mark.slow]
DEADLINE_S = 4.0
CONNECT_S = 5.0
SLACK_S = 30.0
"""Generous: what is asserted is that nobody waits for ever."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    assert set(pool.end()) <= {0}  # also those whose groups broke end without a crash


@pytest.fixture
def port() -> Iterator[int]:
    store, port = host_store("127.0.0.1")
    yield port
    del store


def done(ranks: list[RankProcess], senders: int, **command: Any) -> None:
    """Exchange a version that must arrive."""
    answers = every(ranks, do="exchange", senders=senders, receivers=len(ranks) - senders, **command)
    for number, answer in enumerate(answers):
        assert answer is not None
        assert answer.get("right", number < senders), answer


@pytest.mark.parametrize("seed", range(3))
def test_fuzz(pool: Pool, port: int, seed: int) -> None:
    senders, receivers = [(1, 1), (2, 2), (1, 3)][seed]
    ranks = pool.ranks(senders + receivers)
    connected(ranks, port, pool.group())
    for version in range(5):
        bucket = [1 << 16, 333, 1 << 30, 4096, 10_000][version]
        done(
            ranks, senders, seed=seed, operations=300, pairs=0.8, version=version, bucket=bucket, deadline_s=120.0
        )  # fmt: skip
    every(ranks, do="close")


def test_thousands_of_operations(pool: Pool, port: int) -> None:
    ranks = pool.ranks(4)
    connected(ranks, port, pool.group())
    for version, changed in enumerate((0.01, 0.0, 0.2)):
        done(
            ranks, 2, seed=9, operations=5000, version=version, changed=changed, bucket=1 << 18, deadline_s=120.0
        )  # fmt: skip
    every(ranks, do="close")


ROUNDS = [
    ("sender in round 1", 1, "counts", 7),
    ("sender in round 2", 1, "entries", 7),
    ("receiver in round 1", 3, "receive 0", 0),
    ("receiver in round 2", 3, "receive 9", 0),
]


@pytest.mark.faults
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("what", "victim", "point", "after"), ROUNDS, ids=[r[0].replace(" ", "-") for r in ROUNDS])
def test_a_rank_is_lost(pool: Pool, port: int, what: str, victim: int, point: str, after: int, name: str) -> None:
    ranks = pool.ranks(4)
    connected(ranks, port, pool.group())
    common = {"seed": 5, "operations": 200, "changed": 1.0, "bucket": 2048}
    done(ranks, 2, version=0, deadline_s=120.0, **common)
    # Killed ranks are noticed at once; stopped ones only by the deadline.
    deadline_s = DEADLINE_S if name == "SIGSTOP" else 120.0
    lost = {"do": "exchange", "senders": 2, "receivers": 2, "version": 1, "deadline_s": deadline_s, **common}
    for number, rank in enumerate(ranks):
        rank.ask(**lost, **({"die": (point, name), "after": after} if number == victim else {}))
    survivors = [r for n, r in enumerate(ranks) if n != victim]
    answers = {n: r.answer() for n, r in enumerate(ranks) if n != victim}
    expected = {"PeerLost"} if name == "SIGKILL" else {"ExchangeTimeout"}
    for number, answer in answers.items():
        assert answer is not None, number
        if (number < 2) == (victim < 2):  # no pair with the one that is lost
            assert answer.get("right", "sent" in answer), answer
        else:
            assert set(answer["failures"]) == {str(victim)}, answer
            assert set(answer["failures"].values()) == expected, answer
            assert str(victim) in answer["said"]
        assert answer["seconds"] < deadline_s + SLACK_S
    every(survivors, do="close")

    # The survivors go on in a group of their own, which the other joins again if it only slept.
    senders = 1 if victim < 2 else 2
    connected(survivors, port, pool.group())
    done(survivors, senders, version=0, deadline_s=120.0, **common)
    every(survivors, do="close")
    if name == "SIGKILL":
        assert ranks[victim].answer() is None
        return
    ranks[victim].resume()
    answer = ranks[victim].answer()
    assert answer is not None
    assert answer["error"] == "ExchangeFailed"
    ranks[victim].ask(do="close")
    ranks[victim].answer()
    connected(ranks, port, pool.group())
    done(ranks, 2, version=0, deadline_s=120.0, **common)
    every(ranks, do="close")


@pytest.mark.faults
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("point", ["gathered", "address"])
def test_a_rank_is_lost_while_connecting(pool: Pool, port: int, point: str, name: str) -> None:
    ranks = pool.ranks(3)
    group = pool.group()
    for number, rank in enumerate(ranks):
        extra = {"die": (point, name)} if number == 1 else {}
        rank.ask(do="connect", port=port, group=group, size=3, rank=number, timeout_s=CONNECT_S, **extra)
    survivors = [ranks[0], ranks[2]]
    for rank in survivors:
        answer = rank.answer()
        assert answer is not None
        assert answer["error"] in ("ExchangeTimeout", "PeerLost"), answer
        assert answer["seconds"] < CONNECT_S + SLACK_S
    connected(survivors, port, pool.group())
    done(survivors, 1, seed=1, operations=20, version=0, bucket=100, deadline_s=60.0)
    every(survivors, do="close")
    pool.drop(ranks[1])


@pytest.mark.faults
def test_the_rank_that_hosts_the_store_is_lost_while_connecting(pool: Pool) -> None:
    ranks = pool.ranks(3)
    ranks[0].ask(do="host")
    hosted = ranks[0].answer()
    assert hosted is not None
    port, group = hosted["port"], pool.group()
    for number, rank in enumerate(ranks):
        extra = {"die": ("gathered", "SIGKILL")} if number == 0 else {}
        rank.ask(do="connect", port=port, group=group, size=3, rank=number, timeout_s=CONNECT_S, **extra)
    for rank in ranks[1:]:
        answer = rank.answer()
        assert answer is not None
        assert answer["error"] in ("ExchangeTimeout", "PeerLost"), answer
        assert answer["seconds"] < CONNECT_S + SLACK_S
    assert ranks[0].answer() is None
