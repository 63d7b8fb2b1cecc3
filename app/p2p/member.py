"""What a daemon must be able to do for one member of a group, whichever side it is on."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from app.p2p.messages import Carrier, Join, VersionHead
from clients.groups import GroupPlace


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place in a group. `side`: its number among the senders, or among the receivers. `roster`: a local file
    with the layouts, and its SHA-256."""

    group: str
    rank: int
    size: int
    side: int
    carrier: Carrier
    bucket_bytes: int
    address: str
    roster: Path
    roster_sha256: str

    def place(self, *, bind_host: str, timeout_s: float) -> GroupPlace:
        """What the process that takes the seat is told. `timeout_s`: until all have connected."""
        return GroupPlace(
            group=self.group,
            address=self.address,
            rank=self.rank,
            size=self.size,
            side=self.side,
            carrier=self.carrier,
            bind_host=bind_host,
            roster=str(self.roster),
            roster_sha256=self.roster_sha256,
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, slots=True)
class Moved:
    """What a member sent or received of one version. `pairs`: bytes by receiver, of a sender."""

    entries: int
    bytes: int
    ms: float
    pairs: dict[int, int] = field(default_factory=dict)


class Member(ABC):
    """One rank that this daemon speaks for. Errors are `DteError`s; each call ends within the P2P timeout, or when
    `leave` is called beside it."""

    @abstractmethod
    async def join(self, daemon: str) -> Join:
        """What the coordinator must know of it. `daemon`: who speaks for it."""

    @abstractmethod
    async def host(self, group: str) -> str:
        """Keep the group's store in the rank's process; its address as HOST:PORT."""

    @abstractmethod
    async def connect(self, seat: Seat) -> str:
        """Connect to all other members and agree on the plan; returns the plan's digest."""

    @abstractmethod
    async def exchange(self, seat: Seat, head: VersionHead) -> Moved:
        """Send or receive one version."""

    @abstractmethod
    async def leave(self, group: str) -> None:
        """Give up this group, and whatever is going on in it; of another one nothing. Never raises."""

    async def gone(self) -> None:
        """Return when the rank's process has ended, where that shows; by default never."""
        await asyncio.Event().wait()

    @abstractmethod
    def settled(self, group: str, version: int, problem: str) -> None:
        """The member's part in the exchange of `version` has ended, with `problem` "" if it is complete."""
