"""The two rounds over members of one process: seeded fuzz, hostile first rounds, loss at exact points."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.errors import DteError, InvalidInput
from engine.plan.operations import Counts, Delivery, Operation
from engine.plan.planning import Plan
from tests.transports.p2p.synthetic import Version, at_once, make_plan, make_version
from transports.p2p import wire
from transports.p2p.base import Carrier
from transports.p2p.errors import (
    CarrierClosed,
    ExchangeFailed,
    ExchangeTimeout,
    ExchangeTooLarge,
    PeerLost,
    PlanMismatch,
    ProtocolError,
)
from transports.p2p.memory import MemoryGroup
from transports.p2p.rounds import VersionHead, agree, receive_version, send_version

pytestmark = pytest.mark.p2p
LONG_S = 120.0
ROOM = 1 << 40


def members(plan: Plan, **options: Any) -> tuple[MemoryGroup, list[Carrier]]:
    group = MemoryGroup(plan.senders + plan.receivers, **options)
    return group, [group.member(rank) for rank in range(group.size)]


def exchange(
    carriers: Sequence[Carrier],
    plan: Plan,
    version: Version,
    *,
    bucket: int = 1 << 16,
    deadline_s: float = LONG_S,
    room: int = ROOM,
    without: Sequence[int] = (),
) -> list[Any]:
    """What `send_version` or `receive_version` came to, by member; None for members left out."""

    def run(rank: int) -> Any:
        if rank in without:
            return None
        if rank < plan.senders:
            return send_version(
                carriers[rank], plan, rank, version.head, version, bucket_bytes=bucket, deadline_s=deadline_s
            )
        side = rank - plan.senders
        return receive_version(
            carriers[rank], plan, side, version.head, bucket_bytes=bucket, deadline_s=deadline_s, max_bytes=room
        )

    return at_once(*(lambda r=r: run(r) for r in range(len(carriers))))


def failure(outcome: Any, member: int) -> Exception:
    assert isinstance(outcome, ExchangeFailed), outcome
    return outcome.failures[member]


@pytest.mark.parametrize("seed", range(24))
def test_fuzz(seed: int) -> None:
    senders, receivers, operations = [(1, 1, 1), (1, 1, 60), (3, 2, 200), (2, 3, 40), (1, 4, 9), (5, 1, 30)][seed % 6]
    plan = make_plan(seed, senders, receivers, operations)
    _, carriers = members(plan)
    for number in range(6):
        version = make_version(seed, plan, number)
        outcome = exchange(carriers, plan, version, bucket=[1 << 16, 64, 1 << 30, 1000, 4096, 7][number])
        for sender in range(senders):
            reports = outcome[sender]
            assert [(sender, r.receiver) for r in reports] == [p for p in plan.pairs if p[0] == sender]
            assert all(r.operations == len(plan.of_pair(sender, r.receiver)) for r in reports)
        for side in range(receivers):
            assert version.matches(outcome[senders + side], plan, side), (number, outcome[senders + side])
        arrived = [d for side in range(receivers) for d in outcome[senders + side]]
        reported = [r for sender in range(senders) for r in outcome[sender]]
        assert sum(r.entries for r in reported) == sum(d.local.size for d in arrived)
        assert sum(r.dense_lanes for r in reported) == sum(d.dense.size for d in arrived)


def test_the_fuzz_has_what_it_is_for() -> None:
    """Whole versions empty, pairs that are empty beside others, single entries, dense tiles, wide lanes."""
    seen = set()
    for seed in range(24):
        plan = make_plan(seed, 3, 2, 200)
        for number in range(6):
            version = make_version(seed, plan, number)
            by_pair = {p: [version.changes[o] for o in plan.of_pair(*p)] for p in plan.pairs}
            full = {p: any(c.local.size + len(c.tiles) for c in cs) for p, cs in by_pair.items()}
            seen.add("all" if all(full.values()) else "some" if any(full.values()) else "nothing")
            for c in (c for cs in by_pair.values() for c in cs):
                seen |= {"one"} if c.local.size == 1 else set()
                seen |= {"dense"} if len(c.tiles) > 1 else set()
                seen |= {"wide"} if c.local.dtype == np.int64 and c.local.size and c.local.max() >> 32 else set()
    assert seen == {"all", "some", "nothing", "one", "dense", "wide"}


def test_thousands_of_operations() -> None:
    plan = make_plan(1, 2, 2, 5000, pairs=1.0)
    _, carriers = members(plan)
    for number, changed in enumerate((0.01, 0.0, 0.2)):
        version = make_version(1, plan, number, changed)
        outcome = exchange(carriers, plan, version, bucket=100_000)
        assert all(version.matches(outcome[2 + side], plan, side) for side in (0, 1))


def test_a_pair_with_nothing_makes_one_empty_call() -> None:
    plan = make_plan(1, 1, 1, 5)
    calls: list[tuple[int, int, int]] = []
    _, carriers = members(plan, on_post=lambda *call: calls.append(call))
    (report,), deliveries = exchange(carriers, plan, make_version(1, plan, 1, 0.0))
    assert calls == [(0, 1, 0), (0, 1, 1)]
    assert report.messages == 2
    assert report.bytes == wire.announcement_size(5)
    assert len(deliveries) == 5


def test_members_without_operations_have_nothing_to_do() -> None:
    plan = replace(make_plan(1, 1, 1, 5), senders=1, receivers=2)
    _, carriers = members(plan)
    outcome = exchange(carriers, plan, make_version(1, plan, 1))
    assert outcome[2] == []


def test_a_sender_holds_few_buckets() -> None:
    """A receiver that takes nothing more keeps the sender from producing more than some buckets."""
    block = make_plan(1, 1, 1, 400, pairs=1.0)
    version = make_version(1, block, 1, 1.0)
    asked: list[Operation] = []
    version.before = lambda verb, operation: asked.append(operation) if verb == "entries" else None
    _, carriers = members(block)
    first = np.empty(wire.announcement_size(400), np.uint8)
    carriers[1].receive(first, 0)
    with pytest.raises(ExchangeFailed):
        send_version(carriers[0], block, 0, version.head, version, bucket_bytes=256, deadline_s=0.3)
    assert len(asked) < 100


# Agreement.


def test_members_agree_on_a_plan() -> None:
    plan = make_plan(1, 2, 1, 4)
    _, carriers = members(plan)
    assert at_once(*(lambda c=c: agree(c, plan, LONG_S) for c in carriers)) == [None] * 3


def test_who_has_another_plan_is_named() -> None:
    plan = make_plan(1, 2, 1, 4)
    _, carriers = members(plan)
    plans = [plan, replace(plan, digest="ab" * 32), plan]
    for error in at_once(*(lambda c=c, p=p: agree(c, p, LONG_S) for c, p in zip(carriers, plans, strict=True))):
        assert isinstance(error, PlanMismatch)
        assert error.member == 1
        assert "[1]" in error.message


def test_who_speaks_another_protocol_is_named() -> None:
    plan = make_plan(1, 1, 1, 4)
    _, carriers = members(plan)
    other = struct.pack("<I32s", 99, bytes.fromhex(plan.digest))
    error, _ = at_once(
        lambda: agree(carriers[0], plan, LONG_S), lambda: carriers[1].gather(other, time.monotonic() + 9)
    )
    assert isinstance(error, ProtocolError)
    assert error.member == 1


def test_a_group_of_another_size_follows_no_plan() -> None:
    plan = make_plan(1, 1, 1, 4)
    with pytest.raises(InvalidInput):
        agree(MemoryGroup(3).member(0), plan, 1)


# Hostile first rounds.

HEAD = VersionHead(3, 8, 7, 80)


def lies(
    plan: Plan, change: Callable[[dict[str, Any]], None], counts: Sequence[Counts] | None = None, room: int = ROOM
) -> Exception:
    """What a receiver says to a first round that is right but for `change` of the header's fields, or for `counts`."""
    operations = plan.of_pair(0, 0)
    fields: dict[str, Any] = {
        "magic": b"DTE-P2P\n", "protocol": 1, "zero": 0, "digest": bytes.fromhex(plan.digest),
        "epoch": 3, "version": 8, "base": 7, "step": 80, "bucket": 1000, "operations": len(operations),
    }  # fmt: skip
    change(fields)
    table = [(c.entries, c.tiles, c.dense_lanes) for c in counts or [Counts(0, 0, 0)] * len(operations)]
    data = struct.pack("<8sII32sqqqqQQ", *fields.values()) + np.array(table, "<i8").tobytes()
    _, carriers = members(plan)
    carriers[0].send(np.frombuffer(data, np.uint8), 1)
    with pytest.raises(ExchangeFailed) as caught:
        receive_version(carriers[1], plan, 0, HEAD, bucket_bytes=1000, deadline_s=0.5, max_bytes=room)
    return failure(caught.value, 0)


@pytest.mark.parametrize(
    "field",
    [
        {"magic": b"DTE-P2P\0"}, {"protocol": 2}, {"zero": 1}, {"digest": bytes(32)}, {"epoch": 4}, {"version": 9},
        {"base": 6}, {"base": -1}, {"step": 81}, {"bucket": 999}, {"operations": 0}, {"bucket": 0},
    ],
)  # fmt: skip
def test_a_wrong_header_is_refused(field: dict[str, Any]) -> None:
    plan = make_plan(2, 1, 1, 3)
    error = lies(plan, lambda fields: fields.update(field))
    assert isinstance(error, ProtocolError)
    assert error.member == 0


def test_a_right_header_alone_is_waited_for() -> None:
    """The other cases are refused for what was changed in them."""
    assert isinstance(lies(make_plan(2, 1, 1, 3), lambda fields: None), ExchangeTimeout)


@pytest.mark.parametrize(
    "bad",
    [
        Counts(-1, 0, 0), Counts(0, -1, 0), Counts(0, 0, -1), Counts(10**9, 0, 0), Counts(1 << 62, 0, 1 << 62),
        Counts(0, 1, 10**9), Counts(0, 10**9, 1), Counts(0, 0, 1), Counts(0, 1, 0), Counts(2**63 - 1, 2**63 - 1, 1),
    ],
)  # fmt: skip
def test_impossible_counts_are_refused_before_anything_is_allocated(bad: Counts, monkeypatch: Any) -> None:
    plan = make_plan(2, 1, 1, 3)
    monkeypatch.setattr("transports.p2p.rounds._receive_payload", lambda *args: pytest.fail("went on"))
    for place in range(3):
        counts = [Counts(0, 0, 0)] * 3
        counts[place] = bad
        assert isinstance(lies(plan, lambda fields: None, counts), ProtocolError)


def test_entries_and_dense_lanes_share_an_operations_lanes() -> None:
    plan = make_plan(2, 1, 1, 3)
    lanes = plan.operations[0].lanes
    none = [Counts(0, 0, 0)] * 2
    fits, too_many = Counts(lanes - 1, 1, 1), Counts(lanes, 1, 1)
    assert isinstance(lies(plan, lambda fields: None, [fits, *none]), ExchangeTimeout)
    assert isinstance(lies(plan, lambda fields: None, [too_many, *none]), ProtocolError)


def test_more_than_there_is_room_for_is_refused() -> None:
    plan = make_plan(5, 3, 1, 60, pairs=1.0)
    version = make_version(5, plan, 1, 1.0)
    pairs = [plan.of_pair(sender, 0) for sender in range(3)]
    most = sum(wire.payload_size(ops, [version.changes[o].counts for o in ops]) for ops in pairs)
    _, carriers = members(plan)
    assert version.matches(exchange(carriers, plan, version, room=most)[3], plan, 0)
    outcome = exchange(carriers, plan, version, room=most - 1)
    assert isinstance(outcome[3], ExchangeFailed)
    assert {type(e) for e in outcome[3].failures.values()} == {ExchangeTooLarge}
    assert len(outcome[3].failures) == 1


def payload_of(plan: Plan, alter: Callable[[Delivery], None]) -> Exception | None:
    """What a receiver says to a second round whose arrays were altered."""
    operations = plan.of_pair(0, 0)
    version = make_version(3, plan, 1, 1.0)
    counts = [version.changes[o].counts for o in operations]
    payload = np.zeros(wire.payload_size(operations, counts), np.uint8)
    for delivery in _views(payload, operations, counts):
        c = version.changes[delivery.operation]
        delivery.local[:], delivery.bits[:], delivery.tiles[:] = c.local, c.bits, c.tiles
        alter(delivery)
    try:
        wire.deliveries(payload, operations, counts, 0)
    except DteError as error:
        return error
    return None


def _views(payload: Any, operations: Sequence[Operation], counts: Sequence[Counts]) -> list[Delivery]:
    out, at = [], 0
    for o, c in zip(operations, counts, strict=True):
        arrays = []
        for n, dtype in zip(wire.sizes(o, c), (np.int64, o.index_dtype, np.uint16, np.uint16), strict=True):
            arrays.append(payload[at : at + n].view(dtype))
            at += wire.padded(n)
        out.append(Delivery(o, arrays[1], arrays[2], arrays[0].reshape(-1, 2), arrays[3]))
    return out


def _set(field: str, value: int) -> Callable[[Delivery], None]:
    def alter(delivery: Delivery) -> None:
        array = getattr(delivery, field)
        if array.size:
            array.reshape(-1)[-1] = value

    return alter


def _swap(delivery: Delivery) -> None:
    delivery.tiles[:] = delivery.tiles[::-1].copy()


def _other_part(delivery: Delivery) -> None:
    delivery.tiles[:, 0] += 1


@pytest.mark.parametrize(
    ("alter", "refused"),
    [
        (lambda delivery: None, False),
        (_set("local", 1 << 31), True),
        (_set("tiles", -1), True),
        (_set("tiles", 1 << 40), True),
        (_set("tiles", 50), True),
        (_swap, True),
        (_other_part, True),
    ],
)
def test_numbers_that_lead_outside_are_refused(alter: Callable[[Delivery], None], refused: bool) -> None:
    plan = make_plan(4, 1, 1, 40)
    assert isinstance(payload_of(plan, alter), ProtocolError) == refused


def test_negative_lanes_are_refused() -> None:
    plan = make_plan(4, 1, 1, 40)

    def alter(delivery: Delivery) -> None:
        if delivery.local.dtype == np.int64 and delivery.local.size:
            delivery.local[0] = -1

    assert isinstance(payload_of(plan, alter), ProtocolError)


# Loss.


class Loss:
    """Kills one member of a group when it is about to post its n-th message to another."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number
        self.group: MemoryGroup | None = None

    def __call__(self, source: int, to: int, number: int) -> None:
        if self.group is not None and source == self.rank and number >= self.number:
            self.group.kill(self.rank)


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_a_sender_lost_in_either_round_spoils_no_other_pair(number: int) -> None:
    plan = make_plan(7, 2, 3, 200, pairs=1.0)
    version = make_version(7, plan, 1, 1.0)
    loss = Loss(1, number)
    loss.group, carriers = members(plan, on_post=loss)
    outcome = exchange(carriers, plan, version, bucket=512)
    assert isinstance(outcome[1], ExchangeFailed)
    assert isinstance(failure(outcome[1], 2), CarrierClosed)
    for rank in (2, 3, 4):
        assert isinstance(failure(outcome[rank], 1), PeerLost)
        assert set(outcome[rank].failures) == {1}
    # The other sender served everybody to the end.
    assert [r.receiver for r in outcome[0]] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_receiver_lost_spoils_no_other_pair(kind: str) -> None:
    plan = make_plan(8, 2, 3, 200, pairs=1.0)
    version = make_version(8, plan, 1, 1.0)
    group, carriers = members(plan)
    getattr(group, kind)(3)
    outcome = exchange(carriers, plan, version, bucket=512, deadline_s=3.0, without=[3])
    for sender in (0, 1):
        assert set(outcome[sender].failures) == {3}
        assert isinstance(failure(outcome[sender], 3), PeerLost if kind == "kill" else ExchangeTimeout)
    for side in (0, 2):
        assert version.matches(outcome[2 + side], plan, side)


def test_after_a_failure_this_end_is_closed() -> None:
    plan = make_plan(8, 1, 1, 20)
    _, carriers = members(plan)
    with pytest.raises(ExchangeFailed):
        receive_version(carriers[1], plan, 0, HEAD, bucket_bytes=9, deadline_s=0.01, max_bytes=ROOM)
    with pytest.raises(CarrierClosed):
        carriers[1].send(np.zeros(1, np.uint8), 0)


def test_what_the_version_itself_raises_is_raised() -> None:
    plan = make_plan(8, 1, 2, 20, pairs=1.0)
    version = make_version(8, plan, 1, 1.0)

    def fail(verb: str, operation: Operation) -> None:
        if verb == "entries" and operation.receiver == 1:
            raise RuntimeError("the spool is gone")

    version.before = fail
    _, carriers = members(plan)
    outcome = exchange(carriers, plan, version)
    assert str(outcome[0]) == "the spool is gone"
    assert version.matches(outcome[1], plan, 0)
    assert isinstance(failure(outcome[2], 0), PeerLost)


@pytest.mark.parametrize("verb", ["entries", "tiles", "dense"])
def test_a_version_that_changes_while_it_is_sent_is_an_error_of_the_sender(verb: str) -> None:
    plan = make_plan(8, 1, 1, 60)
    version = make_version(8, plan, 1, 1.0)

    def shrink(called: str, operation: Operation) -> None:
        change = version.changes[operation]
        if called == verb == "dense":
            change.dense = change.dense[:-1]
        elif called == verb == "tiles":
            change.tiles = change.tiles[:-1]
        elif called == verb:
            change.local, change.bits = change.local[:-1], change.bits[:-1]

    version.before = shrink
    _, carriers = members(plan)
    outcome = exchange(carriers, plan, version)
    assert isinstance(failure(outcome[0], 1), ProtocolError)
    assert "this rank announced" in outcome[0].message
    assert isinstance(failure(outcome[1], 0), PeerLost)


@pytest.mark.parametrize("bucket", [0, -1])
def test_a_bucket_that_holds_nothing_is_refused(bucket: int) -> None:
    plan = make_plan(8, 1, 1, 2)
    _, carriers = members(plan)
    for outcome in exchange(carriers, plan, make_version(8, plan, 1), bucket=bucket):
        assert isinstance(outcome, InvalidInput)
