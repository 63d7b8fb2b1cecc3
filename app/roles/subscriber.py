"""The subscriber role: keeps this node's receivers at the newest version of their runs.

One invariant: receivers are independent: nothing that happens to one delays, fails or unreadies another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Sequence

from fastapi import APIRouter

from app.api.receivers import receivers_router
from app.roles.base import Node, Role
from app.subscriber.cache import ChunkCache
from app.subscriber.kinds import check_reachable, check_registration, places
from app.subscriber.prefetch import Prefetcher
from app.subscriber.receiver import Receiver
from app.subscriber.registry import Registry
from app.subscriber.targets import Targets
from app.subscriber.units import UnitFiles
from clients.protocol import ReceiverInfo, ReceiverRegistration, ReceiverState
from engine.errors import InvalidInput, StateConflict

log = logging.getLogger(__name__)

MAX_RECEIVERS = 256


class SubscriberRole(Role):
    """Receivers by name, one task each; one cache for all; one prefetcher per run."""

    name = "subscriber"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        settings = node.settings
        self._cache = ChunkCache(
            settings.cache_dir / "chunks",
            node.store,
            max_bytes=settings.cache_bytes,
            parallel=settings.download_parallel,
            metrics=node.metrics,
            degraded=node.degraded,
        )
        self._units_dir = settings.data_dir / "units"
        self._registry = Registry(settings.data_dir / "receivers.json", node.degraded)
        self._configured = {r.name: r for r in settings.receivers}
        for registration in settings.receivers:
            check_registration(registration)
            self._check_transport(registration)
        for number, registration in enumerate(settings.receivers):
            _check_apart(registration, settings.receivers[:number])
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._receivers: dict[str, Receiver] = {}
        self._prefetchers: dict[str, Prefetcher] = {}
        self._changing = asyncio.Lock()
        self._started = False

    async def start(self) -> None:
        await self._cache.open()
        # Whatever lies there is a dead daemon's, and nobody reads it any more.
        await asyncio.to_thread(shutil.rmtree, self._units_dir, ignore_errors=True)
        remembered = [r for r in await self._registry.load() if _sensible(r)]
        for registration in [*self._configured.values(), *reversed(remembered)]:
            # What is driven from two ends is deposed for ever; the settings, then the newer registration, know better.
            same = next((r for r in self._receivers.values() if _same(r.registration, registration)), None)
            if same is None:
                self._add(registration)
            elif same.standing.name != registration.name:
                log.warning("receiver %s is forgotten: it is %s", registration.name, same.standing.name)
        await self._save()
        self._started = True

    async def stop(self) -> None:
        self._started = False
        prefetchers, self._prefetchers = list(self._prefetchers.values()), {}
        await asyncio.gather(*(p.stop() for p in prefetchers))
        await asyncio.gather(*(r.stop() for r in self._receivers.values()))
        await self._cache.aclose()

    def router(self) -> APIRouter | None:
        return receivers_router(self)

    def unready(self) -> str | None:
        if not self._started:
            return "starting"
        waiting = [
            f"{r.standing.name} is {r.standing.state.value}" for r in self._receivers.values() if not r.standing.ready
        ]
        return f"receivers not in sync: {', '.join(waiting[:5])}" if waiting else None

    async def register(self, registration: ReceiverRegistration) -> ReceiverInfo:
        """Take over a receiver; the same registration again only asks for attention.

        InvalidInput for a kind this daemon does not drive, StateConflict if the name belongs to another living one, or
        it is one that lives, or stands in the settings, under another name. It takes the place of one that is lost.
        """
        check_registration(registration)
        self._check_transport(registration)
        known = self._receivers.get(registration.name)
        if known is None or known.registration != registration:
            await check_reachable(registration)
        async with self._changing:
            self.node.chains.get(registration.run)
            existing = self._receivers.get(registration.name)
            if existing is not None and existing.registration == registration:
                if not existing.connected:
                    existing.kick(self._registry.next_fence())
                    await self._save()
                return existing.standing.info()
            same = [r for r in self._receivers.values() if r is not existing and _same(r.registration, registration)]
            lives = [r.registration for r in same if _lives(r) or r.registration.name in self._configured]
            _check_apart(registration, lives)
            if existing is not None:
                if existing.connected:
                    raise StateConflict(
                        f"a receiver called {registration.name!r} is alive with other sockets.",
                        remedy="Give each receiver a name of its own, or end the other one first.",
                    )
                await self._remove(existing)
            elif len(self._receivers) - len(same) >= MAX_RECEIVERS:
                raise StateConflict(f"this daemon already drives {MAX_RECEIVERS} receivers.")
            for lost in same:
                log.warning("receiver %s is registered anew as %s", lost.standing.name, registration.name)
                await self._remove(lost)
                self.node.events.publish("receiver-removed", run=lost.registration.run, receiver=lost.registration.name)
            receiver = self._add(registration)
            await self._save()
            self.node.events.publish("receiver-registered", run=registration.run, receiver=registration.name)
            return receiver.standing.info()

    async def remove(self, name: str) -> None:
        """Stop driving a receiver; its process and weights stay as they are. KeyError if there is none."""
        async with self._changing:
            receiver = self._receivers[name]
            await self._remove(receiver)
            await self._save()
            self.node.events.publish("receiver-removed", run=receiver.registration.run, receiver=name)

    def get(self, name: str) -> ReceiverInfo:
        """KeyError if there is none."""
        return self._receivers[name].standing.info()

    def list(self, run: str | None = None) -> list[ReceiverInfo]:
        """All receivers (of one run), by name."""
        return [
            r.standing.info() for _, r in sorted(self._receivers.items()) if run is None or r.registration.run == run
        ]

    def _add(self, registration: ReceiverRegistration) -> Receiver:
        """Drive it, with a fence of its own; the caller saves."""
        run = registration.run
        chain = self.node.chains.get(run)
        receiver = Receiver(
            self.node,
            registration,
            (targets := Targets(chain, self._cache)),
            UnitFiles(targets, self._units_dir / registration.name, max_bytes=self.node.settings.cache_bytes),
            owner=self._owner,
            fence=self._registry.next_fence(),
        )
        self._receivers[registration.name] = receiver
        receiver.start()
        if run not in self._prefetchers:
            self._prefetchers[run] = Prefetcher(
                chain, self._cache, lambda: self._wanted(run), interval_s=self.node.settings.poll_interval_s
            )
        return receiver

    def _check_transport(self, registration: ReceiverRegistration) -> None:
        if registration.transport == "p2p" and not self.node.p2p.enabled:
            raise InvalidInput(
                f"receiver {registration.name!r} asks for P2P, which this daemon has not been told to take part in.",
                remedy="Set DTE_P2P=true (and DTE_P2P_COORDINATOR), or register it with transport auto or store.",
            )

    def _wanted(self, run: str) -> bool:
        return any(r.registration.run == run and r.wants_chunks for r in self._receivers.values())

    async def _remove(self, receiver: Receiver) -> None:
        await receiver.stop()
        del self._receivers[receiver.registration.name]
        run = receiver.registration.run
        if not any(r.registration.run == run for r in self._receivers.values()) and run in self._prefetchers:
            await self._prefetchers.pop(run).stop()

    async def _save(self) -> None:
        """What the settings say is not written down, so that it ends when they no longer say it."""
        registrations = [r.registration for r in self._receivers.values()]
        await self._registry.save(r for r in registrations if self._configured.get(r.name) != r)


def _sensible(registration: ReceiverRegistration) -> bool:
    """False for what an earlier release accepted and this one would not."""
    try:
        check_registration(registration)
    except InvalidInput as error:
        log.error("receiver %s is forgotten: %s", registration.name, error)
        return False
    return True


def _lives(receiver: Receiver) -> bool:
    """True unless its process was not there, or could not be driven, when last tried."""
    return receiver.connected or receiver.standing.state not in (ReceiverState.LOST, ReceiverState.FAILED)


def _same(one: ReceiverRegistration, other: ReceiverRegistration) -> bool:
    return one.name == other.name or bool(places(one) & places(other))


def _check_apart(registration: ReceiverRegistration, others: Sequence[ReceiverRegistration]) -> None:
    """StateConflict if another one has the same name, server or sockets."""
    for other in others:
        if _same(registration, other):
            raise StateConflict(
                f"receivers {other.name!r} and {registration.name!r} are one: they share a name, a server or a socket.",
                remedy=f"Register each receiver once, or remove {other.name!r} first.",
            )
