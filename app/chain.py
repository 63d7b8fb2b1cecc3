"""`Chain`: one run's versions as this daemon sees them, derived from the store and from nothing else.

One invariant: the view is always the fold of a gapless run of decisions from number 0, each read from its immutable
object, parsed, and its signature checked. A decision that cannot be trusted stops the view there, loudly; it is never
skipped. Used on one event loop; big parses and hashes run in threads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from app.aio import WINDOW, gather_bounded, offload
from engine.commit import ChainState, PartEntry, advance
from engine.errors import CodecError, StateConflict
from engine.records import (
    MAX_RECORD_BYTES,
    AbortDecision,
    AnchorRecord,
    CommitDecision,
    Decision,
    EpochRecord,
    PartRecord,
    PartRef,
    Record,
    keys,
    parse_decision,
    parse_record,
    sha256_hex,
    verify,
)
from transports.errors import ObjectCorrupt, ObjectNotFound
from transports.store.base import ChunkStore

KEEP_FULL = 8
"""Newest commits kept with their tensor digests; older ones are kept without and read again on demand."""
PART_CACHE = 256
ANCHOR_CACHE = 4

R = TypeVar("R", bound=Record)


class Chain:
    """One run. All state is derived from the store, so any number of roles and daemons may hold one."""

    def __init__(
        self,
        run: str,
        store: ChunkStore,
        *,
        signing_key: bytes | None = None,
        poll_interval_s: float = 0.2,
        observer: Callable[[Decision, bool], None] | None = None,
    ) -> None:
        """`observer` is called with each effective decision as it becomes known, and whether it is news (False while
        the first refresh reads the past)."""
        self.run = run
        self.store = store
        self.signing_key = signing_key
        self._observer = observer
        self._caught_up = False
        self._poll_interval_s = poll_interval_s
        self._state = ChainState()
        self._decisions: dict[int, Decision] = {}
        self._ignored: dict[int, Decision] = {}
        self._hashes: dict[int, str] = {}
        self._full: OrderedDict[int, CommitDecision] = OrderedDict()
        self._epochs: list[EpochRecord] = []
        self._parts: OrderedDict[str, PartEntry] = OrderedDict()
        self._anchors: OrderedDict[int, AnchorRecord] = OrderedDict()
        self._anchored: tuple[float, list[int]] | None = None
        self._lock = asyncio.Lock()
        self._epoch_lock = asyncio.Lock()
        self._advanced = asyncio.Event()
        self._next_probe_s = 0.0

    # --- what is known, without asking the store ---------------------------------------------------------------

    @property
    def state(self) -> ChainState:
        """The immutable state the commit machine works on."""
        return self._state

    @property
    def head(self) -> CommitDecision | None:
        """The newest commit, complete."""
        return self._state.head

    @property
    def next_version(self) -> int:
        """The first number without a decision, as far as is known."""
        return self._state.next_version

    @property
    def epoch(self) -> int | None:
        """The newest open epoch; None while no launch has claimed the first one."""
        return self._state.epoch if self._epochs or self._state.next_version else None

    @property
    def decisions(self) -> Mapping[int, Decision]:
        """Effective decisions by number. Commits older than the newest few have `tensors` empty; see `full`."""
        return MappingProxyType(self._decisions)

    def commits(self) -> list[CommitDecision]:
        """Effective commits, oldest first. Older ones have `tensors` empty; see `full`."""
        return [d for d in self._decisions.values() if isinstance(d, CommitDecision)]

    def decision_sha256(self, version: int) -> str:
        """SHA-256 of the bytes of a decision that has been read."""
        return self._hashes[version]

    def standing(self, version: int) -> Decision | None:
        """What stands at `version` for everybody who follows the chain; None if it is undecided.

        A number taken by a decision that does not count (written by an epoch that was over) is spent, and reads as an
        abort with reason `superseded`.
        """
        ignored = self._ignored.get(version)
        if ignored is not None:
            return AbortDecision(run=self.run, version=version, epoch=ignored.epoch, reason="superseded")
        return self._decisions.get(version)

    def path(self, base: int | None, target: int) -> list[CommitDecision]:
        """The commits to apply in order on `base` to reach `target`; with base None from the version without a base.

        Raises StateConflict when `target` is no commit or `base` is not on its chain.
        """
        steps: list[CommitDecision] = []
        at: int | None = target
        while at is not None and at != base:
            decision = self._decisions.get(at)
            if not isinstance(decision, CommitDecision):
                raise StateConflict(
                    f"number {at} of run {self.run!r} is no committed version.", remedy="Pick one of GET /versions."
                )
            steps.append(decision)
            at = decision.base
        if at != base:
            raise StateConflict(
                f"version {base} of run {self.run!r} is not on the chain that leads to version {target}.",
                remedy="Resynchronise from an anchor.",
            )
        return steps[::-1]

    # --- reading on ------------------------------------------------------------------------------------------------

    async def refresh(self) -> list[Decision]:
        """Read on from the next number; returns the effective decisions that became known during the call.

        Raises CodecError, naming the object, when a decision is malformed, of another run or number, or not signed
        with this daemon's key; StoreError when the store cannot be read. What was read before stays known.
        """
        seen = self._state.next_version
        async with self._lock:
            window = 1
            while await self._read_on(window):
                window = min(2 * window, WINDOW)
            self._caught_up = True
            if not self._epochs and not self._state.next_version:
                await self.refresh_epochs()
            self._next_probe_s = asyncio.get_running_loop().time() + self._poll_interval_s
        fresh = range(seen, self._state.next_version)
        return [self._decisions[n] for n in fresh if n in self._decisions]

    async def wait(self, after_next: int, timeout_s: float) -> bool:
        """True as soon as `next_version` > `after_next`, False after `timeout_s`.

        Woken at once by this daemon's own refreshes and commits; otherwise the store is asked every poll interval,
        once for all who wait.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self._state.next_version <= after_next:
            if loop.time() >= self._next_probe_s:
                await self.refresh()
                if self._state.next_version > after_next:
                    break
            now_s = loop.time()
            if now_s >= deadline_s:
                return False
            advanced = self._advanced
            try:
                async with asyncio.timeout(max(0.0, min(deadline_s, self._next_probe_s) - now_s)):
                    await advanced.wait()
            except TimeoutError:
                continue
        return True

    async def full(self, version: int) -> CommitDecision:
        """The commit with its tensor digests, read again if they are no longer in memory.

        StateConflict if `version` is no commit; CodecError if the object is not the one that was read before.
        """
        known = self._decisions.get(version)
        if not isinstance(known, CommitDecision):
            raise StateConflict(
                f"number {version} of run {self.run!r} is no committed version.", remedy="Pick one of GET /versions."
            )
        if self.head is not None and version == self.head.version:
            return self.head
        if version in self._full:
            return self._full[version]
        found = await self._read_decision(version)
        if found is None or found[1] != self._hashes[version] or not isinstance(found[0], CommitDecision):
            raise CodecError(
                f"{keys.decision(self.run, version)} has vanished or changed since it was read.",
                remedy="Decisions are immutable: restore the object and find out who replaced it.",
            )
        self._keep_full(found[0])
        return found[0]

    async def refresh_epochs(self) -> list[EpochRecord]:
        """All claimed epochs, in order, read up to the first free number."""
        async with self._epoch_lock:
            while True:
                number = len(self._epochs) + 1
                key = keys.epoch(self.run, number)
                found = await self._get_record(key, EpochRecord)
                if found is None:
                    return list(self._epochs)
                if (found.run, found.epoch) != (self.run, number):
                    raise CodecError(f"{key} holds epoch {found.epoch} of run {found.run!r}.")
                self._epochs.append(found)

    # --- parts and anchors -------------------------------------------------------------------------------------------

    async def part(self, ref: PartRef) -> PartRecord:
        """The part a decision refers to. ObjectCorrupt if its bytes do not have the SHA-256 the decision names."""
        entry = await self._part_entry(ref.key, expect_sha256=ref.sha256)
        if entry is None:
            raise ObjectNotFound(f"{ref.key} is missing, though a decision refers to it.")
        return entry.part

    async def parts(self, version: int, epoch: int) -> dict[int, PartRecord]:
        """The parts that `epoch` has put for `version` so far, by writer."""
        return {writer: entry.part for writer, entry in (await self.part_entries(version, epoch)).items()}

    async def part_entries(self, version: int, epoch: int) -> dict[int, PartEntry]:
        """Like `parts`, each with its reference."""
        found: list[str] = []
        async for key in self.store.list(keys.parts_prefix(self.run, version)):
            if keys.parse_part(key)[0] == epoch:
                found.append(key)
        entries = await gather_bounded(self._part_entry, found)
        return {e.ref.writer: e for e in sorted((e for e in entries if e), key=lambda e: e.ref.writer)}

    async def anchor_versions(self, *, max_age_s: float = 0.0) -> list[int]:
        """Numbers of the effective commits that have a complete anchor, ascending; at most `max_age_s` old."""
        now_s = asyncio.get_running_loop().time()
        if self._anchored is not None and now_s - self._anchored[0] < max_age_s:
            return self._anchored[1]
        found = []
        prefix = keys.anchor_prefix(self.run)
        async for key in self.store.list(prefix):
            number, _, name = key[len(prefix) :].partition("/")
            if name == "manifest.json" and number.isdigit():
                found.append(int(number))
        numbers = sorted(n for n in found if isinstance(self._decisions.get(n), CommitDecision))
        self._anchored = (now_s, numbers)
        return numbers

    async def anchor(self, version: int) -> AnchorRecord | None:
        """The anchor of `version`; None if there is none (any more). CodecError if it is malformed or not signed."""
        if version in self._anchors:
            self._anchors.move_to_end(version)
            return self._anchors[version]
        key = keys.anchor_manifest(self.run, version)
        record = await self._get_record(key, AnchorRecord)
        if record is None:
            return None
        if (record.run, record.version) != (self.run, version):
            raise CodecError(f"{key} holds the anchor of version {record.version} of run {record.run!r}.")
        verify(record, self.signing_key)
        self._anchors[version] = record
        while len(self._anchors) > ANCHOR_CACHE:
            self._anchors.popitem(last=False)
        return record

    async def anchors(self) -> list[AnchorRecord]:
        """All anchors of effective commits, oldest first. Holds them all: with many, use `anchor_versions`."""
        records = [await self.anchor(n) for n in await self.anchor_versions()]
        return [r for r in records if r is not None]

    def forget_anchors(self) -> None:
        """Ask the store again for anchors (some were made or deleted)."""
        self._anchored = None
        self._anchors.clear()

    async def dense_asked(self) -> bool:
        """Whether a receiver has asked for a dense version and none was committed since. Lists the requests."""
        asked = -1
        async for key in self.store.list(keys.requests_prefix(self.run)):
            version = keys.parse_dense_request(key)
            asked = asked if version is None else max(asked, version)
        if asked < 0:
            return False
        complete = next((c.version for c in reversed(self.commits()) if c.base is None or c.totals.complete), -1)
        return asked >= complete

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _read_on(self, window: int) -> bool:
        """Read up to `window` numbers; False when a free one was met."""
        start = self._state.next_version
        found = await gather_bounded(self._read_decision, range(start, start + window))
        for item in found:
            if item is None:
                return False
            self._accept(*item)
        return True

    async def _read_decision(self, version: int) -> tuple[Decision, str] | None:
        key = keys.decision(self.run, version)
        try:
            data = await self.store.get(key, max_bytes=MAX_RECORD_BYTES)
        except ObjectNotFound:
            return None

        def parse() -> tuple[Decision, str]:
            decision = parse_decision(data)
            if (decision.run, decision.version) != (self.run, version):
                raise CodecError(f"it is the decision of version {decision.version} of run {decision.run!r}.")
            verify(decision, self.signing_key)
            return decision, sha256_hex(data)

        try:
            return await offload(len(data), parse)
        except CodecError as error:
            raise CodecError(
                f"{key} cannot be used, and nothing after it: {error.message}",
                remedy=error.remedy or "Restore the object; decisions are immutable.",
            ) from None

    def _accept(self, decision: Decision, sha256: str) -> None:
        if decision.version != self._state.next_version:
            return
        self._state, effective = advance(self._state, decision)
        self._hashes[decision.version] = sha256
        if not effective:
            self._ignored[decision.version] = decision
        elif isinstance(decision, CommitDecision):
            self._keep_full(decision)
        else:
            self._decisions[decision.version] = decision
        if effective and self._observer is not None:
            self._observer(decision, self._caught_up)
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _keep_full(self, commit: CommitDecision) -> None:
        self._decisions[commit.version] = self._full[commit.version] = commit
        while len(self._full) > KEEP_FULL:
            version, old = self._full.popitem(last=False)
            self._decisions[version] = old.model_copy(update={"tensors": []})

    async def _get_record(self, key: str, kind: type[R]) -> R | None:
        try:
            data = await self.store.get(key, max_bytes=MAX_RECORD_BYTES)
        except ObjectNotFound:
            return None
        try:
            return await offload(len(data), lambda: parse_record(kind, data))
        except CodecError as error:
            raise CodecError(f"{key}: {error.message}", remedy=error.remedy) from None

    async def _part_entry(self, key: str, *, expect_sha256: str | None = None) -> PartEntry | None:
        entry = self._parts.get(key)
        if entry is None:
            try:
                data = await self.store.get(key, max_bytes=MAX_RECORD_BYTES)
            except ObjectNotFound:
                return None
            epoch, writer = keys.parse_part(key)
            sha256 = await offload(len(data), lambda: sha256_hex(data))
            _check_part_hash(key, sha256, expect_sha256)
            try:
                part = await offload(len(data), lambda: parse_record(PartRecord, data))
            except CodecError as error:
                raise CodecError(f"{key}: {error.message}", remedy=error.remedy) from None
            if (part.epoch, part.writer) != (epoch, writer):
                raise CodecError(f"{key} holds the part of writer {part.writer} in epoch {part.epoch}.")
            entry = PartEntry(PartRef(writer=writer, key=key, sha256=sha256), part)
            self._parts[key] = entry
            while len(self._parts) > PART_CACHE:
                self._parts.popitem(last=False)
        _check_part_hash(key, entry.ref.sha256, expect_sha256)
        return entry


def _check_part_hash(key: str, sha256: str, expected: str | None) -> None:
    if expected is not None and sha256 != expected:
        raise ObjectCorrupt(
            f"{key} has SHA-256 {sha256[:16]}…, but the decision names {expected[:16]}….",
            remedy="The object was damaged or replaced: restore it, or resynchronise from a newer anchor.",
        )
