"""The exchange of one version between ranks in two rounds: what comes, then exactly that.

Invariants: both sides derive from the plan and the counts of round 1 which calls of which length follow, so nothing can
shift or wait for nothing; and a receiver gives all of a version or an error.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidInput
from engine.plan.operations import I64, U16, Counts, Delivery, Index, Operation
from transports.p2p import wire
from transports.p2p.base import Bytes, Carrier, Pending
from transports.p2p.driving import drive
from transports.p2p.errors import ExchangeTooLarge, PlanMismatch, ProtocolError
from transports.p2p.wire import VersionHead

__all__ = ["Outgoing", "PairReport", "PlanView", "VersionHead", "agree", "receive_version", "send_version"]

AHEAD = 2
"""Messages of a pair that are posted at once. A sender holds these and the one it fills."""
_ZEROS = np.zeros(wire.ALIGNMENT, np.uint8)
AGREEMENT = struct.Struct("<I32s")


class PlanView(Protocol):
    """What the exchange needs of a plan. Members are numbered senders first."""

    @property
    def senders(self) -> int: ...

    @property
    def receivers(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def pairs(self) -> Sequence[tuple[int, int]]: ...

    def of_pair(self, sender: int, receiver: int) -> Sequence[Operation]: ...


class Outgoing(Protocol):
    """A version as its sender has it. Called from several threads, but never from two at once; iterators of different
    operations may be advanced in turns."""

    def counts(self, operation: Operation) -> Counts:
        """What the operation carries; asked once, before everything else of it."""
        ...

    def entries(self, operation: Operation) -> tuple[Index, U16]:
        """Receiver-local lanes, of the operation's `index_dtype`, and new bits of the sparse entries."""
        ...

    def tiles(self, operation: Operation) -> I64:
        """Dense tiles I64 [T, 2], see `Delivery.tiles`."""
        ...

    def dense(self, operation: Operation) -> Iterator[U16]:
        """New bits of the lanes in these tiles that the receiver has, tile by tile."""
        ...


@dataclass(frozen=True, slots=True)
class PairReport:
    """What one receiver was sent. `bytes`: of both rounds. `seconds`: from the start of the exchange."""

    receiver: int
    operations: int
    entries: int
    tiles: int
    dense_lanes: int
    bytes: int
    messages: int
    seconds: float


def agree(carrier: Carrier, plan: PlanView, timeout_s: float) -> None:
    """Compare protocol and plan over all members. Call it once after connecting, before the first version.

    Raises `ProtocolError` or `PlanMismatch` naming who differs from the most, `ExchangeTimeout`, `PeerLost`.
    """
    if carrier.size != plan.senders + plan.receivers:
        raise InvalidInput(f"a group of {carrier.size} cannot follow a plan for {plan.senders} + {plan.receivers}.")
    own = AGREEMENT.pack(wire.PROTOCOL, bytes.fromhex(plan.digest))
    all_of_them = carrier.gather(own, time.monotonic() + timeout_s)
    for member, theirs in enumerate(all_of_them):
        if len(theirs) != AGREEMENT.size or AGREEMENT.unpack(theirs)[0] != wire.PROTOCOL:
            raise ProtocolError(
                f"member {member} speaks another protocol.", member=member, remedy="Run one release everywhere."
            )
    most = Counter(all_of_them).most_common(1)[0][0]
    if odd := [member for member, theirs in enumerate(all_of_them) if theirs != most]:
        raise PlanMismatch(
            f"members {odd[:16]} computed another plan than the other {carrier.size - len(odd)}.",
            member=odd[0],
            remedy="Run one release everywhere and give all members the same layouts; then form a new group.",
        )


def send_version(
    carrier: Carrier,
    plan: PlanView,
    sender: int,
    head: VersionHead,
    outgoing: Outgoing,
    *,
    bucket_bytes: int,
    deadline_s: float,
) -> tuple[PairReport, ...]:
    """Send `head` to every receiver that the plan pairs with `sender`, all at once; a report for each, in order.

    Memory: a few buckets a pair, and what `outgoing` hands out for one operation. `deadline_s`: seconds from now.
    That all was sent does not mean that it arrived. Raises `ExchangeFailed` when any receiver failed, after all the
    others were served or the deadline came, and what `outgoing` raises; the carrier is closed then.
    """
    _check_bucket(bucket_bytes)
    started = time.monotonic()
    lock = threading.Lock()

    def job(receiver: int) -> PairReport:
        pair = _SendingPair(carrier, plan, sender, receiver, bucket_bytes, started + deadline_s, outgoing, lock)
        return pair.run(head, started)

    jobs = {plan.senders + r: (lambda r=r: job(r)) for s, r in plan.pairs if s == sender}
    reports = drive(carrier, jobs, f"sending version {head.version}")
    return tuple(reports[member] for member in sorted(reports))


def receive_version(
    carrier: Carrier,
    plan: PlanView,
    receiver: int,
    expected: VersionHead,
    *,
    bucket_bytes: int,
    deadline_s: float,
    max_bytes: int,
) -> list[Delivery]:
    """Receive `expected` from every sender that the plan pairs with `receiver`; a delivery an operation, in plan order.

    The arrays of a pair are views of one allocation. `max_bytes`: most payload bytes of all pairs together.
    Raises `ExchangeFailed` when any sender failed, sent what it may not (`ProtocolError`) or more than allowed
    (`ExchangeTooLarge`); the carrier is closed then.
    """
    _check_bucket(bucket_bytes)
    deadline = time.monotonic() + deadline_s
    budget = _Budget(max_bytes)

    def job(sender: int) -> list[Delivery]:
        operations = plan.of_pair(sender, receiver)
        first = np.empty(wire.announcement_size(len(operations)), np.uint8)
        carrier.receive(first, sender).wait(deadline)
        counts = wire.decode(first, operations, plan.digest, expected, bucket_bytes, sender)
        payload = _receive_payload(carrier, sender, operations, counts, bucket_bytes, deadline, budget)
        return wire.deliveries(payload, operations, counts, sender)

    jobs = {s: (lambda s=s: job(s)) for s, r in plan.pairs if r == receiver}
    arrived = drive(carrier, jobs, f"receiving version {expected.version}")
    return [delivery for sender in sorted(arrived) for delivery in arrived[sender]]


class _Budget:
    """How many bytes all pairs together may still allocate."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._lock = threading.Lock()

    def take(self, nbytes: int, member: int) -> None:
        with self._lock:
            self._left -= nbytes
            if self._left < 0:
                raise ExchangeTooLarge(
                    f"the members announce more than the {self._most} bytes that this receiver accepts.",
                    member=member,
                    remedy="The version is taken from the store; allow more to receive such versions rank to rank.",
                )


def _receive_payload(
    carrier: Carrier,
    sender: int,
    operations: Sequence[Operation],
    counts: Sequence[Counts],
    bucket_bytes: int,
    deadline: float,
    budget: _Budget,
) -> Bytes:
    total = wire.payload_size(operations, counts)
    budget.take(total, sender)
    payload = np.empty(total, np.uint8)
    posted: deque[Pending] = deque()
    for number in range(wire.messages(total, bucket_bytes)):
        if len(posted) == AHEAD:
            posted.popleft().wait(deadline)
        posted.append(carrier.receive(payload[number * bucket_bytes : (number + 1) * bucket_bytes], sender))
    for pending in posted:
        pending.wait(deadline)
    return payload


class _Cutter:
    """Writes a payload of known length into messages and sends them, a few at a time."""

    def __init__(self, carrier: Carrier, to: int, total: int, bucket_bytes: int, deadline: float) -> None:
        self._carrier, self._to, self._deadline = carrier, to, deadline
        self._left = total
        self._bucket_bytes = bucket_bytes
        self._posted: deque[tuple[Pending, Bytes]] = deque()
        self.messages = 0
        self._open(np.empty(min(bucket_bytes, total), np.uint8))

    def _open(self, memory: Bytes) -> None:
        self._bucket = memory[: min(self._bucket_bytes, self._left)]
        self._memory, self._filled = memory, 0

    def write(self, array: npt.NDArray[Any]) -> None:
        """The bytes of `array`; sends what is full. No more may be written than was announced."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at = 0
        while at < data.size:
            n = min(data.size - at, self._bucket.size - self._filled)
            self._bucket[self._filled : self._filled + n] = data[at : at + n]
            at += n
            self._filled += n
            self._left -= n
            if self._filled == self._bucket.size and self._left:
                self._send()
                self._open(self._spare())

    def finish(self) -> None:
        """Send the last message, empty if there was nothing to send, and wait for all."""
        self._send()
        while self._posted:
            self._posted.popleft()[0].wait(self._deadline)

    def _send(self) -> None:
        self._posted.append((self._carrier.send(self._bucket, self._to), self._memory))
        self.messages += 1

    def _spare(self) -> Bytes:
        if len(self._posted) < AHEAD:
            return np.empty(min(self._bucket_bytes, self._left), np.uint8)
        pending, memory = self._posted.popleft()
        pending.wait(self._deadline)
        return memory


class _SendingPair:
    def __init__(
        self,
        carrier: Carrier,
        plan: PlanView,
        sender: int,
        receiver: int,
        bucket_bytes: int,
        deadline: float,
        outgoing: Outgoing,
        lock: threading.Lock,
    ) -> None:
        self._carrier, self._digest = carrier, plan.digest
        self._receiver, self._member = receiver, plan.senders + receiver
        self._operations = plan.of_pair(sender, receiver)
        self._bucket_bytes, self._deadline = bucket_bytes, deadline
        self._outgoing, self._lock = outgoing, lock

    def run(self, head: VersionHead, started: float) -> PairReport:
        """Both rounds."""
        with self._lock:
            counts = tuple(self._outgoing.counts(operation) for operation in self._operations)
        first = wire.encode(wire.Announcement(self._digest, head, self._bucket_bytes, counts))
        self._carrier.send(first, self._member).wait(self._deadline)
        total = wire.payload_size(self._operations, counts)
        cutter = _Cutter(self._carrier, self._member, total, self._bucket_bytes, self._deadline)
        for operation, count in zip(self._operations, counts, strict=True):
            self._write(cutter, operation, count)
        cutter.finish()
        return PairReport(
            receiver=self._receiver,
            operations=len(counts),
            entries=sum(c.entries for c in counts),
            tiles=sum(c.tiles for c in counts),
            dense_lanes=sum(c.dense_lanes for c in counts),
            bytes=first.size + total,
            messages=1 + cutter.messages,
            seconds=time.monotonic() - started,
        )

    def _write(self, cutter: _Cutter, operation: Operation, counts: Counts) -> None:
        sizes = wire.sizes(operation, counts)
        if counts.tiles:
            with self._lock:
                tiles = self._outgoing.tiles(operation)
            self._part(cutter, operation, tiles.astype("<i8", copy=False), sizes.tiles)
        if counts.entries:
            with self._lock:
                local, bits = self._outgoing.entries(operation)
            index = np.dtype(operation.index_dtype)
            if local.dtype != index:
                raise ProtocolError(f"lanes of {operation.tensor!r} have dtype {local.dtype}, not {index}.")
            self._part(cutter, operation, local, sizes.local)
            self._part(cutter, operation, bits.astype("<u2", copy=False), sizes.bits)
        if counts.dense_lanes:
            self._dense(cutter, operation, sizes.dense)

    def _dense(self, cutter: _Cutter, operation: Operation, nbytes: int) -> None:
        left = nbytes
        with self._lock:
            pieces = iter(self._outgoing.dense(operation))
        while True:
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                break
            left -= piece.size * 2
            if left < 0:
                break
            cutter.write(piece.astype("<u2", copy=False))
        self._same(operation, nbytes - left, nbytes)
        self._pad(cutter, nbytes)

    def _part(self, cutter: _Cutter, operation: Operation, array: npt.NDArray[Any], nbytes: int) -> None:
        self._same(operation, array.nbytes, nbytes)
        cutter.write(array)
        self._pad(cutter, nbytes)

    @staticmethod
    def _same(operation: Operation, produced: int, announced: int) -> None:
        if produced != announced:
            raise ProtocolError(
                f"this rank announced {announced} bytes of {operation.tensor!r} and has {produced}.",
                remedy="Its list of changes was altered while it was being sent.",
            )

    @staticmethod
    def _pad(cutter: _Cutter, nbytes: int) -> None:
        if missing := wire.padded(nbytes) - nbytes:
            cutter.write(_ZEROS[:missing])


def _check_bucket(bucket_bytes: int) -> None:
    if bucket_bytes < 1:
        raise InvalidInput(f"messages of {bucket_bytes} bytes cannot carry anything.", remedy="Set a positive size.")
