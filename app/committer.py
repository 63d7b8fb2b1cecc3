"""`Committer`: the writing side of the chain, used by publishers and coordinators alike.

One invariant: it writes only what `engine.commit` computed from objects it has read, always put-if-absent, and reports
what stands afterwards, whoever wrote it. So any number of committers may run, stall and wake up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass

from app.aio import gather_bounded, offload
from app.chain import Chain
from engine.commit import (
    ClaimEpoch,
    LaunchView,
    Opened,
    PartEntry,
    Superseded,
    claim,
    decide,
    may_abort,
    next_open_step,
    summarize,
)
from engine.commit.coverage import prove_cover
from engine.commit.opening import check_same_model
from engine.errors import CodecError, StateConflict
from engine.records import (
    MAX_RECORD_BYTES,
    AbortDecision,
    CommitDecision,
    Decision,
    EpochRecord,
    EpochStartDecision,
    LaunchRecord,
    PartRecord,
    keys,
    parse_record,
    record_bytes,
    sign,
)
from transports.errors import ObjectNotFound

LAUNCH_CACHE = 2
log = logging.getLogger("dte.commit")


@dataclass(frozen=True)
class OpenEpoch:
    """An open epoch. `base` is the newest commit below its start, `differs` the tensors whose digest at launch is not
    the base's (None: there is no base, everything is sent dense). `next_version` is the first undecided number now."""

    epoch: int
    launch: str
    world: int
    base: CommitDecision | None
    differs: frozenset[str] | None
    next_version: int


class Committer:
    """Announces launches, opens epochs, puts parts, decides versions of one run."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._store = chain.store
        self._views: OrderedDict[str, LaunchView] = OrderedDict()

    # --- launches and epochs ---------------------------------------------------------------------------------------

    async def announce(self, record: LaunchRecord) -> LaunchRecord:
        """Put a rank's record; returns the one that stands.

        A rank that registers again under its launch (its daemon was restarted) may have moved on: the first record
        stays, and its digests are what the epoch's `differs` is computed from. StateConflict if the two differ in more
        than step and digests.
        """
        key = keys.launch(self.chain.run, record.launch, record.rank)
        if await self._store.put_if_absent(key, record_bytes(record)):
            return record
        standing = await self._launch_record(key)
        if standing is None:
            raise _other_shape(record)
        return _same_shape(standing, record)

    async def announced(self, record: LaunchRecord) -> LaunchRecord | None:
        """The record that stands for a rank, if it announced itself before; StateConflict as in `announce`."""
        standing = await self._launch_record(keys.launch(self.chain.run, record.launch, record.rank))
        return None if standing is None else _same_shape(standing, record)

    async def try_open(self, launch: str) -> OpenEpoch | None:
        """Open the epoch of `launch`, or find it open; None until all of its ranks have announced themselves.

        Raises LayoutError when the slices do not cover every tensor exactly once or ranks disagree, StateConflict when
        a newer epoch supersedes this launch or the launch trains another model than the run's.
        """
        chain = self.chain
        await chain.refresh()
        record = next((e for e in await chain.refresh_epochs() if e.launch == launch), None)
        if record is None:
            record = await self._claim(launch)
            if record is None:
                return None
        view = await self._view(record)
        while True:
            await chain.refresh()
            newest = (await chain.refresh_epochs())[-1]
            if newest.epoch > record.epoch:
                raise _superseded(record, newest.epoch)
            current = await self._current_epoch()
            parts = {} if current is None else await self._adoptable(chain.next_version, current.epoch)
            current_view = await self._view(current) if current is not None and len(parts) >= current.world else None
            state = chain.state
            step = await asyncio.to_thread(next_open_step, state, record, view, current, current_view, parts)
            if isinstance(step, Superseded):
                raise _superseded(record, step.by)
            if isinstance(step, Opened):
                return await self._opened(record, step.start)
            await self._write(step.decision)

    async def epoch_launch(self, epoch: int) -> EpochRecord:
        """The record of a claimed epoch. StateConflict if nobody has claimed it."""
        for record in await self.chain.refresh_epochs():
            if record.epoch == epoch:
                return record
        raise StateConflict(f"run {self.chain.run!r} has no epoch {epoch}.", remedy="Register the ranks again.")

    # --- versions --------------------------------------------------------------------------------------------------

    async def put_part(self, part: PartRecord) -> PartRecord:
        """Put a part; returns what stands at its key, possibly an earlier one of the same writer.

        Callers compare step and base of what stands with their own: if they differ, this writer cannot deliver.
        """
        key = keys.part(self.chain.run, part.version, part.epoch, part.writer)
        data = await asyncio.to_thread(record_bytes, part)
        if await self._store.put_if_absent(key, data):
            return part
        standing = await self._store.get(key, max_bytes=MAX_RECORD_BYTES)
        return await offload(len(standing), lambda: parse_record(PartRecord, standing))

    async def try_commit(self, version: int) -> Decision | None:
        """Decide `version` if all parts of the open epoch are there; returns what stands, None while undecided.

        A number spent on a decision that does not count is returned as an abort with reason `superseded`. Parts that
        are all there but can never be committed become an abort with reason `rejected`; the log says why.
        """
        chain = self.chain
        await chain.refresh()
        state = chain.state
        if version < state.next_version:
            return chain.standing(version)
        current = await self._current_epoch()
        if version > state.next_version or current is None or current.epoch != state.epoch:
            return None
        parts = await chain.part_entries(version, current.epoch)
        if len(parts) < current.world:
            return None
        view = await self._view(current)
        verdict = await asyncio.to_thread(decide, state, current, view, parts)
        if verdict is None:
            return None
        if verdict.problem is not None:
            log.error("run %s: version %d is rejected: %s", chain.run, version, verdict.problem)
        return await self._write(verdict.decision)

    async def abort(self, version: int, epoch: int, reason: str) -> Decision:
        """Abort `version` as a writer of `epoch` that cannot deliver its part; returns whatever stands.

        `reason` is `revoked` or `spool-lost`. StateConflict if the number is not the next one, or the epoch is over.
        """
        chain = self.chain
        await chain.refresh()
        standing = chain.standing(version)
        if standing is not None:
            return standing
        if not may_abort(chain.state, version, epoch):
            raise StateConflict(
                f"epoch {epoch} cannot abort number {version}: the next number is {chain.next_version}, "
                f"in epoch {chain.state.epoch}.",
                remedy="Read the chain again before writing to it.",
            )
        wanted = {"run": chain.run, "version": version, "epoch": epoch, "reason": reason}
        written = await self._write(AbortDecision.model_validate(wanted))
        if written is None:
            raise StateConflict(f"number {version} was taken, but what stands there cannot be seen yet.")
        return written

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _adoptable(self, version: int, epoch: int) -> dict[int, PartEntry]:
        """The parts an opening epoch may adopt: none, if one of them cannot be read. A damaged part must not keep the
        run from starting again; the new launch's digests say what is left to send."""
        try:
            return await self.chain.part_entries(version, epoch)
        except CodecError as error:
            log.error("run %s: version %d is not adopted: %s", self.chain.run, version, error)
            return {}

    async def _write(self, decision: Decision) -> Decision | None:
        """Put the decision if its number is free; returns what stands there, after reading it back."""
        signed = sign(decision, self.chain.signing_key)
        data = await asyncio.to_thread(record_bytes, signed)
        await self._store.put_if_absent(keys.decision(self.chain.run, decision.version), data)
        await self.chain.refresh()
        return self.chain.standing(decision.version)

    async def _current_epoch(self) -> EpochRecord | None:
        """The record of the epoch that may decide the next number; None while nobody has claimed the first one."""
        number = self.chain.state.epoch
        known = await self.chain.refresh_epochs()
        return known[number - 1] if number <= len(known) else None

    async def _claim(self, launch: str) -> EpochRecord | None:
        """Check the launch as a whole and claim an epoch for it; None while ranks are missing."""
        records = await self._launch_records(launch)
        if records is None:
            return None
        view = await asyncio.to_thread(summarize, records)
        if self.chain.head is not None:
            check_same_model(view, self.chain.head)
        await asyncio.to_thread(prove_cover, records)
        while True:
            known = await self.chain.refresh_epochs()
            found = claim(self.chain.run, launch, view.world, known)
            if not isinstance(found, ClaimEpoch):
                return found
            await self._store.put_if_absent(keys.epoch(self.chain.run, found.record.epoch), record_bytes(found.record))

    async def _opened(self, record: EpochRecord, start: EpochStartDecision | None) -> OpenEpoch:
        base = None if start is None or start.base is None else await self.chain.full(start.base)
        return OpenEpoch(
            epoch=record.epoch,
            launch=record.launch,
            world=record.world,
            base=base,
            differs=None if start is None or base is None else frozenset(start.differs),
            next_version=self.chain.next_version,
        )

    async def _view(self, epoch: EpochRecord) -> LaunchView:
        """The launch of a claimed epoch; StateConflict if records that were there are gone."""
        view = self._views.get(epoch.launch)
        if view is None:
            records = await self._launch_records(epoch.launch)
            if records is None:
                raise StateConflict(
                    f"records of launch {epoch.launch!r} are missing, though epoch {epoch.epoch} was claimed for it.",
                    remedy="Restore them, or start the job again under a new launch identifier.",
                )
            view = self._views[epoch.launch] = await asyncio.to_thread(summarize, records)
            while len(self._views) > LAUNCH_CACHE:
                self._views.popitem(last=False)
        return view

    async def _launch_records(self, launch: str) -> list[LaunchRecord] | None:
        """The records of all ranks, in rank order; None while one is missing."""
        prefix = keys.launch_prefix(self.chain.run, launch)
        found = [key async for key in self._store.list(prefix)]
        if not found:
            return None
        one = await self._launch_record(found[0])
        if one is None or len(found) < one.world:
            return None
        wanted = [keys.launch(self.chain.run, launch, rank) for rank in range(one.world)]
        records = await gather_bounded(self._launch_record, wanted)
        complete = [r for r in records if r is not None]
        return complete if len(complete) == one.world else None

    async def _launch_record(self, key: str) -> LaunchRecord | None:
        try:
            data = await self._store.get(key, max_bytes=MAX_RECORD_BYTES)
        except ObjectNotFound:
            return None
        return await offload(len(data), lambda: parse_record(LaunchRecord, data))


def _shape_of(record: LaunchRecord) -> LaunchRecord:
    """The record without what may change while a launch lives."""
    slices = [s.model_copy(update={"digest": "0" * 16}) for s in record.slices]
    return record.model_copy(update={"step": 0, "slices": slices})


def _same_shape(standing: LaunchRecord, record: LaunchRecord) -> LaunchRecord:
    """`standing`, if `record` says the same but for step and digests."""
    if _shape_of(standing) != _shape_of(record):
        raise _other_shape(record)
    return standing


def _other_shape(record: LaunchRecord) -> StateConflict:
    return StateConflict(
        f"rank {record.rank} of launch {record.launch!r} registered before with other tensors or slices.",
        remedy="Give every start of the job a new launch identifier.",
    )


def _superseded(record: EpochRecord, by: int) -> StateConflict:
    return StateConflict(
        f"epoch {record.epoch} of launch {record.launch!r} is superseded by epoch {by}.",
        remedy="A newer start of this job has taken over the run; stop this one, or start it again as a new launch.",
    )
