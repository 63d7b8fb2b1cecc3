"""Ranks connected by torch's Gloo over TCP, host memory to host memory.

One invariant: no wait outlasts its deadline. Gloo gives a whole group up when one wait in it times out, so what timed
out first is remembered and said to all that wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from transports.p2p.base import Bytes, Carrier, Pending
from transports.p2p.bounded import within
from transports.p2p.errors import CarrierClosed, ExchangeTimeout, P2PError, PeerLost
from transports.p2p.rendezvous import Meeting

if TYPE_CHECKING:
    import torch

TAG, NEVER_SENT_TAG = 0, 1
SMALLEST_WAIT = timedelta(milliseconds=1)
ATTEMPTS = 5
"""Gloo tries so often to connect, each time for as long as its timeout says, if a member is lost meanwhile."""
THREADS = 1
"""Gloo's threads for collectives, of which there are none here; the transfers run in one thread a device."""


class _GlooPending(Pending):
    def __init__(self, carrier: GlooCarrier, work: Any, member: int) -> None:
        self._carrier, self._work, self._member = carrier, work, member

    def wait(self, deadline: float) -> None:
        # Gloo reads a timeout of 0 as none.
        left = max(SMALLEST_WAIT, timedelta(seconds=deadline - time.monotonic()))
        try:
            done = self._work.wait(left)
        except RuntimeError as error:
            raise self._carrier.failure(error, self._member, deadline) from error
        if done is False:
            raise self._carrier.failure(RuntimeError("the call was aborted"), self._member, deadline)
        self._carrier.forget(self)


class GlooCarrier(Carrier):
    """A `ProcessGroupGloo` of its own, beside whatever groups the process has."""

    def __init__(self, group: Any, meeting: Meeting) -> None:
        """`group`: a connected `ProcessGroupGloo` of the members of `meeting`."""
        self._group: Any = group
        self._meeting = meeting
        self._rank, self._size = meeting.rank, meeting.size
        self._posting = threading.Lock()
        self._closed = False
        self._given_up: int | None = None
        # What is posted keeps its memory here until it is done or the connections are closed: Gloo may still use it.
        self._posted: set[Pending] = set()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def send(self, data: Bytes, to: int) -> Pending:
        return self._post("send", data if data.flags.writeable else data.copy(), to)

    def receive(self, into: Bytes, source: int) -> Pending:
        return self._post("recv", into, source)

    def _post(self, verb: str, buffer: Bytes, member: int) -> Pending:
        tensor = _tensor(buffer)
        with self._posting:
            if self._closed:
                raise CarrierClosed("this end of the group is closed.")
            try:
                work = getattr(self._group, verb)([tensor], member, TAG)
            except RuntimeError as error:
                raise self.failure(error, member, None) from error
            pending = _GlooPending(self, work, member)
            self._posted.add(pending)
        return pending

    def forget(self, pending: Pending) -> None:
        """The call is done."""
        self._posted.discard(pending)

    def gather(self, data: bytes, deadline: float) -> list[bytes]:
        return self._meeting.gather(data, deadline)

    def failure(self, error: RuntimeError, member: int, deadline: float | None) -> P2PError:
        """What a failed call about `member` means. `deadline`: the call's, None if it was only posted."""
        if self._closed:
            return CarrierClosed("this end of the group was closed while a call waited.")
        if self._given_up is not None:
            return CarrierClosed(f"the group was given up because member {self._given_up} did not answer in time.")
        if deadline is not None and time.monotonic() >= deadline:
            self._given_up = member
            return ExchangeTimeout(f"member {member} did not answer in time.", member=member)
        return PeerLost(f"the connection to member {member} broke.", member=member)

    def close(self) -> None:
        self._meeting.close()
        with self._posting:
            if self._closed:
                return
            self._closed = True
            group, self._group = self._group, None
            if self._size == 1:
                return
            # `abort` ends no wait in Gloo; a wait that times out does: it closes every connection of the group. It is
            # made on a tag that nobody sends with, so that it can take nobody's bytes.
            nobody = _tensor(np.empty(1, np.uint8))
            with contextlib.suppress(RuntimeError):
                group.recv([nobody], (self._rank + 1) % self._size, NEVER_SENT_TAG).wait(SMALLEST_WAIT)
            self._posted.clear()


def connect_gloo(meeting: Meeting, bind_host: str, deadline: float) -> GlooCarrier:
    """Connect every member with every other, listening on the address of `bind_host`.

    Raises `ExchangeTimeout`, `PeerLost` when a member ends or stops meanwhile.
    """
    from torch.distributed import ProcessGroupGloo

    left = timedelta(seconds=deadline - time.monotonic())
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = max(SMALLEST_WAIT, left / ATTEMPTS)
    options._devices = [ProcessGroupGloo.create_device(hostname=bind_host)]
    options._threads = THREADS

    def make() -> GlooCarrier:
        return GlooCarrier(ProcessGroupGloo(meeting.store, meeting.rank, meeting.size, options), meeting)

    try:
        return within(deadline, make, GlooCarrier.close, "the members came, but could not be connected in time.")
    except RuntimeError as error:
        kind = ExchangeTimeout if time.monotonic() >= deadline else PeerLost
        raise kind(f"the members came, but could not be connected: {error}.") from error


def _tensor(buffer: Bytes) -> torch.Tensor:
    import torch

    return torch.from_numpy(buffer)
