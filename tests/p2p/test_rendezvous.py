"""A daemon's end of the meetings: it asks while it has members, and one run's meeting does not disturb another's."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.events import EventBus
from app.p2p.hub import Hub
from app.p2p.member import Member, Moved, Seat
from app.p2p.messages import Join, Offer, ReceiverJoin, SenderJoin, VersionHead
from app.settings import Settings
from engine.records.models import TensorMeta
from transports.p2p.roster import RosterSlice, RosterTensor

pytestmark = pytest.mark.anyio


class Stub(Member):
    """A member that does at once whatever it is asked."""

    def __init__(self, join: dict[str, Any], *, fails: bool = False) -> None:
        self._join = join
        self._fails = fails
        self.groups: list[str] = []
        self.versions: list[int] = []
        self.left = 0

    async def join(self, daemon: str) -> Join:
        kind = SenderJoin if "launch" in self._join else ReceiverJoin
        return kind(daemon=daemon, **self._join)

    async def host(self, group: str) -> str:
        return "127.0.0.1:1"

    async def connect(self, seat: Seat) -> str:
        assert seat.roster.exists()
        self.groups.append(seat.group)
        return "a" * 64

    async def exchange(self, seat: Seat, head: VersionHead) -> Moved:
        if self._fails:
            raise RuntimeError("broken")
        self.versions.append(head.version)
        return Moved(1, 8, 0.1)

    async def leave(self, group: str) -> None:
        self.left += 1

    def settled(self, group: str, version: int, problem: str) -> None:
        pass


def trainer() -> Stub:
    block = ([8], 0, [1], 0, [1])
    return Stub(
        {
            "launch": "l",
            "epoch": 1,
            "rank": 0,
            "world": 1,
            "tensors": [TensorMeta(name="w", shape=(8,))],
            "slices": [RosterSlice(slice=0, tensor="w", lanes=8, blocks=[block])],
        }
    )


def receiver(name: str = "a", **more: Any) -> Stub:
    tensor = RosterTensor(names=["w"], shape=(8,), dtype="bfloat16", held=8)
    return Stub({"receiver": name, "life": "1", "rank": 0, "ranks": 1, "tensors": [tensor]}, **more)


class House:
    """A daemon that is its own coordinator; `asked` counts requests by path."""

    def __init__(self, folder: Path) -> None:
        self.hub = Hub(Settings(data_dir=folder, p2p=True), EventBus())
        self.asked: Counter[str] = Counter()
        self.hub.meetings.start()

    async def run(self, name: str) -> Any:
        found = self.hub.rendezvous(name)

        async def count(request: httpx.Request) -> None:
            self.asked[f"{request.method} {request.url.path}"] += 1

        hooks = found._http.client.event_hooks
        if not hooks["request"]:
            found._http.client.event_hooks = {"request": [count]}
        return found

    async def until(self, reached: Any) -> None:
        async with asyncio.timeout(30):
            while not reached():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.hub.aclose()
        await self.hub.meetings.stop()


async def turns() -> None:
    """Let everybody in the event loop go on until they wait for something; who asks again and again never does."""
    for _ in range(2000):
        await asyncio.sleep(0)


@pytest.fixture
async def house(tmp_path: Path) -> Any:
    made = House(tmp_path)
    yield made
    await made.close()


async def test_members_meet_exchange_and_part(house: House) -> None:
    run = await house.run("r")
    one, two = trainer(), receiver()
    run.add(one)
    run.add(two)
    await house.until(lambda: run.view and run.view.group and run.view.group.state == "open")
    for version in (1, 2):
        head = VersionHead(epoch=1, version=version, base=version - 1, step=version)
        assert await run.offer(one, Offer(head=head))
        await house.until(lambda version=version: two.versions[-1:] == [version] == one.versions[-1:])
    assert one.groups == two.groups
    await run.remove(two)
    await house.until(lambda: run.view.group is None)
    assert one.left
    assert two.left


async def test_who_has_no_members_asks_for_nothing(house: House) -> None:
    """Also runs that have ended must not keep each other busy."""
    runs = [await house.run(f"r{n}") for n in range(3)]
    for run in runs:
        members = [trainer(), receiver()]
        for member in members:
            run.add(member)
        await house.until(lambda run=run: run.view and run.view.group)
        for member in members:
            await run.remove(member)
    instances = [house.hub.meetings.get(f"r{n}").view().instance for n in range(3)]
    before = house.asked.total()
    waited = await asyncio.gather(*(house.hub.meetings.get("other").wait("x", 0.0) for _ in range(2)))
    await turns()
    assert house.asked.total() == before
    assert all(run.view is None for run in runs)
    assert [house.hub.meetings.get(f"r{n}").view().instance for n in range(3)] == instances
    assert waited


async def test_runs_side_by_side_wait_quietly(house: House) -> None:
    runs = [await house.run(f"r{n}") for n in range(3)]
    for run in runs:
        run.add(trainer())
    await house.until(lambda: all(run.view and run.view.members for run in runs))
    await turns()
    before = house.asked.total()
    await turns()
    assert house.asked.total() - before <= len(runs), house.asked


async def test_a_member_that_fails_joins_again(house: House) -> None:
    run = await house.run("r")
    one, two = trainer(), receiver(fails=True)
    run.add(one)
    run.add(two)
    await house.until(lambda: run.view and run.view.group and run.view.group.state == "open")
    head = VersionHead(epoch=1, version=1, base=0, step=1)
    assert await run.offer(one, Offer(head=head))
    await house.until(lambda: run.view and "broken" in run.view.trouble)
    await house.until(lambda: run.view and any(m.startswith("receiver") for m in run.view.members))


@pytest.mark.timeout(60)
async def test_a_coordinator_that_shuts_down_is_not_asked_without_a_pause(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its long polls end at once then."""
    monkeypatch.setattr("app.api.p2p.POLL_END_S", 0.01)
    run = await house.run("r")
    run.add(trainer())
    await house.until(lambda: run.view and run.view.members)
    house.hub.meetings._events.close()
    before = house.asked.total()
    await house.until(lambda: house.asked.total() > before)
    await turns()
    assert house.asked.total() - before < 5


async def test_a_group_that_ends_while_its_roster_is_downloaded_takes_nobody_along(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await house.run("r")
    download, held = run._download, asyncio.Event()

    async def slow(group: str) -> Any:
        await held.wait()
        return await download(group)

    monkeypatch.setattr(run, "_download", slow)
    members = [trainer(), receiver("a")]
    for member in members:
        run.add(member)
    await house.until(lambda: run._rosters)
    run.add(late := receiver("b"))
    await house.until(lambda: len(run._rosters) and len(run.view.group.members) == 3)
    await house.until(lambda: run.view.group.id in run._rosters)
    held.set()
    await house.until(lambda: run.view.group.state == "open")
    assert members[0].groups[-1] == members[1].groups[-1] == late.groups[-1] == run.view.group.id


async def test_a_member_whose_leave_was_lost_is_taken_out_later(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await house.run("r")
    one, two, three = trainer(), receiver("a"), receiver("b")
    for member in (one, two, three):
        run.add(member)
    await house.until(lambda: run.view and run.view.group and len(run.view.group.members) == 3)
    send, lost = run._send, []

    async def lossy(method: str, path: str, *args: Any, **more: Any) -> None:
        if method == "DELETE" and not lost:
            lost.append(path)
            raise TimeoutError
        await send(method, path, *args, **more)

    monkeypatch.setattr(run, "_send", lossy)
    await run.remove(two)
    assert lost
    house.hub.meetings.get("r")._bump()  # anything happens there
    await house.until(lambda: not any(m.startswith("receiver:a:") for m in run.view.members))
    await house.until(lambda: run.view.group and len(run.view.group.members) == 2)
