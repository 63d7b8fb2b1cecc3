"""What the exchange needs from whatever moves bytes between ranks: matched calls between pairs, and a small gather.

One invariant: calls between two members match in order and in size; a carrier that failed once stays failed, and a new
group is made instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
"""Contiguous host memory, one dimension."""


class Pending(ABC):
    """A posted call. Its buffer belongs to the carrier until `wait` returns, and after an error until `close`."""

    @abstractmethod
    def wait(self, deadline: float) -> None:
        """Return when the call is done; `deadline` is a time of `time.monotonic`. Called once.

        A send is done when its buffer may be used again, which says nothing about the other member having the bytes.
        Raises `PeerLost`, `ExchangeTimeout`, `CarrierClosed`. A timeout breaks the whole carrier.
        """


class Carrier(ABC):
    """One member's end of a group.

    Calls about different members may come from different threads at once; calls about one member from one thread at a
    time. The n-th `send` from a to b matches the n-th `receive` at b from a, calls of zero bytes included. The
    receiver's buffer must have the length of what is sent: both sides know it beforehand. Posting does not block.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This member's number in the group."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Members in the group."""

    @abstractmethod
    def send(self, data: Bytes, to: int) -> Pending:
        """Post the sending of `data` to member `to`. Raises `PeerLost`, `CarrierClosed`."""

    @abstractmethod
    def receive(self, into: Bytes, source: int) -> Pending:
        """Post the receiving of exactly `into.size` bytes from member `source`. Raises `PeerLost`, `CarrierClosed`."""

    @abstractmethod
    def gather(self, data: bytes, deadline: float) -> list[bytes]:
        """Every member's `data`, by number; all members call it equally often, with data of one length.

        Raises `ExchangeTimeout` naming the first member that is missing, `PeerLost`, `CarrierClosed`.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group; whatever waits, in any thread or at another member for this one, ends with an error.

        Returns promptly, may be called twice and from any thread. Other members see `PeerLost`.
        """
