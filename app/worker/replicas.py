"""What a rank holds and does not publish: read for its digest, in the hold in which a version's slices are read.

One invariant: nothing of a replica is remembered, sent, or able to change what is published.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.worker.reader import SliceReader
from app.worker.source import Memory, SliceShape, SliceSource, check_slice
from clients.protocol import RankRegistration, SliceSpec
from engine.digest import add_all, to_hex
from engine.errors import InvalidInput
from engine.records.models import ReplicaDecl, ReplicaDigest, TensorMeta

_REGISTER_AGAIN = "Correct the registration and register again."
_Key = tuple[str, str, int]


def check_replica(spec: SliceSpec, metas: dict[str, TensorMeta]) -> SliceShape:
    """The replica in lanes. InvalidInput or LayoutError name what does not fit."""
    if spec.cell is None or spec.holders is None or spec.detector != "dense":
        raise InvalidInput(
            f"replica {spec.slice} ({spec.tensor}) needs a cell, holders and the detector 'dense'.",
            remedy=_REGISTER_AGAIN,
        )
    return check_slice(spec, metas, 0)


def check_replicas(registration: RankRegistration) -> list[SliceShape]:
    """Check everything of a rank's replicas that can be checked without touching memory."""
    metas = {t.name: t for t in registration.tensors}
    if [s.slice for s in registration.replicas] != list(range(len(registration.replicas))):
        raise InvalidInput("replicas must be numbered 0, 1, 2, … in order.", remedy=_REGISTER_AGAIN)
    for spec in registration.slices:
        if spec.holders is not None:
            raise InvalidInput(f"slice {spec.slice} ({spec.tensor}) has holders.", remedy=_REGISTER_AGAIN)
    for spec in registration.replicas:
        if spec.holders is not None and spec.holders >= registration.world:
            raise InvalidInput(
                f"replica {spec.slice} ({spec.tensor}) is held from rank {spec.holders} on, in a world of "
                f"{registration.world}.",
                remedy=_REGISTER_AGAIN,
            )
    return [check_replica(s, metas) for s in registration.replicas]


def declarations(shapes: Sequence[SliceShape]) -> list[ReplicaDecl]:
    """What the launch record says of replicas: lanes by cell, tensor and holders."""
    lanes: dict[_Key, int] = {}
    for shape in shapes:
        key = _key(shape.spec)
        lanes[key] = lanes.get(key, 0) + shape.lanes
    return [ReplicaDecl(cell=c, tensor=t, holders=h, lanes=n) for (c, t, h), n in lanes.items()]


class ReplicaReader:
    """All replicas of a rank. Shapes are there from the start; memory only after `attach`."""

    def __init__(self, registration: RankRegistration, reader: SliceReader) -> None:
        self._reader = reader
        self._metas = {t.name: t for t in registration.tensors}
        self.shapes = check_replicas(registration)
        self._sources: list[SliceSource] = []

    def attach(self, memory: Memory) -> list[SliceSource]:
        """Map their memory; returns it."""
        self._sources = [memory.source(s) for s in self.shapes]
        return self._sources

    def move(self, specs: Sequence[SliceSpec], memory: Memory) -> None:
        """Map memory references that moved, as they were checked when the sync was accepted."""
        for spec in specs:
            self.shapes[spec.slice] = check_replica(spec, self._metas)
            self._sources[spec.slice] = memory.source(self.shapes[spec.slice])

    def digests(self) -> tuple[tuple[str, str, int, str], ...]:
        """(cell, tensor, holders, digest in hex) of the bits as they are now."""
        sums: dict[_Key, int] = {}
        for source in self._sources:
            key = _key(source.shape.spec)
            sums[key] = (sums.get(key, 0) + add_all(self._reader.digests(source))) % 2**64
        return tuple((*key, to_hex(total)) for key, total in sums.items())

    def close(self) -> None:
        """Forget the memory."""
        self._sources = []


def digests_of(found: Sequence[tuple[str, str, int, str]]) -> list[ReplicaDigest]:
    """What the part says of replicas."""
    return [ReplicaDigest(cell=c, tensor=t, holders=h, digest=d) for c, t, h, d in found]


def _key(spec: SliceSpec) -> _Key:
    assert spec.cell is not None
    assert spec.holders is not None
    return spec.cell, spec.tensor, spec.holders
