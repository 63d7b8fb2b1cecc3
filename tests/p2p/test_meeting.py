"""Where ranks meet: who gets a group, when an exchange begins, and that nothing broken is used again."""

from __future__ import annotations

import asyncio

import pytest

from app.p2p.meeting import FIRST_PAUSE_S, Meeting
from app.p2p.messages import Offer, ReceiverJoin, Report, SenderJoin, VersionHead
from engine.errors import InvalidInput, StateConflict
from engine.records.models import TensorMeta
from transports.p2p.roster import RosterSlice, RosterTensor, parse

PLAN = "a" * 64
META = TensorMeta(name="w", shape=(8,))


class Room:
    """A meeting with a clock of its own."""

    def __init__(self, **settings: object) -> None:
        self.now_s = 100.0
        self.said: list[tuple[str, dict[str, object]]] = []
        known = {"timeout_s": 10.0, "lease_s": 5.0, "carrier": "auto"} | settings
        self.meeting = Meeting(
            "run", clock=lambda: self.now_s, notice=lambda kind, data: self.said.append((kind, data)), **known
        )

    def sender(self, rank: int = 0, world: int = 1, *, epoch: int = 1, daemon: str = "t", device: str = "") -> str:
        return self.meeting.join(
            SenderJoin(
                daemon=daemon,
                launch=f"l{epoch}",
                epoch=epoch,
                rank=rank,
                world=world,
                tensors=[META],
                slices=[RosterSlice(slice=0, tensor="w", lanes=8, blocks=[([8], 0, [1], 0, [1])])] if not rank else [],
                device=device,
            )
        )

    def receiver(
        self,
        name: str = "a",
        rank: int = 0,
        ranks: int = 1,
        *,
        life: str = "1",
        daemon: str = "r",
        device: str = "",
        held: int = 8,
    ) -> str:
        return self.meeting.join(
            ReceiverJoin(
                daemon=daemon,
                receiver=name,
                life=life,
                rank=rank,
                ranks=ranks,
                tensors=[RosterTensor(names=["w"], shape=(8,), dtype="bfloat16", held=held)],
                device=device,
            )
        )

    def open(self) -> str:
        """All members of the present group connect; its id."""
        group = self.meeting.view().group
        assert group is not None
        self.meeting.report(group.id, group.members[0], Report(what="hosting", address="h:1"))
        for member in group.members:
            self.meeting.report(group.id, member, Report(what="connected", plan=PLAN))
        return group.id

    def offer(self, member: str, version: int, *, size: int = 0, step: int | None = None, epoch: int = 1) -> None:
        head = VersionHead(epoch=epoch, version=version, base=version - 1, step=version if step is None else step)
        self.meeting.offer(member, Offer(head=head, bytes=size))

    def done(self, *members: str) -> None:
        group = self.meeting.view().group
        assert group is not None
        assert group.go is not None
        for member in members or tuple(group.members):
            self.meeting.report(group.id, member, Report(what="done", version=group.go.version))

    def go(self) -> int | None:
        group = self.meeting.view().group
        return None if group is None or group.go is None else group.go.version


def test_a_group_needs_every_trainer_rank_and_every_rank_of_a_receiver() -> None:
    room = Room()
    room.sender(1, 2)
    room.receiver("a", 0, 2)
    room.receiver("b")
    assert room.meeting.view().group is None
    first = room.sender(0, 2)
    group = room.meeting.view().group
    assert group is not None
    assert (group.state, group.senders, group.members) == ("forming", 2, [first, "trainer:l1:1", "receiver:b:1:0"])
    roster = parse(room.meeting.roster(group.id)())
    assert [len(s) for s in roster.senders] == [1, 0]
    assert len(roster.receivers) == 1
    room.receiver("a", 1, 2)  # nobody's exchange is disturbed, so it is taken in at once
    again = room.meeting.view().group
    assert again is not None
    assert again.id != group.id
    assert again.members[2:] == ["receiver:a:1:0", "receiver:a:1:1", "receiver:b:1:0"]


def test_an_exchange_begins_when_all_senders_offer_the_same_and_each_version_once() -> None:
    room = Room()
    one, two, to = room.sender(0, 2), room.sender(1, 2), room.receiver()
    room.offer(one, 1)
    room.offer(two, 1)
    assert room.go() is None  # not open yet
    room.open()
    assert room.go() == 1
    room.offer(one, 2)
    room.done(one, two)
    room.offer(two, 2)
    assert room.go() == 1  # a receiver is still at it
    room.done(to)
    assert room.go() == 2
    room.done()
    room.offer(one, 3, step=3)
    room.offer(two, 3, step=4)
    assert room.go() == 2  # they do not speak of the same
    room.offer(two, 3, step=3)
    assert room.go() == 3
    room.done()
    room.offer(one, 2)
    room.offer(two, 2)
    assert room.go() == 3


def test_a_version_that_is_too_large_is_passed_over() -> None:
    """What all ranks have of it, as far as one receiver rank holds it, is what that rank would buffer."""
    room = Room(max_bytes=100)
    one, two = room.sender(0, 2), room.sender(1, 2)
    room.receiver()
    room.open()
    room.offer(one, 1, size=60)
    room.offer(two, 1, size=60)
    assert (room.go(), room.meeting.view().last) == (None, 1)
    room.offer(one, 2, size=60)
    room.offer(two, 2, size=40)
    assert room.go() == 2
    room = Room(max_bytes=100)
    one = room.sender()
    for rank in range(2):
        room.receiver("two", rank, 2, held=4)
    room.open()
    room.offer(one, 1, size=200)
    assert room.go() == 1


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_ends_the_group_and_the_next_one_waits_longer_each_time(who: int) -> None:
    room = Room()
    room.sender()
    room.receiver()
    pauses = []
    for _ in range(4):
        group = room.open()
        member = room.meeting.view().group.members[who]  # type: ignore[union-attr]
        room.meeting.report(group, member, Report(what="failed", why="cut"))
        assert room.meeting.view().group is None
        assert "cut" in room.meeting.view().trouble
        with pytest.raises(StateConflict, match="over"):
            room.meeting.report(group, member, Report(what="done", version=1))
        (room.sender, room.receiver)[who]()
        start = room.now_s
        while room.meeting.view().group is None:
            room.now_s += FIRST_PAUSE_S / 4
            room.meeting.seen("t")
            room.meeting.seen("r")
            room.meeting.tick()
        pauses.append(room.now_s - start)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]
    room.open()
    room.offer("trainer:l1:0", 1)
    room.done()
    assert room.meeting.view().trouble == ""


def test_a_receiver_that_keeps_failing_does_not_keep_the_others_from_their_group() -> None:
    room = Room(lease_s=1e9)
    room.sender()
    room.receiver("good")
    rests = []
    for _ in range(4):
        bad = room.receiver("bad")
        room.meeting.tick()
        group = room.meeting.view().group
        assert group is not None
        assert group.members[1:] == ["receiver:bad:1:0", "receiver:good:1:0"]
        # Each side tells on it, and it does so itself: that is one failure.
        room.meeting.report(group.id, "receiver:good:1:0", Report(what="failed", why="late", lost=1))
        assert room.meeting.view().trouble == "receiver:good:1:0 lost receiver:bad:1:0: late"
        with pytest.raises(StateConflict, match="over"):
            room.meeting.report(group.id, bad, Report(what="failed", why="no way"))
        start = room.now_s
        room.receiver("bad")
        room.receiver("good")
        room.now_s += 0.5
        alone = 0
        while (view := room.meeting.view()).group is None or bad not in view.group.members:
            room.now_s += 0.5
            room.meeting.tick()
            if view.group is not None and view.group.state == "forming":
                room.open()
                alone += 1
        assert alone == 1
        rests.append(room.now_s - start)
    assert rests == sorted(rests)
    assert rests[-1] > 8 * rests[0]
    room.open()
    room.offer("trainer:l1:0", 1)
    room.done()  # it does well: the next failure is a first one again
    room.meeting.report(room.meeting.view().group.id, bad, Report(what="failed", why="once"))  # type: ignore[union-attr]
    room.receiver("bad")
    room.now_s += 3
    room.meeting.tick()
    assert bad in room.meeting.view().group.members  # type: ignore[union-attr]


def test_a_group_of_receivers_that_should_all_rest_stays_when_one_of_them_has_rested() -> None:
    room = Room(lease_s=1e9)
    one = room.sender()
    names = {n: room.receiver(n) for n in "ab"}
    for version, failing in enumerate(["a", "ab"], 1):  # a has to rest longer than b
        group = room.open()
        room.offer(one, version)
        for name in failing:
            room.meeting.report(group, names[name], Report(what="failed", why="cut"))
        room.done(one, *(m for n, m in names.items() if n not in failing))
        for name in failing:
            room.receiver(name)
        room.now_s += 2.1 if failing == "a" else 1.1
        room.meeting.tick()
    assert len(room.meeting.view().group.members) == 3  # type: ignore[union-attr]
    group = room.open()
    for _ in range(20):
        room.now_s += 0.5
        room.meeting.tick()
        assert room.meeting.view().group.id == group  # type: ignore[union-attr]


def test_a_failure_in_an_exchange_lets_the_others_finish() -> None:
    room = Room()
    one, a, b = room.sender(), room.receiver("a"), room.receiver("b")
    group = room.open()
    room.offer(one, 1)
    room.meeting.report(group, b, Report(what="failed", why="its process ended"))
    room.receiver("b")  # back already, and not in the same group
    view = room.meeting.view()
    assert view.group is not None
    assert (view.group.id, view.group.exchanging) == (group, True)
    assert "process ended" in view.trouble
    room.offer(one, 2)
    room.done(a)
    assert room.go() == 1
    room.meeting.report(group, one, Report(what="failed", why="b was lost", lost=2))
    assert room.meeting.view().group is None
    assert "its process ended" in room.meeting.view().trouble


def test_different_plans_open_no_group() -> None:
    room = Room()
    one, to = room.sender(), room.receiver()
    group = room.meeting.view().group
    assert group is not None
    room.meeting.report(group.id, one, Report(what="connected", plan=PLAN))
    room.meeting.report(group.id, to, Report(what="connected", plan="b" * 64))
    assert room.meeting.view().group is None
    assert "different plans" in room.meeting.view().trouble


def test_silence_ends_leases_connecting_and_exchanges() -> None:
    room = Room()
    one, to = room.sender(), room.receiver()
    room.now_s += 4
    room.meeting.seen("t")
    room.now_s += 2
    room.meeting.tick()
    assert room.meeting.view().members == [one]  # the receiver's daemon was silent
    assert room.meeting.view().group is None

    to = room.receiver()
    room.now_s += 1
    room.meeting.tick()
    first = room.meeting.view().group
    assert first is not None
    room.meeting.report(first.id, one, Report(what="connected", plan=PLAN))
    for _ in range(5):
        room.now_s += 3
        room.meeting.seen("t")
        room.meeting.seen("r")
        room.meeting.tick()
    assert room.meeting.view().members == [one]  # the receiver never connected: it has to join again
    assert "connect" in room.meeting.view().trouble

    to = room.receiver()
    room.now_s += 4
    room.meeting.tick()
    group = room.open()
    room.offer(one, 1)
    room.done(one)
    for _ in range(5):
        room.now_s += 3
        room.meeting.seen("t")
        room.meeting.seen("r")
        room.meeting.tick()
    assert room.meeting.view().group is None or room.meeting.view().group.id != group  # type: ignore[union-attr]
    assert to not in room.meeting.view().members


def test_failures_without_end_only_make_pauses_longer() -> None:
    room = Room()
    room.sender()
    room.receiver()
    for _ in range(1100):
        group = room.meeting.view().group
        assert group is not None
        room.meeting.report(group.id, group.members[0], Report(what="failed", why="no way"))
        assert room.meeting.view().group is None
        room.sender()
        room.now_s += 31
        room.meeting.seen("t")
        room.meeting.seen("r")
        room.meeting.tick()


def test_a_name_is_one_daemons_for_as_long_as_that_lives() -> None:
    room = Room()
    room.sender()
    first = room.receiver(life="1", daemon="r")
    room.open()
    with pytest.raises(StateConflict, match="through daemon r already"):
        room.receiver(life="2", daemon="other")
    group = room.meeting.view().group
    assert group is not None
    assert (group.state, first in group.members) == ("open", True)
    room.now_s += 6
    room.meeting.seen("t")
    room.meeting.tick()
    assert room.receiver(life="2", daemon="other") in room.meeting.view().members


def test_another_life_of_a_receiver_takes_the_place_of_the_first() -> None:
    room = Room()
    room.sender()
    room.receiver("a", 0, 2)
    room.receiver("a", 1, 2)
    before = room.open()
    room.receiver("a", 0, 2, life="2")
    assert room.meeting.view().group is None
    room.receiver("a", 1, 2, life="2")
    group = room.meeting.view().group
    assert group is not None
    assert group.id != before
    assert group.members[1:] == ["receiver:a:2:0", "receiver:a:2:1"]


def test_a_newer_launch_takes_over_and_the_old_one_gets_no_group() -> None:
    room = Room()
    room.sender()
    room.receiver()
    room.open()
    room.sender(0, 2, epoch=2)
    room.sender(1, 2, epoch=2)
    group = room.meeting.view().group
    assert group is not None
    assert (group.epoch, group.senders) == (2, 2)
    room.open()
    room.offer("trainer:l1:0", 9)
    assert room.go() is None


def test_leaving_in_the_middle_of_an_exchange_is_a_failure_and_between_two_is_not() -> None:
    for busy in (False, True):
        room = Room()
        one = room.sender()
        room.receiver("a")
        other = room.receiver("b")
        room.open()
        room.offer(one, 1)
        if not busy:
            room.done()
        room.meeting.leave(other)
        assert bool(room.meeting.view().trouble) == busy
        if busy:
            assert room.go() == 1  # the others finish
            room.done(one, "receiver:a:1:0")
        assert (room.meeting.view().group is None) == busy


@pytest.mark.parametrize(
    ("choice", "devices", "carrier"),
    [
        ("auto", ("", ""), "gloo"),
        ("auto", ("g1", ""), "gloo"),
        ("auto", ("g1", "g1"), "gloo"),
        ("auto", ("g1", "g2"), "nccl"),
        ("gloo", ("g1", "g2"), "gloo"),
        ("nccl", ("", ""), "nccl"),
    ],
)
def test_nccl_carries_only_where_every_rank_has_a_gpu_of_its_own(
    choice: str, devices: tuple[str, str], carrier: str
) -> None:
    room = Room(carrier=choice)
    room.sender(device=devices[0])
    room.receiver(device=devices[1])
    group = room.meeting.view().group
    assert group is not None
    assert group.carrier == carrier


def test_nonsense_is_refused() -> None:
    room = Room()
    with pytest.raises(InvalidInput, match="world"):
        room.sender(3, 2)
    with pytest.raises(StateConflict, match="joined"):
        room.offer("trainer:x:0", 1)
    room.sender()
    room.receiver()
    group = room.meeting.view().group
    assert group is not None
    with pytest.raises(InvalidInput, match="first member"):
        room.meeting.report(group.id, group.members[1], Report(what="hosting", address="h:1"))
    with pytest.raises(StateConflict, match="over"):
        room.meeting.roster("0" * 16)


@pytest.mark.anyio
async def test_a_long_poll_ends_with_the_next_change() -> None:
    room = Room()
    view = room.meeting.view()
    waiting = asyncio.ensure_future(room.meeting.wait(view.tag, 30))
    await asyncio.sleep(0)
    assert not waiting.done()
    member = room.sender()
    assert (await waiting).members == [member]
    assert (await room.meeting.wait("another", 30)).members == [member]
    assert (await room.meeting.wait(room.meeting.view().tag, 0.01)).members == [member]
