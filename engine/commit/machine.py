"""What becomes of the version at the next number: commit, abort, or wait.

One invariant: `decide` is a function of immutable records only (the decisions below the number, the epoch, its launch,
its parts), so every process that decides the number writes the same bytes, whenever it wakes up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from engine.commit.chain import ChainState
from engine.commit.launch import LaunchView
from engine.commit.replicas import check_reported, find_diverged
from engine.errors import DteError, ProofError, StateConflict
from engine.records import (
    AbortDecision,
    CommitDecision,
    EpochRecord,
    PartRecord,
    PartRef,
    SliceResult,
    TensorDigest,
    Totals,
)

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A part and the reference a decision makes to it."""

    ref: PartRef
    part: PartRecord


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to write at the next number. `problem` says why, when the parts are all there but can never be committed:
    the decision is then an abort with reason `rejected`."""

    decision: CommitDecision | AbortDecision
    problem: DteError | None = None


def decide(state: ChainState, epoch: EpochRecord, launch: LaunchView, parts: Mapping[int, PartEntry]) -> Verdict | None:
    """The decision that the parts of `epoch` at `state.next_version` call for; None while one of them is missing.

    None also when `epoch` is not the one that may decide this number. Parts are immutable, so parts that are all there
    but do not fit (different steps, a base that is not the head, digests that do not join up) never will: that is an
    abort, else the run would wait for ever for a version nobody can complete.
    """
    if epoch.epoch != state.epoch or any(w not in parts for w in range(epoch.world)):
        return None
    entries = [parts[w] for w in range(epoch.world)]
    try:
        _check_same_cut(state, epoch, launch, entries)
        tensors = _tensor_digests(state, launch, entries)
    except (ProofError, StateConflict) as problem:
        return Verdict(_abort(state, epoch, "rejected"), problem)
    if all(e.part.is_empty for e in entries):
        return Verdict(_abort(state, epoch, "unchanged"))
    return Verdict(
        CommitDecision(
            run=epoch.run,
            version=state.next_version,
            epoch=epoch.epoch,
            launch=epoch.launch,
            step=entries[0].part.step,
            base=entries[0].part.base,
            rewound=bool(state.first and state.head is not None and state.start is not None and state.start.differs),
            parts=[e.ref for e in entries],
            tensors=tensors,
            totals=_totals(launch, entries),
            diverged=find_diverged(launch.cells, [e.part for e in entries]),
            created_ms=max(e.part.created_ms for e in entries),
        )
    )


def may_abort(state: ChainState, version: int, epoch: int) -> bool:
    """Whether a writer of `epoch` may still try to abort `version`."""
    return version == state.next_version and epoch == state.epoch


def _abort(state: ChainState, epoch: EpochRecord, reason: str) -> AbortDecision:
    return AbortDecision.model_validate(
        {"run": epoch.run, "version": state.next_version, "epoch": epoch.epoch, "reason": reason}
    )


def _check_same_cut(state: ChainState, epoch: EpochRecord, launch: LaunchView, entries: list[PartEntry]) -> None:
    """All parts are of this run, number, epoch and launch, of one step, on the head, and of the declared slices."""
    base = None if state.head is None else state.head.version
    step = entries[0].part.step
    for writer, entry in enumerate(entries):
        part = entry.part
        found = (part.run, part.version, part.epoch, part.launch, part.writer, entry.ref.writer, part.step, part.base)
        wanted = (epoch.run, state.next_version, epoch.epoch, epoch.launch, writer, writer, step, base)
        if found != wanted:
            raise StateConflict(
                f"version {state.next_version}: writer {writer}'s part is for step {part.step} on base {part.base} "
                f"(epoch {part.epoch}, launch {part.launch!r}), but step {step} on base {base} is wanted.",
                remedy="All ranks must publish the same step; let the ranks agree on the cut before they call sync.",
            )
        declared = launch.slices[writer]
        if len(part.slices) != len(declared) or {s.slice: s.tensor for s in part.slices} != {
            number: tensor for number, (tensor, _) in declared.items()
        }:
            raise StateConflict(
                f"version {state.next_version}: writer {writer}'s part does not report the slices it registered.",
                remedy="Register the rank again under a new launch.",
            )
        check_reported(part, launch.replicas[writer])
        for s in part.slices:
            if s.changed == 0 and s.dense_tiles == 0 and s.digest != s.digest_base:
                raise ProofError(
                    f"version {state.next_version}: slice {s.slice} of writer {writer} ({s.tensor}) has another digest "
                    "than its base but reports no change.",
                    remedy="The next version of this slice must be dense.",
                )


def _tensor_digests(state: ChainState, launch: LaunchView, entries: list[PartEntry]) -> list[TensorDigest]:
    """Digest of every canonical tensor, by name; proves that each delta starts from the base's bits."""
    results: dict[str, list[SliceResult]] = defaultdict(list)
    for entry in entries:
        for s in entry.part.slices:
            results[s.tensor].append(s)
    base = None if state.head is None else {t.name: t for t in state.head.tensors}
    out = []
    for name in sorted(launch.tensors):
        meta, slices = launch.tensors[name], results[name]
        known = [int(s.digest_base, 16) for s in slices if s.digest_base is not None]
        on_base = (
            base is not None
            and name in base
            and len(known) == len(slices)
            and sum(known) & _MASK == int(base[name].digest, 16)
        )
        if not on_base and any(s.dense_tiles != s.tiles for s in slices):
            raise ProofError(
                f"version {state.next_version}: the delta of {name!r} does not start from the bits of "
                f"{'nothing' if state.head is None else f'version {state.head.version}'}, and is not dense everywhere.",
                remedy="The next version must carry this tensor dense.",
            )
        total = sum(int(s.digest, 16) for s in slices) & _MASK
        out.append(TensorDigest(name=name, shape=meta.shape, dtype=meta.dtype, digest=f"{total:016x}"))
    if base is not None and base.keys() != launch.tensors.keys():
        raise StateConflict(
            f"version {state.next_version}: the set of tensors is not that of its base.",
            remedy="Publish a changed model under a new run identifier.",
        )
    return out


def _totals(launch: LaunchView, entries: list[PartEntry]) -> Totals:
    slices = [s for e in entries for s in e.part.slices]
    chunks = [c for e in entries for c in e.part.chunks]
    return Totals(
        elements=launch.elements,
        changed=sum(s.changed for s in slices),
        dense_tiles=sum(s.dense_tiles for s in slices),
        dense_lanes=sum(s.dense_lanes for s in slices),
        chunks=len(chunks),
        bytes=sum(c.size_bytes for c in chunks),
    )
