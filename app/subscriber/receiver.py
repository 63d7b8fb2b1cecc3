"""One receiver's life: connect, prove, follow the head, resync; and what everybody may see of it.

One invariant: a receiver counts as at a version only from the proof of its live weights to the first sign that they, or
its process, are no longer there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Literal

from app.chain import Chain
from app.degraded import Degraded
from app.events import EventBus
from app.metrics import Metrics
from app.subscriber.engine import Engine, HalfWritten
from app.subscriber.targets import NoSource, Step, Targets, digests, is_unreadable
from clients.protocol import ReceiverInfo, ReceiverRegistration, ReceiverState
from clients.rollout.protocol import ReceiverError, ReceiverGone
from engine.errors import DteError, InvalidInput, ProofError
from engine.records.models import ChunkRef, CommitDecision
from transports.errors import StoreUnavailable

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 10.0
STATUS_EVERY_S = 1.0

_SERVING = frozenset({ReceiverState.IN_SYNC, ReceiverState.INSTALLING, ReceiverState.BEHIND})
_AUDIT_AGAIN = frozenset({"wrong-base", "live-changed"})


class Receiver:
    """Drives one registered receiver in a task of its own, until stopped."""

    def __init__(
        self,
        registration: ReceiverRegistration,
        targets: Targets,
        *,
        owner: str,
        fence: int,
        events: EventBus,
        metrics: Metrics,
        degraded: Degraded,
    ) -> None:
        self.registration = registration
        self._targets = targets
        self._chain: Chain = targets.chain
        self._owner = owner
        self._fence = fence
        self._events = events
        self._metrics = metrics
        self._degraded = degraded
        self._state = ReceiverState.PROVING
        self._installed: int | None = None
        self._installed_step: int | None = None
        self._generations: list[int] = []
        self._resyncs = 0
        self._last_error = ""
        self._last_install_ms: dict[str, float] = {}
        self._proof_failed = False
        self._connected = False
        self._kicked = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    # --- what everybody may see -------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def connected(self) -> bool:
        """True while every rank's process is there and owned by this daemon."""
        return self._connected

    @property
    def ready(self) -> bool:
        """At a proven version, and nothing stands in the way of the next."""
        return self._installed is not None and self._state in _SERVING and not self._last_error

    @property
    def wants_chunks(self) -> bool:
        """True if it is worth downloading the next version's chunks before it is decided."""
        return self._connected and self._installed is not None

    def lag(self) -> int | None:
        """Committed versions after the installed one; None if nothing is installed."""
        if self._installed is None:
            return None
        return sum(1 for c in self._chain.commits() if c.version > (self._installed or 0))

    def info(self) -> ReceiverInfo:
        """The state as `GET /receivers` shows it."""
        unproven: Literal["failed", "none"] = "failed" if self._proof_failed else "none"
        return ReceiverInfo(
            name=self.name,
            kind=self.registration.kind,
            run=self.registration.run,
            ranks=len(self.registration.sockets),
            state=self._state,
            ready=self.ready,
            installed=self._installed,
            installed_step=self._installed_step,
            lag=self.lag(),
            proof="proven" if self._installed is not None else unproven,
            resyncs=self._resyncs,
            last_error=self._last_error,
            last_install_ms=self._last_install_ms,
        )

    # --- control ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._live(), name=f"receiver-{self.name}")

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
                reg = self.registration
                engine = await Engine.connect(reg.run, reg.sockets, owner=self._owner, fence=self._fence)
                try:
                    self._connected = True
                    await self._attend(engine)
                finally:
                    self._connected = False
                    self._forget()
                    await engine.aclose()
            except ReceiverGone as error:
                self._forget()
                self._become(ReceiverState.LOST, error)
            except DteError as error:
                self._become(ReceiverState.FAILED, error)
            except Exception as error:
                log.exception("receiver %s", self.name)
                self._become(ReceiverState.FAILED, DteError(f"unexpected: {type(error).__name__}: {error}"))
            if time.monotonic() - started_s > LAST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            kicked = await self._rest(pause_s)
            pause_s = FIRST_PAUSE_S if kicked else min(LAST_PAUSE_S, pause_s * 1.7)

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
        self._last_error = ""
        self._become(ReceiverState.PROVING)
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
        if engine.dirty:
            await self._resync(engine, head)
        if self._installed is None and not await self._recognise(engine, head) and not await self._reunite(engine):
            await self._resync(engine, head)
        if self._installed is not None and self._installed < head.version:
            self._become(ReceiverState.BEHIND)
            try:
                await self._catch_up(engine, self._installed, head)
            except ReceiverError as error:
                if error.code == "chunk-damaged":
                    raise
                if error.code not in _AUDIT_AGAIN and error.code != "wrong-result":
                    raise
                self._forget()
                if error.code == "wrong-result" or not await self._recognise(engine, head):
                    await self._resync(engine, head)
            except DteError as error:
                if not is_unreadable(error) and not isinstance(error, ProofError):
                    raise
                log.warning("receiver %s: no delta to version %d: %s", self.name, head.version, error)
                await self._resync(engine, head, because=error)
        if self._installed == head.version:
            self._last_error = ""
            self._become(ReceiverState.IN_SYNC)

    async def _recognise(self, engine: Engine, head: CommitDecision) -> bool:
        """Prove the live weights to be some known version by their digests; False if they are none of them."""
        self._become(ReceiverState.PROVING)
        try:
            found, per_rank = await engine.audit(head.tensors)
        except ProofError:
            return False  # replicas differ: they are no version
        for commit in reversed(self._chain.commits()):
            known = await self._chain.full(commit.version)
            if digests(known.tensors) == found:
                await engine.adopt(known.version, known.step, known.tensors, per_rank)
                self._proven(engine, known.version, known.step)
                return True
        self._proof_failed = True
        return False

    async def _reunite(self, engine: Engine) -> bool:
        """Bring ranks together of which some had finalized a version and some had not; False if it is not so."""
        held = {s.version for s in engine.statuses}
        if len(held) != 2 or None in held or engine.dirty:
            return False
        low, high = sorted(v for v in held if v is not None)
        if [c.version for c in self._chain.path(low, high)] != [high]:
            return False
        plan = [await self._targets.delta(high)]
        try:
            async with self._targets.local(plan) as bodies:
                await engine.install(bodies[0])
        except (ReceiverError, ProofError) as error:
            log.warning("receiver %s: its ranks cannot be brought together: %s", self.name, error)
            return False
        self._proven(engine, high, plan[0].step)
        return True

    async def _catch_up(self, engine: Engine, installed: int, head: CommitDecision) -> None:
        """Install the deltas from `installed` to the head; all of them are local before the first write."""
        plan = await self._targets.path(installed, head.version)
        started = time.perf_counter()
        async with self._targets.local(plan) as bodies:
            download_ms = (time.perf_counter() - started) * 1e3
            for body in bodies:
                self._become(ReceiverState.INSTALLING)
                try:
                    times = await engine.install(body)
                except DteError as error:
                    self._metrics.installs.labels("failed").inc()
                    if error.code == "chunk-damaged":
                        await self._targets.cache.discard(_refs(plan))
                    if isinstance(error, HalfWritten):
                        self._become(ReceiverState.DIRTY, error)
                        await engine.refresh()
                    raise
                self._metrics.installs.labels("installed").inc()
                self._last_install_ms = {"download": download_ms, **times}
                for stage, ms in self._last_install_ms.items():
                    self._metrics.stage_seconds.labels(f"install-{stage}").observe(ms / 1e3)
                self._proven(engine, body.version, body.step)
                download_ms = 0.0
                if self._stopping:
                    return

    async def _resync(self, engine: Engine, head: CommitDecision, *, because: DteError | None = None) -> None:
        """Overwrite the weights from the newest starting point that is intact. NoSource if there is none."""
        reasons: list[str] = [because.message] if because else []
        async for plan in self._targets.resync_plans(head):
            try:
                async with self._targets.local(plan) as bodies:
                    self._become(ReceiverState.RESYNCING)
                    self._forget()
                    ms = await engine.resync(bodies)
            except ReceiverGone:
                raise
            except DteError as error:
                await engine.refresh()
                if error.code == "chunk-damaged":
                    await self._targets.cache.discard(_refs(plan))
                reasons.append(f"from version {plan[0].version}: {error.message}")
                log.warning("receiver %s: resync from version %d failed: %s", self.name, plan[0].version, error)
                if not engine.dirty:
                    self._restore(engine)
                continue
            self._resyncs += 1
            self._metrics.resyncs.inc()
            self._last_install_ms = {"resync": ms}
            self._proven(engine, head.version, head.step)
            return
        raise NoSource(
            f"nothing intact leads to version {head.version}" + (": " + "; ".join(reasons) if reasons else "."),
            remedy="Wait for the trainer's next dense version, or restore the store's objects.",
        )

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
            statuses = await engine.refresh()
            if self._installed is not None and [s.generation for s in statuses] != self._generations:
                log.warning("receiver %s: something else touched its weights; they are proven again", self.name)
                self._forget()
                return
        self._kicked.clear()

    async def _rest_or_gone(self, engine: Engine, pause_s: float) -> None:
        gone = asyncio.ensure_future(engine.wait_gone())
        rest = asyncio.ensure_future(self._rest(pause_s))
        try:
            await asyncio.wait([gone, rest], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ReceiverGone("the receiver's process ended.")
        finally:
            for task in (gone, rest):
                task.cancel()
            await asyncio.gather(gone, rest, return_exceptions=True)

    # --- bookkeeping ------------------------------------------------------------------------------------------------

    def _proven(self, engine: Engine, version: int, step: int) -> None:
        self._installed, self._installed_step, self._proof_failed = version, step, False
        self._generations = [s.generation for s in engine.statuses]
        self._metrics.receiver_version.labels(self.name).set(version)
        self._metrics.receiver_lag.labels(self.name).set(self.lag() or 0)
        self._events.publish("receiver-installed", run=self.registration.run, receiver=self.name, version=version)

    def _forget(self) -> None:
        self._installed = self._installed_step = None
        self._generations = []

    def _restore(self, engine: Engine) -> None:
        """A resync that wrote nothing leaves the version that the ranks themselves still call theirs."""
        held = {(s.version, s.step) for s in engine.statuses}
        version, step = next(iter(held)) if len(held) == 1 else (None, None)
        if version is not None and step is not None:
            self._installed, self._installed_step = version, step
            self._generations = [s.generation for s in engine.statuses]

    def _note_failure(self, engine: Engine, error: DteError) -> None:
        if isinstance(error, StoreUnavailable) and self._state is ReceiverState.IN_SYNC:
            # Proven and, as far as anybody here can know, newest: worth serving while the store is away.
            self._degraded.count("store-unavailable", detail=f"receiver {self.name}: {error}")
            return
        if engine.dirty:
            state = ReceiverState.DIRTY
        else:
            state = ReceiverState.FAILED if self._installed is None else ReceiverState.BEHIND
        self._become(state, error)

    def _become(self, state: ReceiverState, error: DteError | None = None) -> None:
        message = self._last_error if error is None else str(error)
        if (state, message) == (self._state, self._last_error):
            return
        self._state, self._last_error = state, message
        self._metrics.receiver_lag.labels(self.name).set(self.lag() or 0)
        data: dict[str, object] = {"receiver": self.name, "state": state.value, "version": self._installed}
        if error is not None:
            data["error"] = message
            log.warning("receiver %s is %s: %s", self.name, state.value, message)
        self._events.publish("receiver-state", run=self.registration.run, **data)


def _refs(plan: list[Step]) -> list[ChunkRef]:
    return [ref for step in plan for ref in step.chunks]
