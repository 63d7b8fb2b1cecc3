"""A step that one rank fails in leaves no rank waiting, and may be synced again, alone or by all. Real ranks on Gloo.

A rank that waits for another in vain fails after `turns_rank.WAIT_S`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.trainer.turns import Ready, Turns
from engine.errors import StateConflict
from tests.clients.turns_rank import ACCUMULATED, COMMITTED
from tests.support.processes import Child

pytestmark = pytest.mark.timeout(240)


class Pair:
    """Two ranks; `good` and `bad` name the one that fails in the tests."""

    def __init__(self, folder: Path) -> None:
        meeting = str(folder / "meeting")
        make = "tests.clients.turns_rank:rank"
        self.ranks = [Child(f"rank{n}", make, folder, number=n, meeting=meeting) for n in range(2)]
        self.good, self.bad = self.ranks
        for child in self.ranks:
            child.started()

    def all(self, op: str, **values: Any) -> list[dict[str, Any]]:
        """What both answer. They work at the same time."""
        for child in self.ranks:
            child.send(op, **values)
        return [child.receive() for child in self.ranks]

    def step(self, number: int, version: int | None) -> list[dict[str, Any]]:
        """Both train and sync, and their daemons would give the number out."""
        self.all("number", version=version)
        self.all("train")
        return self.all("sync", step=number)

    def close(self) -> None:
        for child in self.ranks:
            child.end()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def committed(answers: list[dict[str, Any]], step: int, version: int) -> bool:
    expected = {"ok": True, "step": step, "version": version, "posted": True, "state": COMMITTED}
    return answers == [expected] * 2


def syncs(child: Child) -> list[list[Any]]:
    found: list[list[Any]] = child.ask("got")["syncs"]
    return found


HOW = {
    "stale": ("check", {"fails": "known"}, {"fails": None}, "DteError"),
    "unforeseen": ("check", {"fails": "any"}, {"fails": None}, "RuntimeError"),
    "hyperparameter": ("spoil", {"good": False}, {"good": True}, "InvalidInput"),
}


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_fails_before_the_agreement(pair: Pair, how: str) -> None:
    """The others accumulate; alone it tries in vain, then with success, and the next step is a version of all."""
    op, breaks, mends, error = HOW[how]
    assert committed(pair.step(1, 0), 1, 0)
    pair.bad.ask(op, **breaks)
    good, bad = pair.step(2, 1)
    assert (good["version"], good["state"]) == (None, ACCUMULATED)
    assert (bad["ok"], bad["error"]) == (False, error)
    again = pair.bad.ask("sync", step=2)
    assert (again["ok"], again["error"]) == (False, error), "still broken, and nobody to agree with"
    pair.bad.ask(op, **mends)
    if how == "hyperparameter":
        assert not pair.bad.ask("sync", step=2)["ok"], "a step that cannot be undone stays so"
    else:
        again = pair.bad.ask("sync", step=2)
        assert (again["ok"], again["version"], again["state"]) == (True, None, ACCUMULATED)
    assert pair.good.ask("sync", step=2) == good
    assert committed(pair.step(3, 1), 3, 1)
    # A step that was never read shows in the optimizer's counter: the daemon takes its tiles dense.
    read = [s[0] for s in syncs(pair.bad)]
    assert read == ([1, 3] if how == "hyperparameter" else [1, 2, 3])
    assert [s[3] for s in syncs(pair.bad)] == read


def test_all_ranks_try_again(pair: Pair) -> None:
    """Also when what helped has changed the weights of all."""
    assert committed(pair.step(1, 0), 1, 0)
    pair.bad.ask("check", fails="known")
    assert [a["ok"] for a in pair.step(2, 1)] == [True, False]
    pair.all("check", fails=None)
    pair.all("write")
    again = pair.all("sync", step=2)
    assert [(a["ok"], a["version"], a["state"]) for a in again] == [(True, None, ACCUMULATED)] * 2
    assert pair.all("sync", step=2) == again
    assert committed(pair.all("sync", step=3), 3, 1), "what was written goes out, with or without another step"
    assert [[s[:2] for s in syncs(child)] for child in pair.ranks] == [[[1, 0], [2, None], [3, 1]]] * 2


def test_all_ranks_fail(pair: Pair) -> None:
    pair.all("check", fails="known")
    assert [a["ok"] for a in pair.step(1, 0)] == [False, False]
    pair.all("check", fails=None)
    assert [(a["version"], a["state"]) for a in pair.all("sync", step=1)] == [(None, ACCUMULATED)] * 2
    assert committed(pair.step(2, 0), 2, 0)


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_whose_daemon_refuses_the_version(pair: Pair, alone: bool) -> None:
    """The others have posted it. The rank gives it up, so that they do not wait for its part for ever."""
    assert committed(pair.step(1, 0), 1, 0)
    pair.bad.ask("refuse", status=422)
    good, bad = pair.step(2, 1)
    assert (good["version"], good["state"]) == (1, COMMITTED)
    assert bad["error"] == "InvalidRequest"
    assert not pair.bad.ask("sync", step=2)["ok"]
    pair.bad.ask("refuse", status=None)
    if alone:
        again = pair.bad.ask("sync", step=2)
    else:
        other, again = pair.all("sync", step=2)
        assert other == good
    assert (again["ok"], again["posted"]) == (True, True)
    assert committed(pair.step(3, 2), 3, 2)


def test_a_version_refused_once_is_given_up_before_the_next_one(pair: Pair) -> None:
    assert committed(pair.step(1, 0), 1, 0)
    pair.bad.ask("refuse", status=401, code="unauthorized")
    assert [a["ok"] for a in pair.step(2, 1)] == [True, False]
    pair.bad.ask("refuse", status=None)
    assert committed(pair.step(3, 2), 3, 2)
    first, given_up, now = syncs(pair.bad)
    assert (first[:2], given_up[:3], now[:2]) == ([1, 0], [2, 1, False], [3, 2]), "nothing is read for the second"


@pytest.mark.parametrize("status", [0, 503])
def test_a_rank_whose_daemon_is_away(pair: Pair, status: int) -> None:
    """Its handle was not posted; once the daemon is back the same step may be synced again, by that rank alone."""
    assert committed(pair.step(1, 0), 1, 0)
    pair.bad.ask("refuse", status=status)
    good, bad = pair.step(2, 1)
    assert (bad["ok"], bad["posted"]) == (True, False)
    assert good["version"] == (None if status == 0 else 1), "a daemon that cannot be asked gives out no number"
    assert pair.bad.ask("sync", step=2)["posted"] is False
    pair.bad.ask("refuse", status=None)
    assert pair.bad.ask("sync", step=2)["posted"]
    assert pair.good.ask("sync", step=2) == good
    assert committed(pair.step(3, 2), 3, 2)


def test_the_next_step_goes_on_after_a_failure_that_nobody_repeats(pair: Pair) -> None:
    for number, fails in enumerate(["known", None, "any", "known", None, None], 1):
        pair.bad.ask("check", fails=fails)
        good, bad = pair.step(number, number)
        assert bad["ok"] is (fails is None)
        assert good["version"] == (None if fails else number)
    assert [s[0] for s in syncs(pair.bad)] == [2, 5, 6]


def test_steps_that_go_back_are_refused_on_every_rank(pair: Pair) -> None:
    """Also on one that has not posted the newest step."""
    pair.bad.ask("check", fails="known")
    pair.step(5, 0)
    pair.bad.ask("check", fails=None)
    for answer in pair.all("sync", step=4):
        assert (answer["ok"], answer["error"]) == (False, "StateConflict")
        assert "only go up" in answer["text"]
    assert committed(pair.step(6, 0), 6, 0)


def test_a_rank_that_has_closed_its_source_leaves_nobody_waiting(pair: Pair) -> None:
    pair.bad.ask("close")
    good, bad = pair.step(1, 0)
    assert (good["version"], bad["error"]) == (None, "StateConflict")
    assert pair.bad.ask("sync", step=1)["error"] == "StateConflict"


def test_an_error_is_not_hidden_by_a_group_that_is_gone() -> None:
    def agree(_: int) -> int:
        raise ConnectionError("the others are gone")

    def broken() -> Ready:
        raise StateConflict("mine")

    with pytest.raises(StateConflict, match="mine"):
        Turns(agree).take(1, broken)
    with pytest.raises(ConnectionError):
        Turns(agree).take(1, lambda: Ready(3))
