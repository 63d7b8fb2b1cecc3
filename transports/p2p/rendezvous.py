"""How processes that were started independently find each other: a small key-value store in one of them.

One invariant: nothing here outlasts its deadline, and whoever waits in vain is told which members are missing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from transports.p2p.errors import CarrierClosed, ExchangeTimeout, P2PError, PeerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

T = TypeVar("T")
FIRST_PAUSE_S, LAST_PAUSE_S = 0.002, 0.1
SMALLEST_TIMEOUT_S = 0.01
BACKLOG = 1024


def host_store(host: str) -> tuple[TCPStore, int]:
    """A store in this process that listens on the address of `host` alone, and the port that the system chose.

    It lives as long as the returned object. Raises OSError when `host` is no address of this machine.
    """
    from torch._C._distributed_c10d import TCPStore

    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    port = int(listener.getsockname()[1])
    # The store takes the listening socket over and closes it.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


class Meeting:
    """One member's view of a group that meets at a store; keys of one `group` never mix with those of another."""

    def __init__(self, address: tuple[str, int], group: str, rank: int, size: int, deadline: float) -> None:
        """Raises `ExchangeTimeout` when nobody listens at `address` until `deadline`."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self.rank, self.size = rank, size
        self._rounds = 0
        self._closed = threading.Event()
        host, port = address
        try:
            client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_left(deadline))
        except (RuntimeError, ValueError) as error:
            raise ExchangeTimeout(
                f"nobody answers at {host}:{port}, where group {group} meets: {error}.",
                member=0,
                remedy="Check that the address can be reached from here; then form a new group.",
            ) from error
        self.store: Store = PrefixStore(group, client)

    def gather(self, data: bytes, deadline: float) -> list[bytes]:
        """Every member's `data`, by number. Raises `ExchangeTimeout`, `PeerLost` (the store is gone), `CarrierClosed`.

        Equal lengths are checked by whoever reads; a missing member is named.
        """
        self._rounds += 1
        keys = [f"gather/{self._rounds}/{rank}" for rank in range(self.size)]
        # Zero bytes are no value for every store: one byte leads.
        self._ask(deadline, lambda: self.store.set(keys[self.rank], (b"=" + data).hex()))
        pause = FIRST_PAUSE_S
        while missing := self._missing(keys, deadline):
            if time.monotonic() >= deadline:
                raise ExchangeTimeout(
                    f"{len(missing)} of {self.size} members did not come in time: {_some(missing)}.",
                    member=missing[0],
                )
            if self._closed.wait(min(pause, max(0.0, deadline - time.monotonic()))):
                raise CarrierClosed("the group was closed while its members were awaited.")
            pause = min(2 * pause, LAST_PAUSE_S)
        values = self._ask(deadline, lambda: [self.store.get(key) for key in keys])
        return [bytes.fromhex(value.decode())[1:] for value in values]

    def _missing(self, keys: list[str], deadline: float) -> list[int]:
        if self._ask(deadline, lambda: self.store.check(keys)):
            return []
        return self._ask(deadline, lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])])

    def _ask(self, deadline: float, question: Callable[[], T]) -> T:
        if self._closed.is_set():
            raise CarrierClosed("this end of the group is closed.")
        try:
            self.store.set_timeout(_left(deadline))
            return question()
        except (RuntimeError, ValueError) as error:
            failure: type[P2PError] = ExchangeTimeout if time.monotonic() >= deadline else PeerLost
            raise failure(f"the member that hosts the group's store does not answer: {error}.", member=0) from error

    def close(self) -> None:
        """End a `gather` that waits."""
        self._closed.set()


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(SMALLEST_TIMEOUT_S, deadline - time.monotonic()))


def _some(members: list[int], most: int = 8) -> str:
    return ", ".join(map(str, members[:most])) + (f" and {len(members) - most} more" if len(members) > most else "")
