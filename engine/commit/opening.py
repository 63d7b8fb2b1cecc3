"""How a launch becomes an epoch and how that epoch opens.

Two steps, each put-if-absent and each computed from immutable records: claim a number in `epochs/`, then, number by
number, adopt the complete version that stands undecided or occupy the number with `epoch-start`. One invariant: an
epoch is open exactly when its epoch-start is effective, and its base is the newest commit below that number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.commit.chain import FIRST_EPOCH, ChainState
from engine.commit.launch import LaunchView
from engine.commit.machine import PartEntry, decide
from engine.errors import StateConflict
from engine.records import CommitDecision, Decision, EpochRecord, EpochStartDecision


@dataclass(frozen=True, slots=True)
class ClaimEpoch:
    """Put `record` if absent; then look again, whoever won."""

    record: EpochRecord


def claim(run: str, launch: str, world: int, known: Sequence[EpochRecord]) -> EpochRecord | ClaimEpoch:
    """The launch's epoch, or the claim to make.

    `known` are epochs 1 … k, read in order until one was absent. Because numbers are claimed without gaps and whoever
    claims has looked at all lower ones, a launch can never hold two: a second claim would need a free number below or
    at one that its own launch has already taken.
    """
    for record in known:
        if record.launch == launch:
            return record
    number = known[-1].epoch + 1 if known else FIRST_EPOCH
    return ClaimEpoch(EpochRecord(run=run, epoch=number, launch=launch, world=world))


@dataclass(frozen=True, slots=True)
class Opened:
    """The epoch is open. `start` is None for the first epoch of a run."""

    start: EpochStartDecision | None


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer epoch has opened: this one can never open, or is over."""

    by: int


@dataclass(frozen=True, slots=True)
class OpenStep:
    """Put `decision` if absent at its number; then look again, whoever won."""

    decision: Decision


def check_same_model(launch: LaunchView, base: CommitDecision) -> None:
    """StateConflict unless the launch has exactly the tensors, shapes and dtypes of `base`."""
    old = {t.name: (t.shape, t.dtype) for t in base.tensors}
    new = {name: (meta.shape, meta.dtype) for name, meta in launch.tensors.items()}
    if old == new:
        return
    name = min(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    raise StateConflict(
        f"launch {launch.launch!r} does not train the model of run {launch.run!r}: tensor {name!r} is "
        f"{_describe(new.get(name))} now and {_describe(old.get(name))} in version {base.version}.",
        remedy="Use a new run identifier for another model.",
    )


def _describe(found: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if found is None else f"{list(found[0])} {found[1]}"


def differing_tensors(launch: LaunchView, base: CommitDecision | None) -> list[str]:
    """Names, sorted, of the tensors whose digest at launch is not the base's. Without a base: all of them."""
    if base is None:
        return sorted(launch.tensors)
    check_same_model(launch, base)
    return sorted(t.name for t in base.tensors if launch.digests[t.name] != int(t.digest, 16))


def next_open_step(
    state: ChainState,
    epoch: EpochRecord,
    launch: LaunchView,
    current: EpochRecord | None,
    current_launch: LaunchView | None,
    parts: Mapping[int, PartEntry],
) -> Opened | Superseded | OpenStep:
    """What whoever opens `epoch` does now.

    `current` is the record of `state.epoch` with its launch (None if no such epoch was ever claimed), `parts` that
    epoch's parts at `state.next_version`. A complete version is adopted: it becomes the base, under its own epoch. An
    incomplete one is not aborted first: epoch-start takes its number, which fences it in the same write.
    """
    if state.epoch > epoch.epoch:
        return Superseded(state.epoch)
    if state.epoch == epoch.epoch:
        return Opened(state.start)
    if current is not None and current_launch is not None:
        verdict = decide(state, current, current_launch, parts)
        if verdict is not None and verdict.problem is None:
            return OpenStep(verdict.decision)
    base = state.head
    return OpenStep(
        EpochStartDecision(
            run=epoch.run,
            version=state.next_version,
            epoch=epoch.epoch,
            launch=epoch.launch,
            base=None if base is None else base.version,
            differs=differing_tensors(launch, base),
        )
    )
