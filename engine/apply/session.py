"""`Applier`: takes one rank's live weights from version to version, all or nothing.

One invariant: between the first write of a commit and its finalize or rollback, the applier holds what undoes it; a
resync has no undo, and its weights count for nothing until their digests equal the target's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.apply.changes import Change, check_unique, collect, lanes_here, overwrite
from engine.apply.errors import LiveChanged, WrongBase, WrongResult
from engine.apply.live import LiveSet, LiveTensor
from engine.apply.phases import Move, Phase, after
from engine.apply.pieces import Reader, Sparse
from engine.apply.target import Target
from engine.detect.base import I64, U16
from engine.digest import add, to_hex
from engine.errors import CodecError, InvalidInput, StateConflict
from engine.records.models import TensorDigest, TensorMeta


@dataclass(frozen=True, slots=True)
class Verdict:
    """Digests of this rank's lanes, hex by canonical name: as they are live, and as they will be after a commit.

    For a rank that holds whole tensors both have been compared already; for one that holds parts, whoever drives the
    ranks adds them up. `entries`: lanes that change on this rank.
    """

    version: int
    already: bool
    live: dict[str, str]
    after: dict[str, str]
    entries: int


def _differing(selected: Mapping[str, LiveTensor], mine: Mapping[str, int], want: Mapping[str, str]) -> tuple[str, ...]:
    """Whole tensors whose digest is not the wanted one."""
    return tuple(n for n, live in selected.items() if live.whole and to_hex(mine[n]) != want.get(n))


def _names(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return ", ".join(repr(n) for n in tensors[:3]) + more


class Applier:
    """The weights of one rank and where they are between two versions. Not thread-safe: one operation at a time.

    `version` and `step` are those last proven, None before the first proof and from the first write of a resync on.
    """

    def __init__(self, live: LiveSet) -> None:
        self._live = live
        self._phase = Phase.CLEAN
        self._target: Target | None = None
        self._selected: dict[str, LiveTensor] = {}
        self._changes: list[Change] = []
        self.version: int | None = None
        self.step: int | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def target_version(self) -> int | None:
        """The version that is prepared or being written."""
        return self._target.version if self._target else None

    @property
    def live(self) -> LiveSet:
        return self._live

    def rebind(self, live: LiveSet) -> None:
        """Use other memory from now on (the engine replaced its tensors). Nothing is proven about it.

        A prepared version is dropped. StateConflict while a commit could still be rolled back.
        """
        if self._phase is Phase.PREPARED:
            self.abort()
        if self._phase in (Phase.WRITING, Phase.WRITTEN):
            raise StateConflict("the live tensors were replaced in the middle of a commit.", remedy="Resync it.")
        self._live = live
        self.version = self.step = None

    def unprove(self) -> None:
        """Somebody else may have written to the weights: they are no known version until proven again."""
        self.version = self.step = None

    def audit(self, tensors: Sequence[TensorMeta]) -> dict[str, int]:
        """Digest of the live lanes of every tensor, by canonical name: one full pass. Allowed in every phase."""
        return LiveSet.digests(self._live.select(tensors))

    def adopt(self, version: int, step: int, tensors: Sequence[TensorDigest], audited: Mapping[str, str]) -> None:
        """Take the live weights to be `version`, because their digests are its.

        `audited`: this rank's digests as an audit found them and whoever drives the ranks found right; they must still
        be the live ones, and those of whole tensors must be the version's. WrongBase if not.
        """
        after(self._phase, Move.ADOPT)
        selected = self._live.select(tensors)
        mine = LiveSet.digests(selected)
        wrong = _differing(selected, mine, {t.name: t.digest for t in tensors})
        wrong = wrong or tuple(n for n in mine if to_hex(mine[n]) != audited.get(n))
        if wrong:
            raise WrongBase(f"the live weights are not version {version}: {_names(wrong)} differ.", wrong)
        self.version, self.step = version, step

    def prepare(self, target: Target) -> Verdict:
        """Check everything about `target` against the live weights and keep its entries. Writes nothing.

        WrongBase, WrongResult, CodecError, TensorMismatch or LayoutError leave the weights and the phase as they were.
        A version that is already live is said so.
        """
        phase = after(self._phase, Move.PREPARE)
        selected = self._live.select(target.tensors)
        live = LiveSet.digests(selected)
        want = {t.name: t.digest for t in target.tensors}
        as_hex = {n: to_hex(d) for n, d in live.items()}
        if self.version == target.version:
            gone = _differing(selected, live, want)
            if gone:
                raise WrongBase(f"the weights are no longer version {target.version}: {_names(gone)} differ.", gone)
            return Verdict(target.version, True, as_hex, as_hex, 0)
        if target.base_digests is not None:
            wrong = _differing(selected, live, target.base_digests)
            if wrong:
                raise WrongBase(
                    f"the live weights are not version {target.base}, the base of version {target.version}: "
                    f"{_names(wrong)} differ.",
                    wrong,
                    remedy="The receiver is audited against the known versions, and resynced if it is at none.",
                )
        elif target.base is not None:
            raise InvalidInput(f"version {target.version} needs the digests of its base {target.base}.")
        collector = collect(target, selected)
        if target.base is None:
            collector.require_dense(target)
        then = {n: add(d, collector.delta(n)) for n, d in live.items()}
        bad = _differing(selected, then, want)
        if bad:
            what = "the chunks" if target.received is None else "the deliveries"
            raise WrongResult(
                f"{what} of version {target.version} do not lead to its digests: {_names(bad)}.",
                remedy="Nothing was written. The receiver is brought up from another anchor.",
            )
        changes = collector.changes()
        self._selected, self._changes, self._target, self._phase = selected, changes, target, phase
        entries = sum(c.new.size for c in changes)
        return Verdict(target.version, False, as_hex, {n: to_hex(d) for n, d in then.items()}, entries)

    def abort(self) -> None:
        """Drop what was prepared."""
        self._phase = after(self._phase, Move.ABORT)
        self._forget()

    def check_untouched(self) -> None:
        """LiveChanged if a lane that is about to change does not hold the bits it held at prepare."""
        for change in self._changes:
            for copy, local in zip(self._selected[change.tensor].copies, change.local, strict=True):
                if not np.array_equal(copy.lanes.gather(local), change.old):
                    raise LiveChanged(
                        f"something else wrote to {change.tensor!r} between prepare and commit.",
                        remedy="Nothing was written; prepare again.",
                    )

    def commit(self, version: int) -> None:
        """Write the prepared version and read it back. Repeating it after a failure is allowed.

        LiveChanged before the first write (phase stays prepared) or when the read back differs (phase writing: only
        commit again, rollback, or resync).
        """
        self._need_target(version)
        phase = after(self._phase, Move.COMMIT)
        if self._phase is Phase.PREPARED:
            self.check_untouched()
        self._phase = phase
        self._write(lambda change: change.new)
        self._phase = after(self._phase, Move.WROTE)

    def finalize(self, version: int) -> None:
        """Declare the written version clean and drop the undo."""
        target = self._need_target(version)
        self._phase = after(self._phase, Move.FINALIZE)
        self.version, self.step = target.version, target.step
        self._forget()

    def rollback(self) -> None:
        """Write the old bits back and read them back; the weights are the base's again. LiveChanged if they are not."""
        phase = after(self._phase, Move.ROLLBACK)
        self._write(lambda change: change.old)
        self._phase = phase
        self._forget()

    def resync(self, targets: Sequence[Target], before_write: Callable[[], None] = lambda: None) -> dict[str, int]:
        """Overwrite the weights with `targets[0]` (every lane dense) and the deltas that follow it. No undo.

        All files are read and checked before `before_write` is called and the first lane is written. Returns this
        rank's digests afterwards; WrongResult if those of whole tensors are not the last target's (phase rewriting).
        """
        after(Phase.CLEAN if self._phase is Phase.PREPARED else self._phase, Move.RESYNC)
        selected = self._check_chain(targets)
        before_write()
        if self._phase is Phase.PREPARED:
            self.abort()
        self._phase = after(self._phase, Move.RESYNC)
        self.version = self.step = None
        self._forget()
        last = targets[-1]
        for target in targets:
            reader = Reader(target, selected)
            for file in target.chunks:
                for piece in reader.pieces(file):
                    for copy in selected[piece.tensor].copies:
                        overwrite(copy, piece)
        digests = LiveSet.digests(selected)
        wrong = _differing(selected, digests, {t.name: t.digest for t in last.tensors})
        if wrong:
            raise WrongResult(
                f"the resync did not lead to version {last.version}: {_names(wrong)} differ.",
                remedy="The receiver stays unready; it is resynced from another anchor.",
            )
        self._target = last
        self._phase = after(self._phase, Move.REWROTE)
        return digests

    def _check_chain(self, targets: Sequence[Target]) -> dict[str, LiveTensor]:
        """Read every chunk without writing: damage, ranges, uniqueness, completeness of the first target."""
        if not targets:
            raise InvalidInput("a resync needs a version or an anchor to start with.")
        for earlier, later in itertools.pairwise(targets):
            if later.base != earlier.version:
                raise InvalidInput(f"version {later.version} is based on {later.base}, not on {earlier.version}.")
        if any(t.received is not None for t in targets):
            raise InvalidInput("a resync is made from chunks; what arrived from the trainer's ranks has no undo there.")
        selected = self._live.select(targets[-1].tensors)
        for number, target in enumerate(targets):
            if self._live.select(target.tensors).keys() != selected.keys():
                raise InvalidInput(f"version {target.version} names other tensors than version {targets[-1].version}.")
            reader = Reader(target, selected)
            dense = dict.fromkeys(selected, 0)
            seen: dict[str, list[I64]] = {}
            for file in target.chunks:
                for piece in reader.pieces(file):
                    copy = selected[piece.tensor].copies[0]
                    if isinstance(piece, Sparse):
                        seen.setdefault(piece.tensor, []).append(copy.locator.locate(piece.canonical)[1])
                    else:
                        dense[piece.tensor] += lanes_here(copy, piece)
            for name, parts in seen.items():
                check_unique(name, np.sort(np.concatenate(parts)))
            if number == 0:
                # Its base, if it has one, is not here: only what needs none may be in it.
                if seen:
                    raise CodecError(f"version {target.version} is no start: it carries differences.")
                short = [n for n, live in selected.items() if dense[n] != live.held]
                if short:
                    raise CodecError(f"version {target.version} does not carry all of {_names(short)}.")
        return selected

    def _write(self, values: Callable[[Change], U16]) -> None:
        """Write one side of every entry, and read all of it back."""
        for change in self._changes:
            for copy, local in zip(self._selected[change.tensor].copies, change.local, strict=True):
                copy.lanes.scatter(local, values(change))
        for change in self._changes:
            for copy, local in zip(self._selected[change.tensor].copies, change.local, strict=True):
                if not np.array_equal(copy.lanes.gather(local), values(change)):
                    raise LiveChanged(
                        f"{change.tensor!r} does not read back as it was written.",
                        remedy="Roll back and prepare again, or resync.",
                    )

    def _need_target(self, version: int) -> Target:
        if self._target is None or self._target.version != version:
            raise StateConflict(
                f"version {version} is not the one in hand ({self.target_version}).", remedy="Prepare it first."
            )
        return self._target

    def _forget(self) -> None:
        self._selected, self._changes, self._target = {}, [], None
