"""The model's records: real ones, interned, so that a state of the model is a tuple of small numbers.

The model's tensor has a few *cells*; a rank owns some of them. A cell's bits are a small integer, and its digest adds
up like the real one. Beside every part stands its ghost: what it says about each cell, which no process may look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.commit import LaunchView, PartEntry, summarize
from engine.records import (
    Decision,
    LaunchRecord,
    PartRecord,
    PartRef,
    SliceDecl,
    SliceResult,
    TensorMeta,
    keys,
    record_bytes,
    sha256_hex,
)

RUN = "model"
TENSOR = "w"
LANES = 8
T = TypeVar("T")

Change = tuple[int | None, int]
"""(bits in the base, bits in the version) of a cell; None: sent dense, the base's bits are not used."""


def digest(cells: Mapping[int, int]) -> str:
    return f"{sum((2 * c + 1) * (v + 1) * 0x9E3779B97F4A7C15 for c, v in cells.items()) % 2**64:016x}"


@dataclass(frozen=True)
class Launch:
    """A start of the trainer: which cells each rank owns, and the cells' bits after 0, 1, 2, … steps.

    `step` is the trainer's step number at the start, `syncs` how many times it may sync."""

    name: str
    owns: tuple[tuple[int, ...], ...]
    script: tuple[tuple[int, ...], ...]
    step: int = 0
    syncs: int = 1 << 10

    def values(self, steps: int, rank: int) -> dict[int, int]:
        return {c: self.script[steps][c] for c in self.owns[rank]}


def view_of(launch: Launch) -> LaunchView:
    lanes = LANES * sum(len(own) for own in launch.owns)
    records, offset = [], 0
    for rank, own in enumerate(launch.owns):
        size = LANES * len(own)
        decl = SliceDecl(
            slice=0,
            tensor=TENSOR,
            lanes=size,
            blocks=[([size], 0, [1], offset, [1])],
            digest=digest(launch.values(0, rank)),
        )
        offset += size
        records.append(
            LaunchRecord(
                run=RUN,
                launch=launch.name,
                rank=rank,
                world=len(launch.owns),
                step=launch.step,
                tensors=[TensorMeta(name=TENSOR, shape=(lanes,))],
                slices=[decl],
            )
        )
    return summarize(records)


class Intern(Generic[T]):
    """Equal records get equal numbers; equality is that of their bytes."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, key: bytes, item: T) -> int:
        number = self._numbers.setdefault(key, len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number

    def __getitem__(self, number: int) -> T:
        return self.items[number]


@dataclass(frozen=True)
class GhostPart:
    """A part with what it means: per owned cell the change, and the launch and steps at which it was read."""

    entry: PartEntry
    launch: Launch
    changes: Mapping[int, Change]
    version: int
    epoch: int
    writer: int


class Tables:
    """All decisions and parts that the model ever wrote."""

    def __init__(self) -> None:
        self.decisions: Intern[Decision] = Intern()
        self.parts: Intern[GhostPart] = Intern()
        self._by_hash: dict[str, int] = {}

    def decision(self, record: Decision) -> int:
        return self.decisions.add(record_bytes(record), record)

    def part_of(self, ref: PartRef) -> GhostPart:
        return self.parts[self._by_hash[ref.sha256]]

    def part(
        self,
        launch: Launch,
        rank: int,
        *,
        version: int,
        epoch: int,
        steps: int,
        base: int | None,
        sparse: Mapping[int, Change],
        dense: Sequence[int],
        base_values: Mapping[int, int] | None,
    ) -> int:
        """A rank's part. `base_values` are the bits of its cells in the base, None if it does not know them."""
        now = launch.values(steps, rank)
        record = PartRecord(
            run=RUN,
            version=version,
            epoch=epoch,
            writer=rank,
            launch=launch.name,
            step=launch.step + steps,
            base=base,
            chunks=[],
            slices=[
                SliceResult(
                    slice=0,
                    tensor=TENSOR,
                    digest_base=None if base_values is None else digest(base_values),
                    digest=digest(now),
                    changed=len(sparse),
                    dense_tiles=len(dense),
                    dense_lanes=len(dense),
                    tiles=len(now),
                )
            ],
        )
        data = record_bytes(record)
        key = keys.part(RUN, version, epoch, rank)
        changes: dict[int, Change] = dict(sparse)
        changes.update((c, (None, now[c])) for c in dense)
        entry = PartEntry(PartRef(writer=rank, key=key, sha256=sha256_hex(data)), record)
        ghost = GhostPart(entry, launch, changes, version, epoch, rank)
        number = self.parts.add(data, ghost)
        self._by_hash[ghost.entry.ref.sha256] = number
        return number
