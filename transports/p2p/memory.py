"""Members of a group as threads of one process: for tests, and to try the exchange without a network.

One invariant: a call is done only when both sides have posted it, as with real carriers, so what would deadlock or
shift there does so here; calls of unequal length are an error and never a short read.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from transports.p2p.base import Bytes, Carrier, Pending
from transports.p2p.errors import CarrierClosed, ExchangeTimeout, P2PError, PeerLost, ProtocolError

OnPost = Callable[[int, int, int], None]
"""Called with (sender, receiver, number of the message between these) before a send is posted, in its thread."""


@dataclass(eq=False)
class _Call:
    buffer: Bytes
    owner: int
    other: int
    done: bool = False
    error: P2PError | None = None


class MemoryGroup:
    """Makes the carriers of `size` members; loss is injected here. Safe from any thread."""

    def __init__(self, size: int, on_post: OnPost | None = None) -> None:
        self.size = size
        self._on_post = on_post
        self.changed = threading.Condition()
        self._sends: dict[tuple[int, int], deque[_Call]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[_Call]] = defaultdict(deque)
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._gone: set[int] = set()
        self._frozen: set[int] = set()
        self._gathered: dict[int, dict[int, bytes]] = defaultdict(dict)

    def member(self, rank: int) -> MemoryCarrier:
        """The carrier of one member."""
        return MemoryCarrier(self, rank)

    def kill(self, rank: int) -> None:
        """The member is gone: calls about it fail at once."""
        with self.changed:
            self._gone.add(rank)
            for queues in (self._sends, self._receives):
                for pair, calls in queues.items():
                    if rank in pair:
                        for call in calls:
                            lost = CarrierClosed("this end of the group is closed.")
                            call.error = lost if call.owner == rank else _lost(rank)
                        calls.clear()
            self.changed.notify_all()

    def freeze(self, rank: int) -> None:
        """The member stops: calls about it wait for their deadline."""
        with self.changed:
            self._frozen.add(rank)

    def post(self, source: int, to: int, buffer: Bytes, *, send: bool) -> _Call:
        """Queue one side of a call, and carry it out if the other is there."""
        if send and self._on_post is not None:
            with self.changed:
                number = self._sent[source, to]
                self._sent[source, to] += 1
            self._on_post(source, to, number)
        owner, other = (source, to) if send else (to, source)
        call = _Call(buffer, owner, other)
        with self.changed:
            if owner in self._gone:
                raise CarrierClosed("this end of the group is closed.")
            if other in self._gone:
                raise _lost(other)
            (self._sends if send else self._receives)[source, to].append(call)
            self._match(source, to)
        return call

    def _match(self, source: int, to: int) -> None:
        sends, receives = self._sends[source, to], self._receives[source, to]
        while sends and receives and not self._frozen & {source, to}:
            sent, received = sends.popleft(), receives.popleft()
            if sent.buffer.size == received.buffer.size:
                received.buffer[:] = sent.buffer
            else:
                said = f"{sent.buffer.size} bytes were sent where {received.buffer.size} were awaited"
                sent.error = ProtocolError(said, member=to)
                received.error = ProtocolError(said, member=source)
            sent.done = received.done = True
        self.changed.notify_all()

    def gather(self, rank: int, number: int, data: bytes, deadline: float) -> list[bytes]:
        """All members' data of the `number`-th gather."""
        with self.changed:
            found = self._gathered[number]
            found[rank] = data
            self.changed.notify_all()
            while len(found) < self.size:
                if rank in self._gone:
                    raise CarrierClosed("this end of the group is closed.")
                if not self.changed.wait(deadline - time.monotonic()):
                    missing = min(set(range(self.size)) - found.keys())
                    raise ExchangeTimeout(f"member {missing} did not come in time.", member=missing)
            return [found[member] for member in range(self.size)]


class _MemoryPending(Pending):
    def __init__(self, group: MemoryGroup, call: _Call) -> None:
        self._group, self._call = group, call

    def wait(self, deadline: float) -> None:
        call, changed = self._call, self._group.changed
        with changed:
            while not call.done and call.error is None:
                if not changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise ExchangeTimeout(f"member {call.other} did not answer in time.", member=call.other)
        if call.error is not None:
            raise call.error


class MemoryCarrier(Carrier):
    """One member of a `MemoryGroup`."""

    def __init__(self, group: MemoryGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._gathers = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._group.size

    def send(self, data: Bytes, to: int) -> Pending:
        return _MemoryPending(self._group, self._group.post(self._rank, to, data, send=True))

    def receive(self, into: Bytes, source: int) -> Pending:
        return _MemoryPending(self._group, self._group.post(source, self._rank, into, send=False))

    def gather(self, data: bytes, deadline: float) -> list[bytes]:
        self._gathers += 1
        return self._group.gather(self._rank, self._gathers, data, deadline)

    def close(self) -> None:
        self._group.kill(self._rank)


def _lost(member: int) -> PeerLost:
    return PeerLost(f"the connection to member {member} broke.", member=member)
