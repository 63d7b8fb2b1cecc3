"""One receiver's life: connect, prove, follow the head, resync.

One invariant: a receiver counts as at a version only from the proof of its live weights to the first sign that they, or
its process, are no longer there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time

from app.chain import Chain
from app.roles.base import Node
from app.subscriber.engine import Engine
from app.subscriber.installing import Installer
from app.subscriber.kinds import connect
from app.subscriber.lane import Lane
from app.subscriber.resyncing import Resyncer
from app.subscriber.standing import Standing
from app.subscriber.targets import NoSource, Targets, digests, is_unreadable
from app.subscriber.units import UnitFiles
from clients.protocol import ReceiverRegistration, ReceiverState
from clients.rollout.protocol import ReceiverError, ReceiverGone
from engine.errors import DteError, InvalidInput, ProofError, StateConflict
from engine.records.models import CommitDecision
from transports.errors import StoreUnavailable

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 10.0
STATUS_EVERY_S = 1.0

_AUDIT_AGAIN = frozenset({"wrong-base", "live-changed", ProofError.code})


class Receiver:
    """Drives one registered receiver in a task of its own, until stopped."""

    def __init__(
        self,
        node: Node,
        registration: ReceiverRegistration,
        targets: Targets,
        files: UnitFiles,
        *,
        owner: str,
        fence: int,
    ) -> None:
        self.registration = registration
        self.standing = Standing(registration, targets.chain, node.events, node.metrics)
        self._node = node
        self._targets = targets
        self._files = files
        self._chain: Chain = targets.chain
        self._owner = owner
        self._fence = fence
        self._connected = False
        self._kicked = asyncio.Event()
        self._stopping = False
        self._installer = Installer(self.standing, targets, node.metrics, node.degraded)
        self._resyncer = Resyncer(self.standing, targets, node.metrics, node.degraded)
        self._lane: Lane | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """True while every rank's process is there and owned by this daemon."""
        return self._connected

    @property
    def wants_chunks(self) -> bool:
        """True if it is worth downloading the next version's chunks before it is decided."""
        received = self._lane is not None and self._lane.connected
        return self._connected and self.standing.installed is not None and not received

    # --- control ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._live(), name=f"receiver-{self.standing.name}")

    def kick(self, fence: int) -> None:
        """The receiver asked for an owner: try now, with a newer fence."""
        self._fence = max(self._fence, fence)
        self._kicked.set()

    async def stop(self, *, patience_s: float = 5.0) -> None:
        """End after the version being installed, or after `patience_s` (the receiver's watchdog then rolls back)."""
        self._stopping = True
        self._kicked.set()
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=patience_s)
            if not done:
                self._task.cancel()
                await asyncio.wait([self._task])

    # --- the task ---------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping:
            started_s = time.monotonic()
            try:
                fence = self._fence  # it may be raised while this is connecting
                engine = await connect(self.registration, owner=self._owner, fence=fence, files=self._files)
                try:
                    self._connected = True
                    self.standing.ranks = engine.ranks
                    self._lane = self._lane_of(engine, fence)
                    await self._attend(engine)
                finally:
                    self._connected = False
                    self.standing.forget()
                    lane, self._lane = self._lane, None
                    try:
                        if lane is not None:
                            await lane.aclose()
                    finally:  # this task may be cancelled while a rank does not answer
                        await engine.aclose()
            except ReceiverGone as error:
                self.standing.forget()
                self.standing.become(ReceiverState.LOST, error)
            except DteError as error:
                self.standing.become(ReceiverState.FAILED, error)
            except Exception as error:
                log.exception("receiver %s", self.standing.name)
                self.standing.become(ReceiverState.FAILED, DteError(f"unexpected: {type(error).__name__}: {error}"))
            if time.monotonic() - started_s > LAST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            kicked = await self._rest(pause_s)
            pause_s = FIRST_PAUSE_S if kicked else min(LAST_PAUSE_S, pause_s * 1.7)

    def _lane_of(self, engine: Engine, fence: int) -> Lane | None:
        """Where it may receive rank to rank; None if it shall not."""
        if self.registration.transport == "store" or not self._node.p2p.enabled:
            return None
        return Lane(self._node, self.registration, engine.places, owner=self._owner, fence=fence)

    async def _rest(self, pause_s: float) -> bool:
        """Wait out the pause; True if somebody asked for attention in the meantime."""
        try:
            async with asyncio.timeout(pause_s * random.uniform(0.8, 1.2)):
                await self._kicked.wait()
        except TimeoutError:
            return False
        self._kicked.clear()
        return True

    async def _attend(self, engine: Engine) -> None:
        """Keep a connected receiver at the head, until it is gone (ReceiverGone) or we stop."""
        self.standing.last_error = ""
        self.standing.become(ReceiverState.PROVING)
        pause_s = FIRST_PAUSE_S
        while not self._stopping:
            try:
                await self._chain.refresh()
                head, known = self._chain.head, self._chain.next_version
                if head is not None:
                    await self._bring_to(engine, head)
                pause_s = FIRST_PAUSE_S
                await self._watch(engine, known)
            except ReceiverGone:
                raise
            except DteError as error:
                if error.code == "fenced-off" or isinstance(error, InvalidInput):
                    raise
                self._note_failure(engine, error)
                await self._rest_or_gone(engine, pause_s)
                pause_s = min(LAST_PAUSE_S, pause_s * 1.7)

    async def _bring_to(self, engine: Engine, head: CommitDecision) -> None:
        """Make the receiver hold `head`, by the cheapest way that is proven."""
        await self._look(engine)
        converted = len((await asyncio.to_thread(engine.check_fits, head.tensors)).converted)
        if converted != self.standing.converted:
            self.standing.converted = converted
            detail = f"receiver {self.standing.name}, {converted} tensors"
            self._node.degraded.count("converted", min(converted, 1), detail)
        if engine.dirty:
            await self._resyncer.run(engine, head)
        if (
            self.standing.installed is None
            and not await self._recognise(engine, head)
            and not await self._reunite(engine)
        ):
            await self._resyncer.run(engine, head)
        if self.standing.installed is not None and self.standing.installed < head.version:
            self.standing.become(ReceiverState.BEHIND)
            try:
                await self._installer.catch_up(engine, head, self._lane, lambda: self._stopping)
            except ReceiverError as error:
                if error.code == "wrong-result":
                    # The weights are a proven version still; whatever leads through this delta would end the same.
                    bad = self._chain.path(self.standing.installed, head.version)[0].version
                    await self._resyncer.run(engine, head, because=error, least=bad)
                elif error.code not in _AUDIT_AGAIN:
                    raise
                else:
                    self.standing.forget()
                    if not await self._recognise(engine, head):
                        await self._resyncer.run(engine, head)
            except DteError as error:
                if not is_unreadable(error) and not isinstance(error, ProofError):
                    raise
                log.warning("receiver %s: no delta to version %d: %s", self.standing.name, head.version, error)
                await self._resyncer.run(engine, head, because=error)
        if self.standing.installed == head.version:
            self.standing.last_error = ""
            self.standing.become(ReceiverState.IN_SYNC)
            if self._lane is not None:
                self._lane.open()  # its ranks' layouts are proven now
        elif not self._stopping:
            raise StateConflict(f"it is at version {self.standing.installed}, not yet at {head.version}.")

    async def _recognise(self, engine: Engine, head: CommitDecision) -> bool:
        """Prove the live weights to be some known version by their digests; False if they are none of them."""
        self.standing.become(ReceiverState.PROVING)
        try:
            found, per_rank = await engine.audit(head.tensors)
        except ProofError:
            return False  # replicas on several ranks differ: they are no version
        except ReceiverError as error:
            if error.code != ProofError.code:
                raise
            return False  # copies on one rank differ
        said = {s.version for s in engine.statuses}
        # What the ranks say they are comes first: digests alone cannot tell versions that differ in converted tensors.
        for commit in sorted(self._chain.commits(), key=lambda c: (c.version not in said, -c.version)):
            known = await self._chain.full(commit.version)
            if engine.check_fits(known.tensors).provable(digests(known.tensors)) == found:
                try:
                    if await engine.adopt(known.version, known.step, known.tensors, per_rank):
                        self._resyncer.count()
                except NoSource as error:
                    log.warning("receiver %s: %s", self.standing.name, error)
                    return False  # a resync asks for what is missing
                self.standing.proven(engine.statuses, known.version, known.step)
                return True
        self.standing.proof_failed = True
        return False

    async def _reunite(self, engine: Engine) -> bool:
        """Bring ranks together of which some had finalized a version and some had not; False if it is not so."""
        held = {s.version for s in engine.statuses}
        if len(held) != 2 or None in held or engine.dirty:
            return False
        low, high = sorted(v for v in held if v is not None)
        try:
            if [c.version for c in self._chain.path(low, high)] != [high]:
                return False
        except StateConflict:
            return False
        plan = [await self._targets.delta(high)]
        try:
            async with self._targets.local(plan) as bodies:
                await engine.install(bodies[0])
        except (ReceiverError, ProofError, NoSource) as error:
            log.warning("receiver %s: its ranks cannot be brought together: %s", self.standing.name, error)
            return False
        self.standing.proven(engine.statuses, high, plan[0].step)
        return True

    async def _watch(self, engine: Engine, known: int) -> None:
        """Return when there is something to do; ReceiverGone when the receiver's process ends.

        `known`: the next number at the time the receiver's target was chosen; others may have read on since.
        """
        while not self._stopping and not self._kicked.is_set():
            news = asyncio.ensure_future(self._chain.wait(known, STATUS_EVERY_S))
            gone = asyncio.ensure_future(engine.wait_gone())
            kick = asyncio.ensure_future(self._kicked.wait())
            try:
                await asyncio.wait([news, gone, kick], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ReceiverGone("the receiver's process ended.")
                if news.done() and news.result():
                    return
            finally:
                for task in (news, gone, kick):
                    task.cancel()
                await asyncio.gather(news, gone, kick, return_exceptions=True)
            if not await self._look(engine):
                return
        self._kicked.clear()

    async def _look(self, engine: Engine) -> bool:
        """Ask the ranks how they are. False if that ended the proof of their weights: somebody else wrote to them, or
        they are no longer the version they were, such as while the engine has released their memory."""
        try:
            statuses = await engine.refresh()
        except ReceiverError:
            self.standing.forget()  # who cannot say what it is at is not at what it was
            raise
        at = self.standing.installed
        if at is None or (
            [s.generation for s in statuses] == self.standing.generations and all(s.version == at for s in statuses)
        ):
            return True
        log.warning("receiver %s: its weights are no longer what was proven; they are proven again", self.standing.name)
        self.standing.forget()
        return False

    async def _rest_or_gone(self, engine: Engine, pause_s: float) -> None:
        gone = asyncio.ensure_future(engine.wait_gone())
        rest = asyncio.ensure_future(self._rest(pause_s))
        # A newer version may lead on where the last try ended.
        news = asyncio.ensure_future(self._news(pause_s))
        try:
            await asyncio.wait([gone, rest, news], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ReceiverGone("the receiver's process ended.")
        finally:
            for task in (gone, rest, news):
                task.cancel()
            await asyncio.gather(gone, rest, news, return_exceptions=True)

    async def _news(self, pause_s: float) -> None:
        """Return when another number is decided; else after the pause."""
        with contextlib.suppress(DteError):
            if await self._chain.wait(self._chain.next_version, pause_s):
                return
        await asyncio.sleep(pause_s)

    def _note_failure(self, engine: Engine, error: DteError) -> None:
        standing = self.standing
        if isinstance(error, StoreUnavailable) and standing.state is ReceiverState.IN_SYNC and standing.ready:
            # Proven and, as far as anybody here can know, newest: worth serving while the store is away.
            self._node.degraded.count("store-unavailable", detail=f"receiver {standing.name}: {error}")
        elif engine.dirty:
            standing.become(ReceiverState.DIRTY, error)
        else:
            standing.become(ReceiverState.FAILED if standing.installed is None else ReceiverState.BEHIND, error)
