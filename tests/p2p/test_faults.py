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
    site.exchanging(version, waiting=1)
    b.child.kill()
    assert {s.value for s in site.landed()} == {"committed"}
    site.arrived(version, {"a": "p2p"}, names="a")
    site.receive("b")
    site.arrived(version, {"b": "store"}, names="b")
    view = site.group(2, other_than=[first])
    site.ship_p2p("ab")
    assert site.degraded("rollout").get("p2p-rejected", 0) == 0
    assert view["last"] == version
