"""`Meeting`: the coordinator's view of one run's members, groups and exchanges. A state machine without I/O.

Invariants: at most one group exists; an exchange begins only in an open group, when every sender offers the same
version, and each version at most once; a group one of whose members failed, left or fell silent is never used again,
except that an exchange goes on to its end for the other members.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from app.p2p.choosing import CarrierChoice, carrier_for, choose, largest_share, roster_of
from app.p2p.messages import (
    Carrier,
    GroupView,
    Join,
    Offer,
    ReceiverJoin,
    Report,
    SenderJoin,
    VersionHead,
    View,
    member_id,
)
from engine.errors import InvalidInput, StateConflict
from engine.records import record_bytes
from transports.p2p.roster import Roster

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0
FIRST_REST_S = 2.0
LAST_REST_S = 300.0
MAX_MEMBERS = 4096


@dataclass
class _Member:
    id: str
    join: SenderJoin | ReceiverJoin
    offer: Offer | None = None


@dataclass
class _Group:
    id: str
    senders: list[str]
    receivers: list[str]
    epoch: int
    carrier: Carrier
    until_s: float
    roster: Roster
    share: float
    """Of all lanes, what one receiver rank holds at most."""
    address: str = ""
    plans: dict[str, str] = field(default_factory=dict)
    open: bool = False
    go: VersionHead | None = None
    waiting: set[str] = field(default_factory=set)
    """Members whose part in the exchange is not complete."""
    doomed: str = ""
    """Why it is over as soon as the exchange is."""
    struck: set[str] = field(default_factory=set)
    """Receivers that its failure has been counted against."""

    @property
    def members(self) -> list[str]:
        return [*self.senders, *self.receivers]

    def has(self, sending: list[SenderJoin], receiving: list[ReceiverJoin]) -> bool:
        """Whether these are its members."""
        return self.members == [*map(member_id, sending), *map(member_id, receiving)]


class Meeting:
    """`timeout_s`: how long connecting, and one exchange, may take. `lease_s`: how long a daemon may be silent.
    `max_bytes`: versions that would take a receiver rank more are passed over. On the event loop only; every call ends
    with what it makes possible: a group, an exchange, or the end of one."""

    def __init__(
        self,
        run: str,
        *,
        timeout_s: float,
        lease_s: float,
        carrier: CarrierChoice,
        bucket_bytes: int = 4 << 20,
        max_bytes: int = 4 << 30,
        clock: Callable[[], float],
        notice: Callable[[str, dict[str, object]], object] = lambda kind, data: None,
    ) -> None:
        self.run = run
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._carrier: CarrierChoice = carrier
        self._bucket_bytes = bucket_bytes
        self._max_bytes = max_bytes
        self._clock = clock
        self._notice = notice
        self._members: dict[str, _Member] = {}
        self._seen: dict[str, float] = {}
        self._group: _Group | None = None
        self._last: int | None = None
        self._trouble = ""
        self._failures = 0
        self._not_before_s = 0.0
        self._strikes: dict[str, int] = {}
        self._rests: dict[str, float] = {}
        self._exchange: dict[str, Report] = {}
        self._instance = secrets.token_hex(4)
        self._seq = 0
        self._changed = asyncio.Event()

    # --- what daemons say -------------------------------------------------------------------------------------------

    def join(self, join: Join) -> str:
        """Take a member in, or again; returns its identifier."""
        member = member_id(join)
        self._seen[join.daemon] = self._clock()
        known = self._members.get(member)
        if known is None or known.join != join:
            if known is None and len(self._members) >= MAX_MEMBERS:
                raise StateConflict(f"{MAX_MEMBERS} members have joined run {self.run!r} already.")
            if isinstance(join, SenderJoin) and join.rank >= join.world:
                raise InvalidInput(f"trainer rank {join.rank} does not exist in a world of {join.world}.")
            if isinstance(join, ReceiverJoin):
                self._drop_lives_before(join)
            self._drop(member, "it joined anew")
            self._members[member] = _Member(member, join)
            self._bump()
            self._settle()
        return member

    def leave(self, member: str) -> None:
        """A member is gone. Idempotent."""
        self._drop(member, "it left")
        self._settle()

    def seen(self, daemon: str) -> None:
        """The daemon has asked: its members live."""
        if daemon:
            self._seen[daemon] = self._clock()

    def offer(self, member: str, offer: Offer) -> None:
        """A sender has read a version. StateConflict if nobody knows the member."""
        known = self._members.get(member)
        if known is None:
            raise StateConflict(f"{member!r} has not joined.", remedy="Join again.")
        if known.offer != offer:
            known.offer = offer
            self._settle()

    def report(self, group: str, member: str, report: Report) -> None:
        """StateConflict if that group is over, or the member is not in it."""
        g = self._group
        if g is None or g.id != group or member not in g.members:
            raise StateConflict(f"group {group} is over.", remedy="Ask for the present one.")
        if report.what == "failed":
            if member in g.waiting or not g.doomed:  # else it has said so before, or has done its part
                self._exchange[member] = report
                self._members.pop(member, None)  # it joins again when it can
                lost = g.members[report.lost] if report.lost is not None and report.lost < len(g.members) else member
                who = member if lost == member else f"{member} lost {lost}"
                self._fail(g, member, f"{who}: {report.why}", because_of=[lost])
        elif report.what == "hosting":
            if member != g.members[0] or not report.address:
                raise InvalidInput("only the group's first member hosts its store, and says where.")
            g.address = report.address
        elif report.what == "connected":
            g.plans[member] = report.plan or ""
            self._open(g)
        elif report.what == "done" and g.go is not None and report.version == g.go.version:
            self._exchange[member] = report
            self._ended(g, member)
        self._bump()
        self._settle()

    # --- what they are told -----------------------------------------------------------------------------------------

    def view(self) -> View:
        g = self._group
        return View(
            instance=self._instance,
            seq=self._seq,
            run=self.run,
            members=sorted(self._members),
            last=self._last,
            trouble=self._trouble,
            exchange=dict(self._exchange),
            group=None
            if g is None
            else GroupView(
                id=g.id,
                state="open" if g.open else "forming",
                carrier=g.carrier,
                bucket_bytes=self._bucket_bytes,
                epoch=g.epoch,
                members=g.members,
                senders=len(g.senders),
                address=g.address,
                plan=next(iter(g.plans.values()), None),
                go=g.go,
                exchanging=bool(g.waiting),
            ),
        )

    def roster(self, group: str) -> Callable[[], bytes]:
        """What gives the layouts of the group's members as canonical JSON: work for a thread. StateConflict if the
        group is over."""
        if self._group is None or self._group.id != group:
            raise StateConflict(f"group {group} is over.", remedy="Ask for the present one.")
        roster = self._group.roster
        return lambda: record_bytes(roster)

    async def wait(self, tag: str, timeout_s: float) -> View:
        """The view, as soon as it is another than `tag`, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while (view := self.view()).tag == tag:
                    await self._changed.wait()
        except TimeoutError:
            return self.view()
        return view

    @property
    def idle(self) -> bool:
        """True when nobody has joined."""
        return not self._members

    def tick(self) -> None:
        """Notice silence: daemons whose lease has ended, connecting and exchanges that take too long."""
        now = self._clock()
        silent = {d for d, at in self._seen.items() if now - at > self._lease_s}
        for member in [m.id for m in self._members.values() if m.join.daemon in silent]:
            self._drop(member, f"its daemon has been silent for {self._lease_s:g} s")
        for daemon in silent:
            del self._seen[daemon]
        g = self._group
        if g is not None and now >= g.until_s and (g.waiting or not g.open):
            late = sorted(g.waiting) if g.open else [m for m in g.members if m not in g.plans]
            for member in late:
                self._members.pop(member, None)
            what = "exchange" if g.open else "connect"
            if g.open:  # who is missing while connecting is said by those who wait for it
                self._strike(g, late)
            self._dissolve(g.doomed or f"{', '.join(late[:3])} did not {what} in time", failed=True)
        self._settle()

    # --- transitions ------------------------------------------------------------------------------------------------

    def _drop_lives_before(self, join: ReceiverJoin) -> None:
        """StateConflict if a daemon that lives has another receiver of this name."""
        lives = [
            (m.id, m.join.daemon)
            for m in self._members.values()
            if isinstance(m.join, ReceiverJoin) and m.join.receiver == join.receiver and m.join.life != join.life
        ]
        if other := next((daemon for _, daemon in lives if daemon != join.daemon), None):
            raise StateConflict(
                f"receiver {join.receiver!r} takes part through daemon {other} already.",
                remedy="Give every receiver of a run a name of its own. If that daemon is dead, this one's turn comes "
                f"when it has been silent for {self._lease_s:g} s.",
            )
        for member, _ in lives:
            self._drop(member, "another life of its receiver joined")

    def _drop(self, member: str, why: str) -> None:
        if self._members.pop(member, None) is None:
            return
        self._bump()
        if self._group is not None and member in self._group.members:
            if self._group.waiting or not self._group.open:
                self._fail(self._group, member, f"{member}: {why}", because_of=[])
            else:
                self._dissolve(f"{member}: {why}", failed=False)

    def _fail(self, g: _Group, member: str, why: str, *, because_of: list[str]) -> None:
        """Nothing comes of the group any more. Those who are exchanging may finish: a receiver's death is no reason
        for another one to lose the version."""
        self._strike(g, because_of)
        if not g.waiting:
            self._dissolve(why, failed=True)
            return
        if not g.doomed:
            g.doomed = self._trouble = why
        self._ended(g, member)

    def _ended(self, g: _Group, member: str) -> None:
        """The member's part in the exchange has ended."""
        g.waiting.discard(member)
        if g.waiting:
            return
        if g.doomed:
            self._dissolve(g.doomed, failed=True)
        elif g.go is not None:
            self._failures = 0
            for receiver in {self._receiver_of(m) for m in g.receivers}:
                self._strikes.pop(receiver, None)
            self._notice("p2p-exchanged", {"version": g.go.version, "members": len(g.members)})

    def _strike(self, g: _Group, members: list[str]) -> None:
        """Leave the receivers of these out of groups for a while, longer each time: they must not keep the others from
        theirs for ever."""
        for receiver in {self._receiver_of(m) for m in members} - g.struck - {""}:
            g.struck.add(receiver)
            strikes = self._strikes[receiver] = self._strikes.get(receiver, 0) + 1
            self._rests[receiver] = self._clock() + min(LAST_REST_S, FIRST_REST_S * 4.0 ** min(strikes - 1, 9))

    @staticmethod
    def _receiver_of(member: str) -> str:
        """The receiver whose rank it is; "" for a trainer rank."""
        kind, _, rest = member.partition(":")
        return rest.rsplit(":", 2)[0] if kind == "receiver" else ""

    def _dissolve(self, why: str, *, failed: bool) -> None:
        g, self._group = self._group, None
        if g is None:
            return
        if failed:
            self._failures += 1
            pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 9))
            self._not_before_s = self._clock() + pause_s
            self._trouble = why
            log.warning("run %s: group %s is over: %s", self.run, g.id, why)
        self._notice("p2p-group-ended", {"group": g.id, "why": why, "failed": failed})
        self._bump()

    def _open(self, g: _Group) -> None:
        if len(g.plans) < len(g.members):
            return
        if len(set(g.plans.values())) > 1:
            self._dissolve("its members computed different plans", failed=True)
            return
        g.open = True
        self._trouble = ""
        self._notice("p2p-group-open", {"group": g.id, "senders": len(g.senders), "receivers": len(g.receivers)})

    def _settle(self) -> None:
        g = self._group
        wanted = self._wanted()
        if g is not None and not g.waiting and wanted is not None and not g.has(*wanted):
            self._dissolve("its members changed", failed=False)
            g = None
        if g is None and wanted is not None and self._clock() >= self._not_before_s:
            self._form(*wanted)
        elif g is not None and g.open and not g.waiting and not g.doomed:
            self._begin(g)

    def _wanted(self) -> tuple[list[SenderJoin], list[ReceiverJoin]] | None:
        """Who is to be in a group now. Who is in one already stays in it: it was let in because everybody had to
        rest."""
        now_s = self._clock()
        seated = set() if self._group is None else set(map(self._receiver_of, self._group.receivers))
        return choose(
            (m.join for m in self._members.values()),
            lambda name: name in seated or self._rests.get(name, now_s) <= now_s,
        )

    def _form(self, sending: list[SenderJoin], receiving: list[ReceiverJoin]) -> None:
        roster = roster_of(self.run, sending, receiving)
        self._group = g = _Group(
            id=secrets.token_hex(8),
            senders=list(map(member_id, sending)),
            receivers=list(map(member_id, receiving)),
            epoch=roster.epoch,
            carrier=carrier_for(self._carrier, [*sending, *receiving]),
            until_s=self._clock() + 1.5 * self._timeout_s,
            roster=roster,
            share=largest_share(roster),
        )
        self._notice("p2p-group-forming", {"group": g.id, "senders": len(sending), "receivers": len(receiving)})
        self._bump()

    def _begin(self, g: _Group) -> None:
        offers = [offer for m in g.senders if (offer := self._members[m].offer) is not None]
        if len(offers) < len(g.senders) or len({o.head.model_dump_json() for o in offers}) > 1:
            return
        head = offers[0].head
        if head.epoch != g.epoch or (self._last is not None and head.version <= self._last):
            return
        self._last, self._exchange = head.version, {}
        if sum(o.bytes for o in offers) * g.share <= self._max_bytes:
            g.go, g.waiting = head, set(g.members)
            g.until_s = self._clock() + 1.5 * self._timeout_s
        self._bump()

    def _bump(self) -> None:
        self._seq += 1
        event, self._changed = self._changed, asyncio.Event()
        event.set()
