"""Ranks connected by NCCL: host memory is staged on the GPU and copied on streams of its own.

Invariants: nothing here blocks the GPU's other work or another pair's, every pair has a communicator of its own; and no
wait outlasts its deadline, since it asks the device instead of waiting in it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from transports.p2p.base import Bytes, Carrier, Pending
from transports.p2p.bounded import within
from transports.p2p.errors import (
    CarrierClosed,
    CarrierUnavailable,
    DeviceShared,
    ExchangeTimeout,
    P2PError,
    PeerLost,
)
from transports.p2p.rendezvous import Meeting

if TYPE_CHECKING:
    import torch

FIRST_PAUSE_S, LAST_PAUSE_S = 0.0001, 0.005
MOST_BLOCKS = 2
"""Thread blocks of a transfer: many pairs run at once beside what the GPU is there for."""
NEVER = timedelta(days=365)
ENVIRONMENT = {
    # The process belongs to somebody else: what is late here is given up here, and must not end it.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""What torch reads while a group is being made, and only then."""


class Staging(Protocol):
    """Moves bytes between the host and where the group can send from, for one other member."""

    def put(self, data: Bytes) -> Any:
        """A device tensor with the bytes, ready for the group."""
        ...

    def room(self, nbytes: int) -> Any:
        """A device tensor to receive into."""
        ...

    def take(self, tensor: Any, into: Bytes) -> None:
        """Copy what arrived to the host; `into` holds it on return."""
        ...

    def run(self, post: Callable[[], Any]) -> Any:
        """Call `post` so that the group sees what `put` did."""
        ...


class CudaStaging:
    """Staging on one GPU, on a side stream."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch: Any = torch
        self._device = device
        self._stream: Any = self._torch.cuda.Stream(device)

    def put(self, data: Bytes) -> Any:
        with self._torch.cuda.stream(self._stream):
            tensor = self.room(data.size)
            if data.size:
                tensor.copy_(self._torch.from_numpy(data))
            return tensor

    def room(self, nbytes: int) -> Any:
        # An empty call is one of a single byte: both sides know that it carries nothing.
        with self._torch.cuda.stream(self._stream):
            return self._torch.empty(max(1, nbytes), dtype=self._torch.uint8, device=self._device)

    def take(self, tensor: Any, into: Bytes) -> None:
        if into.size:
            with self._torch.cuda.stream(self._stream):
                self._torch.from_numpy(into).copy_(tensor)

    def run(self, post: Callable[[], Any]) -> Any:
        with self._torch.cuda.stream(self._stream):
            return post()


class _NcclPending(Pending):
    def __init__(self, carrier: NcclCarrier, work: Any, member: int, tensor: Any, into: Bytes | None) -> None:
        self._carrier, self._work, self._member = carrier, work, member
        self._tensor, self._into = tensor, into

    def wait(self, deadline: float) -> None:
        pause = FIRST_PAUSE_S
        while True:
            self._carrier.check_open()
            try:
                if self._work.is_completed():
                    break
            except RuntimeError as error:
                raise self._carrier.lost(self._member) from error
            if time.monotonic() >= deadline:
                raise ExchangeTimeout(f"member {self._member} did not answer in time.", member=self._member)
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)
        try:
            # Without an error the work is done: this only raises one that ended it.
            self._work.wait()
            if self._into is not None:
                self._carrier.staging(self._member).take(self._tensor, self._into)
        except RuntimeError as error:
            raise self._carrier.lost(self._member) from error
        self._carrier.forget(self)


class NcclCarrier(Carrier):
    """A `ProcessGroupNCCL` of its own, beside whatever groups the process has."""

    def __init__(self, group: Any, meeting: Meeting, stagings: Mapping[int, Staging]) -> None:
        """`stagings`: by the members that this one exchanges with."""
        self._group, self._meeting, self._stagings = group, meeting, stagings
        self._posting = threading.Lock()
        self._closed = False
        # Memory that a transfer may still use is kept until it is done or the group was aborted.
        self._posted: set[Pending] = set()

    @property
    def rank(self) -> int:
        return self._meeting.rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def staging(self, member: int) -> Staging:
        """Where bytes from and to this member are staged. CarrierUnavailable if it was not connected."""
        try:
            return self._stagings[member]
        except KeyError:
            raise CarrierUnavailable(f"member {member} was not among those to be connected.", member=member) from None

    def send(self, data: Bytes, to: int) -> Pending:
        staging = self.staging(to)
        return self._post(to, staging, lambda: staging.put(data if data.flags.writeable else data.copy()), None)

    def receive(self, into: Bytes, source: int) -> Pending:
        staging = self.staging(source)
        return self._post(source, staging, lambda: staging.room(into.size), into)

    def _post(self, member: int, staging: Staging, make: Callable[[], Any], into: Bytes | None) -> Pending:
        # Torch's group is not made for several threads; its communicators exist already, so no call blocks here.
        with self._posting:
            self.check_open()
            try:
                tensor = make()
                verb = self._group.send if into is None else self._group.recv
                work = staging.run(lambda: verb([tensor], member, 0))
            except RuntimeError as error:
                raise self.lost(member) from error
            pending = _NcclPending(self, work, member, tensor, into)
            self._posted.add(pending)
        return pending

    def check_open(self) -> None:
        """CarrierClosed once `close` was called."""
        if self._closed:
            raise CarrierClosed("this end of the group is closed.")

    def lost(self, member: int) -> P2PError:
        """What an error of the library about `member` means."""
        if self._closed:
            return CarrierClosed("this end of the group was closed while a call waited.")
        return PeerLost(f"the connection to member {member} broke.", member=member)

    def forget(self, pending: Pending) -> None:
        """The call is done."""
        self._posted.discard(pending)

    def gather(self, data: bytes, deadline: float) -> list[bytes]:
        return self._meeting.gather(data, deadline)

    def warm(self, deadline: float) -> None:
        """Connect every pair, in an order that is the same everywhere, so that nobody waits in a circle."""
        nothing = np.zeros(0, np.uint8)
        own = self.rank
        for low, high in sorted((min(own, other), max(own, other)) for other in self._stagings):
            pending = self.send(nothing, high) if own == low else self.receive(nothing, low)
            pending.wait(deadline)

    def close(self) -> None:
        self._meeting.close()
        if self._closed:
            return
        self._closed = True
        # Not under the lock: a post that hangs in the library is ended by this.
        group, self._group = self._group, None
        group.abort()
        self._posted.clear()


def connect_nccl(
    meeting: Meeting, device: torch.device | None, peers: Sequence[int] | None, deadline: float
) -> NcclCarrier:
    """Connect with `peers` (all if None) over NCCL, from `device` (the current one if None).

    Raises `CarrierUnavailable` (no CUDA, no NCCL), `DeviceShared`, `ExchangeTimeout`, `PeerLost`.
    """
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        raise CarrierUnavailable(
            "this process has no GPU, or a torch without NCCL.", remedy="Use the gloo carrier: it needs neither."
        )
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    identity = str(torch.cuda.get_device_properties(device).uuid)
    refuse_shared([each.decode() for each in meeting.gather(identity.encode(), deadline)])
    others = [m for m in (range(meeting.size) if peers is None else peers) if m != meeting.rank]

    def make() -> NcclCarrier:
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)  # of this thread, which ends with the call
        nccl: Any = ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = NEVER
        options.config.max_ctas = MOST_BLOCKS
        with environment(ENVIRONMENT):
            group = nccl(meeting.store, meeting.rank, meeting.size, options)
        carrier = NcclCarrier(group, meeting, {m: CudaStaging(device) for m in others})
        try:
            carrier.warm(deadline)
        except BaseException:
            carrier.close()
            raise
        return carrier

    try:
        return within(deadline, make, NcclCarrier.close, "the members came, but could not be connected in time.")
    except RuntimeError as error:
        raise PeerLost(f"the members came, but NCCL could not connect them: {error}.") from error


def refuse_shared(devices: Sequence[str]) -> None:
    """DeviceShared if two members have one GPU. `devices`: the UUID of each member's."""
    seen: dict[str, int] = {}
    for member, device in enumerate(devices):
        if (first := seen.setdefault(device, member)) != member:
            raise DeviceShared(
                f"members {first} and {member} both use GPU {device}.",
                member=member,
                remedy="NCCL takes one process a GPU: give each its own, or use the gloo carrier.",
            )


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """`values` in the process's environment meanwhile: torch has no other way to say this for one group."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
