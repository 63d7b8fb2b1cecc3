"""Whoever dies, stops or comes back during P2P: the version stands, everybody ends bit-exact at it, and the next one
goes rank to rank again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.p2p.site import LARGE, RUN, Site
from tests.support.store_proxy import Hold

pytestmark = [pytest.mark.p2p, pytest.mark.faults]


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Any]:
    made: list[Site] = []

    def make(
        *args: Any,
        receivers: dict[str, int] | None = None,
        transport: dict[str, str] | None = None,
        world: int = 2,
        **settings: Any,
    ) -> Site:
        site = Site(tmp_path, *args, **settings)
        made.append(site)
        site.start_trainer()
        site.start_rollout()
        site.train(world)
        for name, ranks in (receivers or {"a": 1, "b": 1}).items():
            site.receive(name, ranks, transport=(transport or {}).get(name, "p2p"))
        site.arrived(0)
        return site

    yield make
    for site in made:
        site.close()


# --- receivers ------------------------------------------------------------------------------------------------------


def held_open(site: Site, name: str = "b") -> int:
    """A version in whose exchange a stopped receiver does not do its part; decided, and had by everybody else."""
    site.receivers[name].children[-1].child.stop()
    version = site.post()
    assert version is not None
    site.exchanging(version, waiting=len(site.ranks) + 1)  # the ranks that send to it, too
    return version


def committed(site: Site) -> None:
    assert {s.value for s in site.landed()} == {"committed"}


def well(site: Site) -> None:
    """Nothing that may never happen has happened."""
    for name, daemon in site.daemons.items():
        if daemon.alive:
            assert not {"p2p-rejected", "version-rejected"} & site.degraded(name).keys()


def test_a_receiver_dies_while_it_receives(sites: Any) -> None:
    site = sites()
    first = site.group(2)["group"]["id"]
    site.ship_p2p("ab")
    version = held_open(site)
    committed(site)
    site.receivers["b"].children[0].child.kill()
    site.arrived(version, {"a": "p2p"}, names="a")
    trouble = site.until("the failure is said", lambda: site.view()["trouble"])
    assert "receiver:b" in trouble
    site.receive("b")
    site.arrived(version, names="b")
    site.group(2, other_than=[first])
    site.ship_p2p("ab")
    assert site.degraded("rollout").get("p2p-missed", 0) == 0  # b's next life was resynced; a missed nothing
    assert site.degraded("trainer")["p2p-failed"] >= 1
    well(site)


def test_a_receiver_that_was_only_stopped(sites: Any) -> None:
    site = sites(p2p_timeout_s=3.0)
    first = site.group(2)["group"]["id"]
    site.ship_p2p("ab")
    version = held_open(site)
    committed(site)
    site.arrived(version, {"a": "p2p"}, names="a")
    site.until("the exchange is given up", lambda: site.view()["trouble"])
    # Who does not answer is in no group, so the others have theirs.
    second = site.group(1, other_than=[first])["group"]["id"]
    following = site.ship()
    site.arrived(following, {"a": "p2p"}, names="a")
    site.receivers["b"].children[0].child.go_on()
    site.arrived(following, {"b": "store"}, names="b")
    site.group(2, other_than=[first, second])
    site.ship_p2p("ab")
    well(site)


# --- the trainer's workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_dies_during_an_exchange(sites: Any, rank: int) -> None:
    site = sites()
    first = site.group(2)["group"]["id"]
    site.ship_p2p("ab")
    version = held_open(site)
    os.kill(site.workers()[rank], signal.SIGKILL)
    site.receivers["b"].children[0].child.go_on()
    committed(site)
    site.arrived(version, {"a": "p2p", "b": "store"})
    site.group(2, other_than=[first])
    site.ship_p2p("ab")
    assert site.degraded("rollout")["p2p-missed"] == 1
    assert site.degraded("trainer")["worker-restarted"] == 1
    well(site)


def test_a_worker_dies_between_versions(sites: Any) -> None:
    site = sites()
    seen = [site.group(2)["group"]["id"]]
    site.ship_p2p("ab")
    for rank in (1, 0):
        os.kill(site.workers()[rank], signal.SIGKILL)
        # Noticed without a version: the next one goes rank to rank.
        seen.append(site.group(2, other_than=seen)["group"]["id"])
        site.ship_p2p("ab")
    assert site.degraded("rollout").get("p2p-missed", 0) == 0
    well(site)


# --- between prepare and commit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["rank", "daemon"])
def test_death_between_prepare_and_commit(sites: Any, who: str) -> None:
    site = sites(receivers={"a": 1, "two": 2})
    first = site.group(3)["group"]["id"]
    base = site.ship_p2p(["a", "two"])
    zero, one = site.receivers["two"].children
    assert zero.ask("serve")["entered"]
    version = site.ship()
    site.arrived(version, {"a": "p2p"}, names="a")
    # Both have prepared: rank 1 has written, and rank 0 waits for its reader.
    site.until("rank 1 has written", lambda: not one.ask("look")["ready"])
    if who == "rank":
        zero.child.kill()
    else:
        site.daemons["rollout"].kill()
    site.until("rank 1 is back at the base", lambda: not site.differing(one, base) and one.ask("look")["ready"])
    if who == "rank":
        site.receive("two", first=0)
    else:
        assert not site.differing(zero, base)
        zero.ask("leave")
        site.start_rollout()
    site.arrived(version)
    site.group(3, other_than=[first])
    site.ship_p2p(["a", "two"])
    well(site)


# --- daemons --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["between", "during"])
@pytest.mark.parametrize("which", ["trainer", "rollout"])
def test_a_daemon_is_killed_and_comes_back(sites: Any, which: str, moment: str) -> None:
    site = sites(transport={"b": "auto"})
    first = site.group(2)["group"]["id"]
    site.ship_p2p("ab")
    if moment == "during":
        held_open(site)
        site.daemons[which].kill()
        site.receivers["b"].children[0].child.go_on()
    else:
        site.daemons[which].kill()
    getattr(site, f"start_{which}")()
    site.arrived(site.ship())
    site.group(2, other_than=[first])
    site.ship_p2p("ab")
    well(site)


def test_a_relaunch_with_another_world_takes_the_group_over(sites: Any) -> None:
    site = sites()
    first = site.group(2, world=2)["group"]["id"]
    site.ship_p2p("ab")
    site.train(1, launch="two")
    second = site.group(2, world=1, other_than=[first])
    assert second["group"]["epoch"] == 2
    assert [m for m in second["members"] if m.startswith("trainer")] == ["trainer:two:0"]
    site.ship_p2p("ab")
    site.train(3, launch="three")
    site.group(2, world=3)
    site.ship_p2p("ab")
    well(site)


# --- versions that do not go rank to rank ---------------------------------------------------------------------------


def test_a_version_that_is_too_large_is_not_waited_for(sites: Any) -> None:
    # Whoever waits for such a version waits longer than the test may take.
    site = sites(LARGE, p2p_max_bytes=1 << 20, p2p_timeout_s=600.0)
    group = site.group(2)["group"]["id"]
    small = site.ship(without=["embed"])
    site.arrived(small, {"a": "p2p", "b": "p2p"})
    large = site.ship()
    site.arrived(large, {"a": "store", "b": "store"})
    view = site.group(2)
    assert (view["group"]["id"], view["last"], view["trouble"]) == (group, large, "")
    small = site.ship(without=["embed"])
    site.arrived(small, {"a": "p2p", "b": "p2p"})
    assert site.degraded("rollout")["p2p-missed"] == 2
    well(site)


def test_what_was_received_of_a_version_that_is_aborted_leaves_nothing_behind(sites: Any) -> None:
    site = sites(apart=True)
    site.group(2, world=2)
    base = site.ship_p2p("ab")
    hold = Hold("PUT", r"/parts/", every=True)
    site.proxy.add(hold)
    aborted = site.post()
    site.until("both have received it", lambda: len(site.view()["exchange"]) == 4 and site.view()["last"] == aborted)
    assert site.receivers["a"].children[0].ask("open")["kept"] == 1
    # Its parts never come: the next launch takes the number.
    site.train(2, launch="two")
    site.group(2, world=2, other_than=[])
    site.arrived(base)
    site.proxy.clear()
    version = site.ship()
    assert version > aborted
    site.arrived(version)
    site.ship_p2p("ab")
    for name in "ab":
        assert site.receivers[name].children[0].ask("open")["kept"] == 0
    well(site)


def test_who_cannot_meet_follows_through_the_store_without_waiting(sites: Any) -> None:
    site = sites(receivers={"a": 1, "s": 1}, transport={"s": "store"}, p2p_timeout_s=600.0)
    site.start_rollout("far", p2p_coordinator="http://127.0.0.1:9")
    site.receive("w", rollout="far")
    site.arrived(0)
    site.group(1)
    for count in (1, 2):
        version = site.ship()
        site.arrived(version, {"a": "p2p", "s": "store", "w": "store"})
        assert site.degraded("far")["p2p-missed"] == count
    assert "p2p-missed" not in site.degraded("rollout")
    well(site)


def test_a_trainer_that_takes_no_part_is_not_waited_for(sites: Any, tmp_path: Path) -> None:
    site = sites(p2p_timeout_s=600.0)
    site.group(2)
    site.daemons["trainer"].kill()
    site.start_trainer(p2p=False)
    version = site.ship()
    site.arrived(version, {"a": "store", "b": "store"})
    assert site.degraded("rollout")["p2p-missed"] >= 2
    well(site)


# --- coming and going -----------------------------------------------------------------------------------------------


def test_somebody_joins_in_the_middle_of_an_exchange(sites: Any) -> None:
    site = sites()
    first = site.group(2)["group"]["id"]
    site.ship_p2p("ab")
    version = held_open(site)
    committed(site)
    site.receive("c", 2)
    site.arrived(version, names="ac")
    site.until("c has joined", lambda: sum(m.startswith("receiver:c") for m in site.view()["members"]) == 2)
    group = site.view()["group"]
    assert (group["id"], group["exchanging"]) == (first, True)  # nobody is disturbed
    site.receivers["b"].children[0].child.go_on()
    site.arrived(version, {"b": "p2p"}, names="b")
    site.group(4, other_than=[first])
    site.ship_p2p("abc")
    assert site.view()["trouble"] == ""
    well(site)


def test_a_receiver_is_removed_during_an_exchange_and_registered_again(sites: Any) -> None:
    site = sites()
    first = site.group(2)["group"]["id"]
    site.ship_p2p("ab")
    version = held_open(site)
    committed(site)
    httpx.delete(f"{site.url('rollout')}/receivers/b", trust_env=False, timeout=60.0).raise_for_status()
    site.arrived(version, {"a": "p2p"}, names="a")
    site.group(1, other_than=[first])
    following = site.ship()
    site.arrived(following, {"a": "p2p"}, names="a")
    site.receivers["b"].children[0].child.go_on()  # it registers itself
    site.arrived(following, {"b": "store"}, names="b")
    site.group(2, other_than=[first])
    site.ship_p2p("ab")
    well(site)


def test_a_rank_that_is_back_at_once(sites: Any) -> None:
    """Before anybody can have noticed that it was away."""
    site = sites(receivers={"a": 1, "two": 2})
    seen = [site.group(3)["group"]["id"]]
    site.ship_p2p(["a", "two"])
    for rank in (1, 0):
        site.receivers["two"].children[rank].child.kill()
        site.receive("two", first=rank)
        site.arrived(site.ship())
        seen.append(site.group(3, other_than=seen)["group"]["id"])
        site.ship_p2p(["a", "two"])
    well(site)


def test_thirty_groups_later_nothing_is_left_of_them(sites: Any) -> None:
    site = sites(receivers={"a": 1})
    seen = [site.group(1)["group"]["id"]]

    def again(count: int) -> None:
        for _ in range(count):
            member = next(m for m in site.view()["members"] if m.startswith("receiver"))
            httpx.delete(f"{site.url('trainer')}/p2p/{RUN}/members/{member}", trust_env=False, timeout=60.0)
            seen.append(site.group(1, other_than=seen)["group"]["id"])
        site.ship_p2p("a")

    def held() -> list[tuple[str, int, int]]:
        pids = {f"worker {n}": pid for n, pid in enumerate(site.workers())}
        pids |= {name: daemon.pid for name, daemon in site.daemons.items()}
        pids["receiver"] = site.receivers["a"].children[0].child.pid
        count = {n: (len(os.listdir(f"/proc/{p}/fd")), len(os.listdir(f"/proc/{p}/task"))) for n, p in pids.items()}
        return [(name, *found) for name, found in count.items()]

    again(3)  # what is made once is made
    before = held()
    again(30)
    grown = [(old, new) for old, new in zip(before, held(), strict=True) if new[1] > old[1] + 8 or new[2] > old[2] + 8]
    assert not grown
