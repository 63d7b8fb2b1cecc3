"""`SglangEngine`: an SGLang server as a receiver: read over its ranks' sockets, written through its update call.

One invariant: the server is paused only while its weights are written, and left paused only if, after a failure, they
are between two versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Literal

from pydantic import ValidationError

from app.subscriber.engine import Engine, HalfWritten
from app.subscriber.jigsaw import Jigsaw
from app.subscriber.sglang_server import PauseMode, SglangOptions, SglangServer
from app.subscriber.units import UnitFiles
from clients.protocol import ReceiverRegistration
from clients.rollout.protocol import (
    Description,
    ReceiverClient,
    ReceiverError,
    ReceiverGone,
    Status,
    TargetBody,
    in_one_frame,
)
from clients.rollout.sglang.call import EngineCall, Hold, Stage
from engine.errors import InvalidInput
from engine.records.models import TensorDigest

log = logging.getLogger(__name__)

_WHEN_BETWEEN: PauseMode = "retract"
"""Whatever the option says: no cache of weights that are between versions may be decoded with, and no request lost."""


def options_of(registration: ReceiverRegistration) -> SglangOptions:
    """InvalidInput if the registration's options are none of an SGLang receiver."""
    try:
        return SglangOptions.model_validate(registration.options)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidInput(f"option {'.'.join(map(str, first['loc']))!r}: {first['msg']}.") from None


class SglangEngine(Engine):
    """Owned with `owner` and `fence`, which every update call names. `files`: the tensors that are converted."""

    converts = True

    def __init__(
        self,
        run: str,
        links: list[ReceiverClient],
        ranks: list[Description],
        statuses: list[Status],
        *,
        server: SglangServer,
        options: SglangOptions,
        owner: str,
        fence: int,
        files: UnitFiles,
    ) -> None:
        super().__init__(run, links, ranks, statuses)
        self._files = files
        self._server = server
        self._options = options
        self._owner = owner
        self._fence = fence
        self._last_pause_ms = 0.0
        self._half_written = False

    @property
    def dirty(self) -> bool:
        return self._half_written or super().dirty

    @classmethod
    async def reach(cls, registration: ReceiverRegistration, *, owner: str, fence: int, files: UnitFiles) -> Engine:
        """Ask the server where its ranks are, and attach to them."""
        options = options_of(registration)
        server = SglangServer(registration.url or "", options)

        def make(run: str, links: list[ReceiverClient], ranks: list[Description], statuses: list[Status]) -> Engine:
            return cls(
                run, links, ranks, statuses, server=server, options=options, owner=owner, fence=fence, files=files
            )

        try:
            announced = await server.discover()
            return await cls.connect(registration.run, announced.sockets, owner=owner, fence=fence, make=make)
        except BaseException:
            await server.aclose()
            raise

    async def aclose(self) -> None:
        await super().aclose()
        await self._server.aclose()

    async def adopt(self, version: int, step: int, tensors: list[TensorDigest], per_rank: list[dict[str, str]]) -> bool:
        await super().adopt(version, step, tensors, per_rank)
        if any(s.version != version for s in self.statuses):
            # What the converted parameters hold cannot be recognised: all of them are written once.
            log.info("run %s: every converted tensor is written anew, as of version %d", self._run, version)
            await self._stage_units(await asyncio.to_thread(self.check_fits, tensors), version, tensors, {})
            await self._write(version, self._links)
            await self.refresh()
            return True
        if await self._server.weight_version() != str(version):
            await self._server.name_version(str(version))
        return False

    async def _before_write(self, jigsaw: Jigsaw, target: TargetBody) -> None:
        await self._stage_units(jigsaw, target.version, target.tensors, target.base_digests or {})

    async def _stage_units(
        self, jigsaw: Jigsaw, version: int, tensors: list[TensorDigest], base: dict[str, str]
    ) -> None:
        """Have every rank map and prove the converter units that are not the base's, one after the other."""
        wanted = jigsaw.units({t.name for t in tensors if base.get(t.name) != t.digest})
        async with aclosing(self._files.written(version, wanted)) as units:
            async for unit in units:
                await self._all(lambda link, unit=unit: link.call("unit", unit, Status))  # type: ignore[misc]

    async def resync(self, targets: list[TargetBody]) -> float:
        last = targets[-1]
        jigsaw = await asyncio.to_thread(self.check_fits, last.tensors)
        start = time.perf_counter()
        await self._all(lambda link: link.call("stage", Stage(targets=in_one_frame(targets)), Status))
        await self._stage_units(jigsaw, last.version, last.tensors, {})
        async with self._paused(_WHEN_BETWEEN):
            await self._call("resync", last.version)
            found = await self._all(lambda link: link.audit(list(last.tensors)))
            self._require(jigsaw, found, last)
            await self._call("finalize", last.version)
        await self.refresh()
        return (time.perf_counter() - start) * 1e3

    async def _write(self, version: int, writers: list[ReceiverClient]) -> dict[str, float]:
        """All ranks commit, or all roll back, in one update call."""
        start = time.perf_counter()
        try:
            async with self._paused(self._options.pause):
                started = time.perf_counter()
                await self._call("commit", version)
                commit_ms = (time.perf_counter() - started) * 1e3
        except BaseException:
            await self._quietly(lambda link: link.abort())
            raise
        log.info("engine paused %.0f ms, %.0f ms in all", self._last_pause_ms, (time.perf_counter() - start) * 1e3)
        return {"commit": commit_ms, "pause": self._last_pause_ms}

    async def _clean_up(self) -> None:
        statuses = await self.refresh()
        if any(s.phase in ("writing", "written") for s in statuses):
            async with self._paused(_WHEN_BETWEEN):
                try:
                    await self._call("rollback", 0)
                except (ReceiverError, HalfWritten) as error:
                    self._leave_dirty(error)
                    # The phases do not tell of what is derived from the weights.
                    self._half_written = True
        for link, status in zip(self._links, await self.refresh(), strict=True):
            if status.phase == "prepared":
                await link.abort()
        await self.refresh()

    @asynccontextmanager
    async def _paused(self, mode: PauseMode) -> AsyncIterator[None]:
        """Generation stands still inside the block, and goes on after it unless a rank is between two versions."""
        hold = Hold(held=True, patience_s=2 * self._options.timeout_s)
        await self._links[0].call("hold", hold, Status)
        start = time.perf_counter()
        try:
            await self._server.pause(mode)
            yield
        except BaseException:
            await self._shielded(quietly=True)
            raise
        else:
            await self._shielded()
        finally:
            self._last_pause_ms = (time.perf_counter() - start) * 1e3

    async def _shielded(self, *, quietly: bool = False) -> None:
        """`_go_on`, whole: cancelling the task must not leave a clean engine paused. `quietly`: an error is only
        logged, because another one is on its way."""
        try:
            await asyncio.shield(asyncio.ensure_future(self._go_on()))
        except Exception as error:
            if not quietly:
                raise
            log.warning("the engine was not let go on; its plugin, or its owner, does that: %s", error)

    async def _go_on(self) -> None:
        """ReceiverError `fenced-off` if another owner has the engine by now: it, or the plugin, lets it continue."""
        try:
            await self.refresh()
        except ReceiverGone:
            return
        if self.dirty:
            log.error("the engine's weights are between two versions: it stays paused until they are resynced")
            return
        await self._server.go_on()
        await self._links[0].call("hold", Hold(held=False), Status)

    async def _call(self, op: Literal["commit", "rollback", "resync", "finalize"], version: int) -> None:
        """One update call on all ranks; ReceiverError with the plugin's code if it was refused or failed."""
        call = EngineCall(
            op=op,
            run=self._run,
            version=version,
            owner=self._owner,
            fence=self._fence,
            keep_cache=op == "commit" and self._options.pause == "in_place",
        )
        answer = await self._server.update(call, str(version) if op in ("commit", "finalize") else None)
        error = answer.error
        if error is None:
            self._half_written = self._half_written and op == "resync"
            return
        if error.code == "half-written":
            self._half_written = True
            raise HalfWritten(f"{op} of version {version} failed and could not be undone: {error.message}")
        raise ReceiverError(error.message, remedy=error.remedy, code=error.code, detail=error.detail)
