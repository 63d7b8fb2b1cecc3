"""`LaunchView`: what all ranks of one launch declared together, reduced to what the commit machine asks of it.

One invariant: the view is a function of the launch's immutable records, so every daemon computes the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.commit.replicas import ReplicaKey, replicas_of
from engine.errors import InvalidInput, LayoutError, StateConflict
from engine.records import ITEMSIZE, LaunchRecord, TensorMeta

_MASK = 2**64 - 1
WriterSlices = Mapping[int, tuple[str, int]]
"""One writer's slices: slice number → (tensor, lanes)."""


def tensor_lanes(meta: TensorMeta) -> int:
    """16-bit lanes of a canonical tensor; an odd last byte counts as one."""
    count = 1
    for n in meta.shape:
        count *= n
    return -(-count * ITEMSIZE[meta.dtype] // 2)


@dataclass(frozen=True)
class LaunchView:
    """A complete launch: its ranks' slices, the canonical tensors by name, and each tensor's digest at launch.

    `cells`: by rank, the cells of its slices that have one. `replicas`: by rank, what it holds and does not publish.
    """

    run: str
    launch: str
    world: int
    step: int
    tensors: Mapping[str, TensorMeta]
    digests: Mapping[str, int]
    slices: tuple[WriterSlices, ...]
    elements: int
    cells: tuple[Mapping[int, str], ...]
    replicas: tuple[frozenset[ReplicaKey], ...]


def summarize(records: Sequence[LaunchRecord]) -> LaunchView:
    """Sum up the records of all ranks of one launch, given in rank order.

    Raises StateConflict when the ranks do not belong together, LayoutError when they disagree about a tensor or declare
    a slice of an undeclared one, InvalidInput when nothing is declared. Cover is proven separately
    (`engine.commit.coverage`): it costs more and is needed only once.
    """
    if not records:
        raise InvalidInput("a launch without ranks.")
    first = records[0]
    tensors: dict[str, TensorMeta] = {}
    digests: dict[str, int] = {}
    slices: list[WriterSlices] = []
    for rank, record in enumerate(records):
        if (record.run, record.launch, record.world, record.rank) != (first.run, first.launch, len(records), rank):
            raise StateConflict(
                f"launch {first.launch!r}: the record at rank {rank} is of run {record.run!r}, launch "
                f"{record.launch!r}, rank {record.rank} of {record.world}, but {len(records)} ranks were expected.",
                remedy="Give every rank of a job the same launch identifier and world size, and each job a new one.",
            )
        if record.step != first.step:
            raise StateConflict(
                f"launch {first.launch!r}: rank {rank} starts at step {record.step}, rank 0 at step {first.step}.",
                remedy="Register all ranks at the same optimizer step.",
            )
        for meta in record.tensors:
            known = tensors.setdefault(meta.name, meta)
            if known != meta:
                raise LayoutError(
                    f"ranks disagree about tensor {meta.name!r}: {list(known.shape)} {known.dtype} against "
                    f"{list(meta.shape)} {meta.dtype} at rank {rank}.",
                    remedy="Declare each canonical tensor with one shape and dtype.",
                )
    for record in records:
        own: dict[int, tuple[str, int]] = {}
        for decl in record.slices:
            if decl.tensor not in tensors:
                raise LayoutError(f"rank {record.rank} owns a slice of {decl.tensor!r}, which no rank declares.")
            if decl.slice in own:
                raise LayoutError(f"rank {record.rank} declares slice {decl.slice} twice.")
            own[decl.slice] = (decl.tensor, decl.lanes)
            digests[decl.tensor] = (digests.get(decl.tensor, 0) + int(decl.digest, 16)) & _MASK
        slices.append(own)
    if not tensors:
        raise InvalidInput(f"launch {first.launch!r} declares no tensors.", remedy="Register at least one tensor.")
    for name in tensors:
        digests.setdefault(name, 0)
    return LaunchView(
        cells=tuple({d.slice: d.cell for d in record.slices if d.cell is not None} for record in records),
        replicas=replicas_of(records),
        run=first.run,
        launch=first.launch,
        world=len(records),
        step=first.step,
        tensors=tensors,
        digests=digests,
        slices=tuple(slices),
        elements=sum(tensor_lanes(m) for m in tensors.values()),
    )
