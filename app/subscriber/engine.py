"""`Engine`: all ranks of one receiver, moved from version to version together.

One invariant: no rank writes before all have prepared and the sums of their digests are right, and no rank drops its
undo before all have written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from app.subscriber.jigsaw import Jigsaw
from clients.rollout.protocol import (
    PROTOCOL,
    Description,
    Digests,
    Prepared,
    ReceiverClient,
    ReceiverError,
    ReceiverGone,
    Status,
    TargetBody,
)
from engine.errors import DteError, InvalidInput, ProofError
from engine.records.models import TensorDigest

log = logging.getLogger(__name__)

T = TypeVar("T")


class HalfWritten(ProofError):
    """A commit failed and not every rank could be rolled back; only a resync helps."""

    code = "half-written"


Make = Callable[[str, list[ReceiverClient], list[Description], list[Status]], "Engine"]


def _wrong(found: dict[str, str], want: dict[str, str]) -> list[str]:
    return sorted(n for n in want if found.get(n) != want[n])


class Engine:
    """Connections to the ranks of one receiver, owned with `fence`."""

    converts = False
    """Whether this kind of engine can be given tensors that it does not keep by their bits."""

    def __init__(self, run: str, links: list[ReceiverClient], ranks: list[Description], statuses: list[Status]) -> None:
        self._run = run
        self._links = links
        self._ranks = ranks
        self.statuses = statuses
        self._jigsaw: tuple[tuple[tuple[str, tuple[int, ...], str], ...], Jigsaw] | None = None

    @classmethod
    async def connect(
        cls, run: str, sockets: Sequence[str], *, owner: str, fence: int, make: Make | None = None
    ) -> Engine:
        """Connect and attach to every rank, and end what an earlier owner left unfinished.

        ReceiverGone if a rank's process is not there, InvalidInput if it is not what was registered, ReceiverError
        `fenced-off` if a newer owner has it. `make`: another kind of engine from the same connections.
        """
        links: list[ReceiverClient] = []
        try:
            for path in sockets:
                links.append(await ReceiverClient.connect(path))
            ranks = await asyncio.gather(*(link.describe() for link in links))
            for number, rank in enumerate(ranks):
                named = run if rank.run is None else rank.run
                if (rank.protocol, named, rank.rank, rank.ranks) != (PROTOCOL, run, number, len(sockets)):
                    raise InvalidInput(
                        f"socket {number} is rank {rank.rank} of {rank.ranks} of a receiver of run {rank.run!r}, "
                        f"protocol {rank.protocol}.",
                        remedy=f"Register {len(sockets)} sockets in rank order, of run {run!r}, protocol {PROTOCOL}.",
                    )
            for link in links:
                await link.attach(owner, fence, run)
            engine = (make or cls)(run, links, list(ranks), [])
            await engine._clean_up()
            return engine
        except BaseException:
            await asyncio.gather(*(link.aclose() for link in links), return_exceptions=True)
            raise

    @property
    def ranks(self) -> int:
        return len(self._links)

    @property
    def places(self) -> list[tuple[Description, str]]:
        """What each rank is, and its socket."""
        return [(rank, link.path) for rank, link in zip(self._ranks, self._links, strict=True)]

    @property
    def dirty(self) -> bool:
        """True if, as last heard, a rank's weights are between versions."""
        return any(s.phase not in ("clean", "prepared") for s in self.statuses)

    async def aclose(self) -> None:
        await asyncio.gather(*(link.aclose() for link in self._links), return_exceptions=True)

    async def wait_gone(self) -> None:
        """Return when the connection to any rank has ended."""
        waits = [asyncio.ensure_future(link.gone.wait()) for link in self._links]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def refresh(self) -> list[Status]:
        """Ask every rank how it is."""
        self.statuses = await self._all(lambda link: link.status())
        return self.statuses

    def check_fits(self, tensors: Sequence[TensorDigest]) -> Jigsaw:
        """How the ranks' pieces add up to `tensors`; InvalidInput or LayoutError if they do not."""
        shape = tuple((t.name, tuple(t.shape), t.dtype) for t in tensors)
        if self._jigsaw is None or self._jigsaw[0] != shape:
            jigsaw = Jigsaw(self._ranks, tensors)
            if jigsaw.converted and not self.converts:
                raise InvalidInput("a receiver of this kind cannot have converter units.")
            self._jigsaw = (shape, jigsaw)
        return self._jigsaw[1]

    async def audit(self, tensors: list[TensorDigest]) -> tuple[dict[str, str], list[dict[str, str]]]:
        """(digests of the live whole tensors, the same per rank): a full pass on every rank."""
        jigsaw = await asyncio.to_thread(self.check_fits, tensors)
        found: list[Digests] = await self._all(lambda link: link.audit(list(tensors)))
        per_rank = [f.digests for f in found]
        return jigsaw.combine(per_rank), per_rank

    async def adopt(self, version: int, step: int, tensors: list[TensorDigest], per_rank: list[dict[str, str]]) -> bool:
        """Tell every rank that what was audited is `version`. True if weights had to be written for that: tensors that
        no digest proves are converted anew."""
        self.statuses = await asyncio.gather(
            *(link.adopt(version, step, tensors, d) for link, d in zip(self._links, per_rank, strict=True))
        )
        return False

    async def install(self, target: TargetBody) -> dict[str, float]:
        """Two phases over all ranks; returns the milliseconds of each. On any error no rank has changed, unless it is
        HalfWritten, or ReceiverGone of a rank whose own watchdog then rolls back."""
        jigsaw = await asyncio.to_thread(self.check_fits, target.tensors)
        clock = time.perf_counter
        t0 = clock()
        try:
            prepared = await self._all(lambda link: link.prepare(target))
            self._judge(jigsaw, prepared, target)
            await self._before_write(jigsaw, target)
        except BaseException:
            await self._quietly(lambda link: link.abort())
            raise
        t1 = clock()
        # A rank that is there already (another rank's finalize was lost) has nothing to write.
        writers = [link for link, p in zip(self._links, prepared, strict=True) if not p.already]
        times = await self._write(target.version, writers)
        await self.refresh()
        return {"prepare": (t1 - t0) * 1e3, **times}

    async def _before_write(self, jigsaw: Jigsaw, target: TargetBody) -> None:
        """Give the ranks what else they need for `target`, whose digests are right."""

    async def _write(self, version: int, writers: list[ReceiverClient]) -> dict[str, float]:
        """What all have prepared becomes the weights of `writers`; returns the milliseconds of each stage."""
        clock = time.perf_counter
        t0 = clock()
        try:
            await self._all(lambda link: link.commit(version), writers)
        except BaseException as error:
            await self._undo(writers, error)
            raise
        t1 = clock()
        await self._all(lambda link: link.finalize(version), writers)
        return {"commit": (t1 - t0) * 1e3, "finalize": (clock() - t1) * 1e3}

    async def resync(self, targets: list[TargetBody]) -> float:
        """Overwrite all ranks from a starting point and its deltas; returns the milliseconds it took.

        ProofError if the sums are not the last target's; the ranks then stay unready.
        """
        last = targets[-1]
        jigsaw = await asyncio.to_thread(self.check_fits, last.tensors)
        start = time.perf_counter()
        found: list[Digests] = await self._all(lambda link: link.resync(targets))
        self._require(jigsaw, found, last)
        await self._all(lambda link: link.finalize(last.version))
        await self.refresh()
        return (time.perf_counter() - start) * 1e3

    @staticmethod
    def _require(jigsaw: Jigsaw, found: list[Digests], target: TargetBody) -> None:
        """ProofError unless these are the digests of the target."""
        want = jigsaw.provable({t.name: t.digest for t in target.tensors})
        wrong = _wrong(jigsaw.combine([f.digests for f in found]), want)
        if wrong:
            raise ProofError(f"after the resync {wrong[0]!r} does not have the digest of version {target.version}.")

    def _judge(self, jigsaw: Jigsaw, prepared: list[Prepared], target: TargetBody) -> None:
        if target.base_digests is not None and not any(p.already for p in prepared):
            wrong = _wrong(jigsaw.combine([p.live for p in prepared]), jigsaw.provable(target.base_digests))
            if wrong:
                raise ReceiverError(f"the live {wrong[0]!r} is not that of version {target.base}.", code="wrong-base")
        want = jigsaw.provable({t.name: t.digest for t in target.tensors})
        wrong = _wrong(jigsaw.combine([p.after for p in prepared]), want)
        if wrong:
            raise ReceiverError(
                f"version {target.version} would give a wrong {wrong[0]!r}; nothing was written.", code="wrong-result"
            )

    async def _undo(self, writers: list[ReceiverClient], cause: BaseException) -> None:
        """Take every rank back to the base. HalfWritten if a rank that lives cannot."""
        for link in writers:
            if link.gone.is_set():
                continue
            try:
                status = await link.status()
                if status.phase == "prepared":
                    await link.abort()
                elif status.phase in ("writing", "written"):
                    await link.rollback()
            except ReceiverGone:
                continue
            except ReceiverError as error:
                raise HalfWritten(f"a rollback failed: {error.message} (after: {cause})") from error

    async def _clean_up(self) -> None:
        """Roll back and abort what an earlier owner left. Ranks in the middle of a resync, or whose rollback fails,
        stay dirty: a resync helps them."""
        for link, status in zip(self._links, await self.refresh(), strict=True):
            if status.phase == "prepared":
                await link.abort()
            elif status.phase in ("writing", "written"):
                try:
                    await link.rollback()
                except ReceiverError as error:
                    self._leave_dirty(error)
        await self.refresh()

    def _leave_dirty(self, error: DteError) -> None:
        """A rollback at the start failed: go on with dirty weights, unless the receiver is gone or another one's."""
        if isinstance(error, ReceiverGone) or error.code == "fenced-off":
            raise error
        log.error("run %s: what an earlier owner left cannot be rolled back: %s", self._run, error)

    async def _all(
        self, do: Callable[[ReceiverClient], Awaitable[T]], links: list[ReceiverClient] | None = None
    ) -> list[T]:
        """`do` on all links at once; waits for all of them, then raises the first error."""
        done = await asyncio.gather(
            *(do(link) for link in (self._links if links is None else links)), return_exceptions=True
        )
        results: list[T] = []
        for item in done:
            if isinstance(item, BaseException):
                raise item
            results.append(item)
        return results

    async def _quietly(self, do: Callable[[ReceiverClient], Awaitable[object]]) -> None:
        for link in self._links:
            if not link.gone.is_set():
                with contextlib.suppress(DteError):
                    await do(link)
