"""A receiver rank's end of P2P: in a group it receives versions into host memory, from where `prepare` takes them.

Invariants: receiving writes no weight and needs none of the locks that guard them, so it goes on beside serving; and
what was received counts only after the ordinary proof.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from clients.rollout import p2p_protocol as p
from clients.rollout.protocol import Empty, TargetBody
from engine.errors import DteError

if TYPE_CHECKING:
    from engine.plan.operations import Delivery
    from transports.p2p.end import GroupEnd

KEPT = 2
"""Versions kept at most: the one that is being installed, and the one that arrives meanwhile."""


class NotReceived(DteError):
    """The version is not here, or not all of it: it has to come from the store."""

    code = "not-received"


class Mailbox:
    """Versions that have arrived whole. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], tuple[p.Receive, tuple[Delivery, ...]]] = OrderedDict()

    def put(self, body: p.Receive, deliveries: tuple[Delivery, ...]) -> None:
        """Keep a version; the oldest go."""
        with self._lock:
            self._kept[body.group, body.version] = (body, deliveries)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def take(self, target: TargetBody) -> tuple[Delivery, ...]:
        """What arrived of the target; it stays until `drop`. NotReceived if it is not here, or another step's."""
        assert target.received is not None
        with self._lock:
            found = self._kept.get((target.received, target.version))
        if found is None:
            raise NotReceived(f"version {target.version} was not received by this rank.")
        body, deliveries = found
        if (body.base, body.step) != (target.base, target.step):
            raise NotReceived(
                f"what was received as version {target.version} is step {body.step} on base {body.base}, not step "
                f"{target.step} on base {target.base}."
            )
        return deliveries

    def drop(self, version: int) -> None:
        """Forget this version and older ones."""
        with self._lock:
            for key in [k for k in self._kept if k[1] <= version]:
                del self._kept[key]


class GroupReceiver:
    """At most one group at a time; `leave` may come from another thread than what it ends.

    `device`: UUID of the GPU through which NCCL may receive, "" to go through host memory. `host`: address at which the
    trainer's ranks reach this process, None for the one that its daemon names.
    """

    def __init__(self, mailbox: Mailbox, device: str = "", host: str | None = None) -> None:
        self.device = device
        self._host = host
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._end: GroupEnd | None = None

    def _own(self) -> GroupEnd:
        """Made when it is wanted first: most receivers are in no group."""
        from transports.p2p.end import GroupEnd

        with self._lock:
            if self._end is None:
                self._end = GroupEnd()
            return self._end

    def connect(self, body: p.Connect) -> p.Connected:
        """Operation `connect`."""
        from transports.p2p.end import Place

        fields = body.model_dump(exclude={"owner", "fence", "roster"})
        fields["bind_host"] = self._host or body.bind_host
        plan = self._own().connect(Place(roster=Path(body.roster), device=self.device, **fields))
        return p.Connected(plan=plan.digest, operations=len(plan.operations))

    def receive(self, body: p.Receive) -> p.Received:
        """Operation `receive`."""
        from transports.p2p.rounds import VersionHead, receive_version

        seated = self._own().seated(body.group)
        started = time.perf_counter()
        deliveries = receive_version(
            seated.carrier,
            seated.plan,
            seated.place.side,
            VersionHead(epoch=body.epoch, version=body.version, base=body.base, step=body.step),
            bucket_bytes=body.bucket_bytes,
            deadline_s=body.timeout_s,
            max_bytes=body.max_bytes,
        )
        self._mailbox.put(body, tuple(deliveries))
        return p.Received(
            entries=sum(d.local.size + d.dense.size for d in deliveries),
            bytes=sum(a.nbytes for d in deliveries for a in (d.local, d.bits, d.tiles, d.dense)),
            ms=(time.perf_counter() - started) * 1e3,
        )

    def leave(self, body: p.Leave | None = None) -> Empty:
        """Operation `leave`."""
        with self._lock:
            end = self._end
        if end is not None:
            end.leave(None if body is None else body.group)
        return Empty()
