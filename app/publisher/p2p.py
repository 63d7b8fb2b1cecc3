"""`TrainerMember`: one trainer rank in the groups of its run, as the daemon sees it: the rank's worker does the work.

One invariant: nothing here holds up the version: it is offered within a bounded time, and delivered to the store
whatever becomes of the offer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TypeVar

from app.p2p.errors import WorkerSilent
from app.p2p.member import Member, Moved, Seat
from app.p2p.messages import Join, Offer, SenderJoin, VersionHead
from app.p2p.rendezvous import Rendezvous
from app.publisher.link import WorkerLink
from app.publisher.worker_handle import WorkerHandle
from app.roles.base import Node
from app.worker import protocol as p
from clients.protocol import Model, RankRegistration
from engine.errors import DteError, StateConflict
from transports.p2p.roster import RosterSlice

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Model)
PROMPT_S = 5.0
"""How long a worker may take to answer what it can answer at once."""


class TrainerMember(Member):
    """Add it to a rendezvous with `enter`; `offer` what the worker has in flight."""

    def __init__(self, node: Node, link: WorkerLink, registration: RankRegistration, epoch: int) -> None:
        self._node = node
        self._link = link
        self._registration = registration
        self._epoch = epoch
        self._rendezvous: Rendezvous | None = None
        self._handle: WorkerHandle | None = None
        """The worker that is in a group, or enters one."""

    def enter(self) -> None:
        """Take part from now on."""
        self._rendezvous = self._node.p2p.rendezvous(self._registration.run)
        self._rendezvous.add(self)

    async def aclose(self) -> None:
        """Take no further part."""
        if self._rendezvous is not None:
            await self._rendezvous.remove(self)

    async def offer(self, version: int) -> None:
        """Say that the version in flight can be sent. Never raises: at worst receivers take it from the store."""
        if self._rendezvous is None or self._rendezvous.view is None:
            return  # nobody to tell
        try:
            pinned = await self._ask(await self._link.ready(), p.P2PPin(version=version), p.P2PPinned, PROMPT_S)
            head = VersionHead(epoch=pinned.epoch, version=pinned.version, base=pinned.base, step=pinned.step)
            if not await self._rendezvous.offer(self, Offer(head=head, bytes=pinned.bytes)):
                self._node.degraded.count("p2p-not-offered", detail=f"rank {self._registration.rank}, {version}")
        except Exception as error:
            # It would be so with every version in this group.
            await self._rendezvous.give_up(self, f"version {version} cannot be offered: {error}")
            log.warning("version %d is not offered", version, exc_info=not isinstance(error, DteError))
            self._node.degraded.count("p2p-not-offered", detail=f"rank {self._registration.rank}: {error}")

    # --- Member -----------------------------------------------------------------------------------------------------

    async def join(self, daemon: str) -> Join:
        r = self._registration
        known = await self._ask(await self._link.ready(), p.P2PSlices(), p.P2PSlicesDone, self._patience_s)
        return SenderJoin(
            daemon=daemon,
            launch=r.launch,
            epoch=self._epoch,
            rank=r.rank,
            world=r.world,
            tensors=r.tensors,
            slices=[RosterSlice(slice=s.slice, tensor=s.tensor, lanes=s.lanes, blocks=s.blocks) for s in known.slices],
            device=known.device,
        )

    async def host(self, group: str) -> str:
        self._handle = await self._link.ready()
        request = p.P2PHost(group=group, host=self._node.settings.p2p_address)
        return (await self._ask(self._handle, request, p.P2PHosted, self._patience_s)).address

    async def connect(self, seat: Seat) -> str:
        settings = self._node.settings
        place = seat.place(bind_host=settings.p2p_address, timeout_s=settings.p2p_timeout_s)
        self._handle = await self._link.ready()
        request = p.P2PConnect(**place.model_dump())
        return (await self._ask(self._handle, request, p.P2PConnected, self._patience_s)).plan

    async def exchange(self, seat: Seat, head: VersionHead) -> Moved:
        settings = self._node.settings
        request = p.P2PSend(
            group=seat.group,
            version=head.version,
            bucket_bytes=seat.bucket_bytes,
            timeout_s=settings.p2p_timeout_s,
        )
        sent = await self._ask(self._entered(), request, p.P2PSent, self._patience_s)
        self._node.metrics.p2p_bytes.labels("sent").inc(sent.bytes)
        self._node.metrics.stage_seconds.labels("p2p-send").observe(sent.ms / 1e3)
        return Moved(sent.entries, sent.bytes, sent.ms, sent.pairs)

    async def leave(self, group: str) -> None:
        handle, self._handle = self._handle, None
        with contextlib.suppress(DteError):
            if handle is not None and handle.alive:  # a worker that died has forgotten its group
                await self._ask(handle, p.P2PLeave(group=group), p.Done, PROMPT_S)

    async def gone(self) -> None:
        await self._entered().wait_ended()

    def settled(self, group: str, version: int, problem: str) -> None:
        if problem:
            self._node.degraded.count("p2p-failed", detail=f"sending version {version}: {problem}")

    def _entered(self) -> WorkerHandle:
        """The worker that is in the group; StateConflict if it has been left."""
        if self._handle is None:
            raise StateConflict("this rank has left its P2P group.")
        return self._handle

    @property
    def _patience_s(self) -> float:
        return 2 * self._node.settings.p2p_timeout_s

    @staticmethod
    async def _ask(handle: WorkerHandle, request: Model, reply: type[M], within_s: float) -> M:
        """Ask this worker, once."""
        try:
            async with asyncio.timeout(within_s):
                return await handle.call(request, reply)
        except TimeoutError:
            raise WorkerSilent(f"the worker process {handle.pid} has not answered for {within_s:g} s.") from None
