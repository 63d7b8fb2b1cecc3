"""The coordinator finishes what others left, and never decides because time has passed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.chains import Chains
from app.committer import Committer
from app.decision_events import observer
from app.degraded import Degraded
from app.events import EventBus
from app.metrics import Metrics
from app.p2p.hub import Hub
from app.roles.base import Node
from app.roles.coordinator import CoordinatorRole, RunWatcher
from app.settings import Settings
from engine.records import CommitDecision, LatestHint, keys, parse_record, record_bytes
from tests.app.test_chain import NONE, V0, announce, first
from tests.model.build import RUN, part
from transports.store.local import LocalStore

pytestmark = pytest.mark.anyio


def make_node(tmp_path: Path, **settings) -> Node:
    from app.chain import Chain

    store = LocalStore(tmp_path / "store")
    metrics, events = Metrics(), EventBus(first_id=1)
    watch = observer(events, metrics)
    known = Settings(data_dir=tmp_path / "data", poll_interval_s=0.01, run=RUN, **settings)
    return Node(
        settings=known,
        store=store,
        chains=Chains(lambda run: Chain(run, store, poll_interval_s=0.01, observer=watch), RUN),
        events=events,
        metrics=metrics,
        degraded=Degraded(metrics),
        p2p=Hub(known, events),
    )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return make_node(tmp_path)


async def put_parts(c: Committer, writers=(0, 1)) -> None:
    for w in writers:
        await c.put_part(part(0, 1, w, launch="one", step=0, base=None, old=NONE, new=V0[w], dense=True))


async def test_it_commits_what_a_dead_writer_left_complete_and_hints_at_it(node):
    c = Committer(node.chains.get(RUN))
    await announce(c, "one")
    await c.try_open("one")
    await put_parts(c)
    watcher = RunWatcher(node, node.chains.get(RUN))
    await watcher.once()
    assert node.chains.get(RUN).head.version == 0
    hint = parse_record(LatestHint, await node.store.get(keys.latest(RUN), max_bytes=1000))
    assert hint.version == 0


async def test_it_waits_for_ever_for_a_missing_part(node):
    c = Committer(node.chains.get(RUN))
    await announce(c, "one")
    await c.try_open("one")
    await put_parts(c, writers=(0,))
    watcher = RunWatcher(node, node.chains.get(RUN))
    for _ in range(50):
        await watcher.once()
    assert await node.store.head(keys.decision(RUN, 0)) is None
    await put_parts(c, writers=(1,))
    await watcher.once()
    assert isinstance(node.chains.get(RUN).standing(0), CommitDecision)


async def test_the_running_role_follows_and_says_when_it_cannot(node):
    role = CoordinatorRole(node)
    assert role.unready() == "not running"
    await role.start()
    try:
        chain = node.chains.get(RUN)
        c = Committer(chain)
        await announce(c, "one")
        await c.try_open("one")
        await put_parts(c)
        assert await chain.wait(0, 30)
        assert role.unready() is None
        await node.store.put(keys.decision(RUN, 1), b"{")
        async with asyncio.timeout(30):
            while role.unready() is None:  # noqa: ASYNC110 (the role has no event to wait for)
                await asyncio.sleep(0.01)
        assert "versions/1/decision.json cannot be used" in role.unready()
        assert node.degraded.snapshot() == {"coordinator-blocked": 1}
    finally:
        await role.stop()
    assert role.unready() == "not running"


async def test_what_nobody_foresaw_ends_neither_watching_nor_housekeeping(node, tmp_path, monkeypatch):
    monkeypatch.setattr("app.roles.coordinator.HOUSEKEEPING_S", 0.0)
    monkeypatch.setattr("app.roles.coordinator.MAX_BACKOFF_S", 0.0)
    calls = {"house": 0, "once": 0}

    def failing(what):
        async def fail(self):
            calls[what] += 1
            raise OSError(28, "No space left on device")

        return fail

    monkeypatch.setattr(RunWatcher, "keep_house", failing("house"))
    monkeypatch.setattr(RunWatcher, "once", failing("once"))
    role = CoordinatorRole(node)
    await role.start()
    try:
        async with asyncio.timeout(30):
            while calls["house"] < 3 or calls["once"] < 3:  # noqa: ASYNC110 (the role has no event to wait for)
                await asyncio.sleep(0)
        assert "No space left" in role.unready()
        counts = node.degraded.snapshot()
        assert counts["housekeeping-failed"] >= 3
        assert counts["coordinator-blocked"] == 1
    finally:
        await role.stop()


async def test_decisions_become_events_but_not_those_of_the_past(tmp_path):
    node = make_node(tmp_path)
    c = Committer(node.chains.get(RUN))
    await first(c)
    again = make_node(tmp_path)
    await again.chains.get(RUN).refresh()
    assert again.events.last_id == 0
    assert [e.kind for e in await node.events.after(0, 0)] == ["version-committed"]


async def test_a_stalled_coordinator_that_wakes_up_changes_nothing(node, tmp_path):
    c = Committer(node.chains.get(RUN))
    await first(c)
    before = await node.store.get(keys.decision(RUN, 0), max_bytes=1 << 20)
    stale = record_bytes(c.chain.head.model_copy(update={"step": 99}))
    assert not await node.store.put_if_absent(keys.decision(RUN, 0), stale)
    await RunWatcher(make_node(tmp_path), node.chains.get(RUN)).once()
    assert await node.store.get(keys.decision(RUN, 0), max_bytes=1 << 20) == before
