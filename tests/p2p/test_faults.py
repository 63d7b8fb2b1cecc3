"""Whoever dies, stops or comes back during P2P: the version stands, everybody ends bit-exact at it, and the next one
goes rank to rank again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.p2p.site import LARGE, Site

pytestmark = [pytest.mark.p2p, pytest.mark.faults]


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Any]:
    made: list[Site] = []

    def make(*args: Any, receivers: dict[str, int] | None = None, world: int = 2, **settings: Any) -> Site:
        site = Site(tmp_path, *args, **settings)
        made.append(site)
        site.start_trainer()
        site.start_rollout()
        site.train(world)
        for name, ranks in (receivers or {"a": 1, "b": 1}).items():
            site.receive(name, ranks)
        site.arrived(0)
        return site

    yield make
    for site in made:
        site.close()


# --- receivers ------------------------------------------------------------------------------------------------------


def test_a_receiver_dies_while_it_receives(sites: Any) -> None:
    site = sites()
    first = site.group(2)["group"]["id"]
    site.ship_p2p("ab")
    (b,) = site.receivers["b"].children
    b.child.stop()
    version = site.post()
    site.exchanging(version, waiting=3)  # the ranks that send to it, too
    b.child.kill()
    assert {s.value for s in site.landed()} == {"committed"}
    site.arrived(version, {"a": "p2p"}, names="a")
    site.receive("b")
    site.arrived(version, {"b": "store"}, names="b")
    view = site.group(2, other_than=[first])
    site.ship_p2p("ab")
    assert site.degraded("rollout").get("p2p-rejected", 0) == 0
    assert view["last"] == version


def test_a_receiver_that_was_only_stopped(sites: Any) -> None:
    site = sites(p2p_timeout_s=5.0)
    first = site.group(2)["group"]["id"]
    site.ship_p2p("ab")
    (b,) = site.receivers["b"].children
    b.child.stop()
    version = site.post()
    site.exchanging(version, waiting=3)
    assert {s.value for s in site.landed()} == {"committed"}
    site.arrived(version, {"a": "p2p"}, names="a")
    failed = site.until("the exchange is given up", lambda: (v := site.view())["trouble"] and v)
    assert not (failed["group"] or {}).get("exchanging")
    import time

    until = time.monotonic() + 45
    while time.monotonic() < until:
        time.sleep(1)
        v = site.view()
        print(round(time.monotonic() - until, 1), v["group"] and (v["group"]["id"][:4], v["group"]["state"], v["group"]["members"]), v["members"], v["trouble"][:200])
    site.receivers["a"].children[0].ask("stacks")
    print(site.receivers["a"].children[0].child.tail())
    b.child.go_on()
    site.arrived(version, {"b": "store"}, names="b")
    site.group(2, other_than=[first])
    site.ship_p2p("ab")
