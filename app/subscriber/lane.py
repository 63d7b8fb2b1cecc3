"""`Lane`: one receiver's ranks in the P2P groups of its run, beside the connections that drive it.

Invariants: a version counts as received only if every rank has all of it; and whoever waits here for a version learns
within the P2P timeout that it came, or that the store has to give it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from app.p2p.member import Member, Moved, Seat
from app.p2p.messages import Join, ReceiverJoin, VersionHead, View
from app.p2p.rendezvous import Rendezvous
from app.roles.base import Node
from clients.protocol import Model, ReceiverRegistration
from clients.rollout.p2p_protocol import Connect, Connected, Leave, Receive, Received
from clients.rollout.protocol import Description, Empty, ReceiverClient
from engine.errors import DteError
from transports.p2p.roster import RosterTensor

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Model)

AUTO_PATIENCE_S = 5.0
"""How long a receiver with transport auto waits for the end of an exchange whose version is decided."""
PROMPT_S = 5.0
"""How long a rank may take to answer what it can answer at once."""
REMEMBERED = 8
"""Exchanges whose outcome is kept."""


class _Outcome(Enum):
    ENDED = "ended"
    GOING_ON = "going on"
    MAY_BEGIN = "may begin"


@dataclass
class _Exchange:
    """What has become of a version in a group: the ranks that have it, and whether one has not got it."""

    group: str
    ranks: set[int] = field(default_factory=set)
    failed: bool = False


class ReceiverMember(Member):
    """One rank. It has connections of its own, so that receiving delays nothing else."""

    def __init__(self, lane: Lane, description: Description, socket: str) -> None:
        self._lane = lane
        self._description = description
        self._socket = socket
        self._link: ReceiverClient | None = None

    async def join(self, daemon: str) -> Join:
        # Who does not answer would only keep the others of a group waiting.
        link = await ReceiverClient.connect(self._socket)
        try:
            await link.status(timeout_s=PROMPT_S)
        finally:
            await link.aclose()
        d = self._description
        return ReceiverJoin(
            daemon=daemon,
            receiver=self._lane.name,
            life=self._lane.life,
            rank=d.rank,
            ranks=d.ranks,
            tensors=[
                RosterTensor(names=t.names, shape=t.shape, dtype=t.dtype, held=t.held, blocks=t.blocks)
                for t in d.tensors
            ],
            device=d.device,
        )

    async def host(self, group: str) -> str:
        raise AssertionError("a group's first member is a trainer rank")

    async def connect(self, seat: Seat) -> str:
        s = self._lane.node.settings
        place = seat.place(bind_host=s.p2p_address, timeout_s=s.p2p_timeout_s)
        body = Connect(owner=self._lane.owner, fence=self._lane.fence, **place.model_dump())
        return (await self._ask("connect", body, Connected)).plan

    async def exchange(self, seat: Seat, head: VersionHead) -> Moved:
        s = self._lane.node.settings
        self._lane.began(seat.group, head.version)
        body = Receive(
            owner=self._lane.owner,
            fence=self._lane.fence,
            group=seat.group,
            epoch=head.epoch,
            version=head.version,
            base=head.base,
            step=head.step,
            bucket_bytes=seat.bucket_bytes,
            max_bytes=s.p2p_max_bytes,
            timeout_s=s.p2p_timeout_s,
        )
        got = await self._ask("receive", body, Received)
        self._lane.node.metrics.p2p_bytes.labels("received").inc(got.bytes)
        self._lane.node.metrics.stage_seconds.labels("p2p-receive").observe(got.ms / 1e3)
        return Moved(got.entries, got.bytes, got.ms)

    async def leave(self, group: str) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.aclose()
        with contextlib.suppress(DteError):
            # On a connection of its own: what it ends may occupy the other one.
            other = await ReceiverClient.connect(self._socket)
            try:
                body = Leave(owner=self._lane.owner, fence=self._lane.fence, group=group)
                await other.call("leave", body, Empty, timeout_s=PROMPT_S)
            finally:
                await other.aclose()

    def settled(self, group: str, version: int, problem: str) -> None:
        self._lane.ended(group, version, self._description.rank, problem)

    async def _ask(self, op: str, body: Model, result: type[M]) -> M:
        if self._link is None or self._link.gone.is_set():
            self._link = await ReceiverClient.connect(self._socket)
        timeout_s = 2 * self._lane.node.settings.p2p_timeout_s
        return await self._link.call(op, body, result, timeout_s=timeout_s)


class Lane:
    """Built for one connection to a receiver. `ranks`: what each is, and its socket. `open` it once the weights are
    proven, `aclose` it with the connection."""

    def __init__(
        self,
        node: Node,
        registration: ReceiverRegistration,
        ranks: Sequence[tuple[Description, str]],
        *,
        owner: str,
        fence: int,
    ) -> None:
        self.node = node
        self.name = registration.name
        self.owner = owner
        self.fence = fence
        self.life = uuid.uuid4().hex[:12]
        self._insists = registration.transport == "p2p"
        self._rendezvous: Rendezvous = node.p2p.rendezvous(registration.run)
        self._members = [ReceiverMember(self, description, socket) for description, socket in ranks]
        self._exchanges: dict[int, _Exchange] = {}
        self._changed = asyncio.Event()
        self._open = False

    @property
    def opened(self) -> bool:
        """True once the ranks take part."""
        return self._open

    @property
    def connected(self) -> bool:
        """True while the ranks are in a group that is open."""
        group = self._rendezvous.seat_of(self._members[0])
        return group is not None and group.state == "open"

    def open(self) -> None:
        """Let the ranks take part. Idempotent."""
        if not self._open:
            self._open = True
            for member in self._members:
                self._rendezvous.add(member)

    async def aclose(self) -> None:
        """Take the ranks out."""
        self._open = False
        await asyncio.gather(*(self._rendezvous.remove(m) for m in self._members))

    # --- waiting for a version --------------------------------------------------------------------------------------

    def has(self, version: int) -> str | None:
        """The group in which all ranks have received `version`, as far as is known now."""
        known = self._exchanges.get(version)
        whole = known is not None and not known.failed and len(known.ranks) == len(self._members)
        return known.group if known is not None and whole else None

    async def expect(self, version: int) -> str | None:
        """The group in which all ranks have received the decided `version`; None if it has to come from the store."""
        if not self._open:
            return None
        old = None if await self._rendezvous.refresh() is not None else self._rendezvous.view
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while (outcome := self._outcome(version, old)) is _Outcome.GOING_ON or outcome is _Outcome.MAY_BEGIN:
            left_s = start_s + self._patience_s(outcome) - loop.time()
            if left_s <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news()
        group = self.has(version)
        self._count(version, group)
        return group

    def _patience_s(self, outcome: _Outcome) -> float:
        """How long a decided version may stay where it is until it is taken from the store."""
        timeout_s = self.node.settings.p2p_timeout_s
        if outcome is _Outcome.MAY_BEGIN:
            return timeout_s / 3 if self._insists else 0.0
        return 2 * timeout_s if self._insists else min(timeout_s, AUTO_PATIENCE_S)

    def _outcome(self, version: int, old: View | None) -> _Outcome:
        """What is to be expected of a decided version. `old`: a view that may be from before its decision."""
        known = self._exchanges.get(version)
        view = self._rendezvous.view
        if self.has(version) is not None or view is None or (known is not None and known.failed):
            return _Outcome.ENDED
        group = self._rendezvous.seat_of(self._members[0])
        if group is not None and group.exchanging and group.go is not None and group.go.version == version:
            return _Outcome.GOING_ON
        # A group that ended in the middle of it, or before it began, or a version that was passed over.
        if known is not None or group is None or (view.last is not None and view.last >= version):
            return _Outcome.ENDED
        # In an idle group none begins any more: all ranks offered the version, or could not, before it was decided.
        idle = group.state == "open" and not group.exchanging
        return _Outcome.ENDED if idle and view is not old else _Outcome.MAY_BEGIN

    async def _news(self) -> None:
        seen = self._rendezvous.view
        view = asyncio.ensure_future(
            self._rendezvous.until(lambda: True if self._rendezvous.view is not seen else None)
        )
        own = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([view, own], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (view, own):
                task.cancel()
            await asyncio.gather(view, own, return_exceptions=True)

    def _count(self, version: int, group: str | None) -> None:
        self.node.metrics.p2p_exchanges.labels("missed" if group is None else "received").inc()
        if group is None and self._insists:
            view = self._rendezvous.view
            trouble = "the coordinator does not answer" if view is None else view.trouble
            self.node.degraded.count("p2p-missed", detail=f"receiver {self.name}, version {version}: {trouble}")

    # --- what its members tell --------------------------------------------------------------------------------------

    def began(self, group: str, version: int) -> None:
        """The exchange of a version has begun."""
        known = self._exchanges.get(version)
        if known is None or known.group != group:
            self._exchanges[version] = _Exchange(group)
            for old in sorted(self._exchanges)[:-REMEMBERED]:
                del self._exchanges[old]

    def ended(self, group: str, version: int, rank: int, problem: str) -> None:
        """A rank's part in it has ended."""
        known = self._exchanges.get(version)
        if known is not None and known.group == group:
            if problem:
                known.failed = True
                log.warning("receiver %s: version %d was not received: %s", self.name, version, problem)
            else:
                known.ranks.add(rank)
        event, self._changed = self._changed, asyncio.Event()
        event.set()
