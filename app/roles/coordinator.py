"""The coordinator role: finishes versions whose last part-putter died, hints at the head, and has anchors made.

One invariant: nothing durable depends on it. Everything it writes is computed from the store by `engine.commit` and put
if absent, so many coordinators may run, stall, and wake up; it never aborts a version because time has passed. Where
ranks meet for P2P (`app.p2p.meetings`) is the one thing it remembers, and only until it ends.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter

from app.api.p2p import p2p_router
from app.chain import Chain
from app.committer import Committer
from app.retention import Retention
from app.roles.base import Node, Role
from engine.errors import DteError
from engine.records import LatestHint, keys, record_bytes
from transports.errors import StoreError

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 5.0
IDLE_S = 1.0
"""How often a run is looked at in which nothing is decided."""
HOUSEKEEPING_S = 5.0
SCAN_S = 0.5
"""How often new runs are looked for among those this daemon uses."""


class RunWatcher:
    """Follows one run. `trouble` says why it cannot, in a few words, or is None."""

    def __init__(self, node: Node, chain: Chain) -> None:
        self._node = node
        self.chain = chain
        self._committer = Committer(chain)
        self._hinted: int | None = None
        settings = node.settings
        self._retention = Retention(chain, keep_anchors=settings.keep_anchors, hours=settings.retention_h)
        self.trouble: str | None = None

    async def once(self) -> None:
        """Decide the next number if its parts are all there, as long as there is one, and renew the hint."""
        chain = self.chain
        await chain.refresh()
        while chain.epoch is not None and await self._committer.try_commit(chain.next_version) is not None:
            pass
        head = chain.head
        if head is not None and head.version != self._hinted:
            await chain.store.put(keys.latest(chain.run), record_bytes(LatestHint(version=head.version)))
            self._hinted = head.version

    async def keep_house(self) -> None:
        """Make the anchor that is due, delete the chunks that retention allows to delete."""
        settings = self._node.settings
        if len(self.chain.commits()) > settings.anchor_every:
            # Only here: a daemon that never makes an anchor need not load the codec.
            from app.compactor import Compactor

            compactor = Compactor(self.chain, settings.data_dir / "compact", settings.chunk_bytes)
            made = await compactor.run_due(settings.anchor_every)
            if made is not None:
                self._node.events.publish("anchor-made", self.chain.run, version=made.version)
        if settings.retention_h > 0:
            await self._retention.apply(await self._retention.plan())

    async def follow(self) -> None:
        """`once`, again and again; trouble is logged when it begins and ends, and slows the pace down."""
        pace_s = self._node.settings.poll_interval_s
        delay_s = pace_s
        while True:
            number = self.chain.next_version
            try:
                await self.once()
            except DteError as error:
                if self.trouble is None:
                    log.warning("run %s: %s", self.chain.run, error)
                    self._node.degraded.count("coordinator-blocked", detail=self.chain.run)
                self.trouble = error.message
                # An unreachable store may come back soon; a corrupt object needs somebody to act.
                delay_s = min(2 * delay_s, MAX_BACKOFF_S) if isinstance(error, StoreError) else MAX_BACKOFF_S
            except Exception as error:
                if self.trouble is None:
                    log.exception("run %s cannot be followed", self.chain.run)
                    self._node.degraded.count("coordinator-blocked", detail=f"{self.chain.run}: {error}")
                self.trouble = f"unexpected: {type(error).__name__}: {error}"
                delay_s = MAX_BACKOFF_S
            else:
                if self.trouble is not None:
                    log.info("run %s: in order again", self.chain.run)
                self.trouble = None
                # A run nobody has registered for may stay empty for ever, and one that has ended stays as it is: look
                # at it less and less often. Whoever waits for a version of it asks by itself.
                slowest_s = MAX_BACKOFF_S if self.chain.epoch is None else max(pace_s, IDLE_S)
                delay_s = min(2 * delay_s, slowest_s) if self.chain.next_version == number else pace_s
            await asyncio.sleep(delay_s)


class CoordinatorRole(Role):
    """Watches the default run and every run this daemon has to do with."""

    name = "coordinator"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._watchers: dict[str, RunWatcher] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._scan(), name="coordinator-scan"),
            asyncio.create_task(self._housekeeping(), name="coordinator-housekeeping"),
        ]
        self.node.p2p.meetings.start()

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.node.p2p.meetings.stop()

    def router(self) -> APIRouter | None:
        return p2p_router(self.node.p2p.meetings)

    def unready(self) -> str | None:
        if not self._tasks or any(task.done() for task in self._tasks):
            return "not running"
        troubled = {run: w.trouble for run, w in self._watchers.items() if w.trouble is not None}
        return "; ".join(f"run {run}: {why}" for run, why in sorted(troubled.items())) or None

    async def _scan(self) -> None:
        while True:
            default = self.node.settings.run
            for run in {*self.node.chains.runs(), *([default] if default else [])}:
                if run not in self._watchers:
                    watcher = self._watchers[run] = RunWatcher(self.node, self.node.chains.get(run))
                    self._tasks.append(asyncio.create_task(watcher.follow(), name=f"coordinator-{run}"))
            await asyncio.sleep(SCAN_S)

    async def _housekeeping(self) -> None:
        """Anchors and retention, one run at a time, beside the watching: they must never delay a commit."""
        while True:
            for watcher in list(self._watchers.values()):
                try:
                    await watcher.keep_house()
                except DteError as error:
                    log.warning("run %s: housekeeping: %s", watcher.chain.run, error)
                    self.node.degraded.count("housekeeping-failed", detail=watcher.chain.run)
                except Exception as error:
                    # A disk that is full or read-only here must not end the housekeeping of all runs for good.
                    log.exception("run %s: housekeeping", watcher.chain.run)
                    self.node.degraded.count("housekeeping-failed", detail=f"{watcher.chain.run}: {error}")
            await asyncio.sleep(HOUSEKEEPING_S)
