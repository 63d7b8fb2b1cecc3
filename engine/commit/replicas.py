"""Whether all ranks that hold the same elements hold the same bits.

A cell names elements that several sets of ranks hold; one set publishes them, each other one reports the digest of what
it holds. One invariant: what is found here changes no bit of a version, and follows from immutable records alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from engine.errors import LayoutError, StateConflict
from engine.records import MAX_DIVERGED, Diverged, LaunchRecord, PartRecord

_MASK = 2**64 - 1
ReplicaKey = tuple[str, str, int]
"""(cell, tensor, first rank of the holders)."""


def replicas_of(records: Sequence[LaunchRecord]) -> tuple[frozenset[ReplicaKey], ...]:
    """What each rank of a launch holds and does not publish.

    LayoutError, naming tensor and ranks, when holders do not hold exactly as many lanes of a cell as are published:
    their digests could never be compared.
    """
    published: Counter[tuple[str, str]] = Counter()
    held: Counter[ReplicaKey] = Counter()
    keys = []
    for record in records:
        for decl in record.slices:
            if decl.cell is not None:
                published[decl.cell, decl.tensor] += decl.lanes
        mine = [(r.cell, r.tensor, r.holders) for r in record.replicas]
        if len(set(mine)) != len(mine):
            raise LayoutError(f"rank {record.rank} declares a replica twice.")
        for replica in record.replicas:
            held[replica.cell, replica.tensor, replica.holders] += replica.lanes
        keys.append(frozenset(mine))
    for (cell, tensor, holders), lanes in held.items():
        if published[cell, tensor] != lanes:
            raise LayoutError(
                f"the ranks from {holders} on hold {lanes} lanes of {tensor!r} as replicas of cell {cell}, of which "
                f"{published[cell, tensor]} lanes are published.",
                remedy="Declare replicas on all ranks or on none (replica_digests).",
            )
    return tuple(keys)


def check_reported(part: PartRecord, declared: frozenset[ReplicaKey]) -> None:
    """StateConflict unless the part reports exactly the replicas its rank declared."""
    found = [(r.cell, r.tensor, r.holders) for r in part.replicas]
    if len(found) != len(declared) or set(found) != declared:
        raise StateConflict(
            f"version {part.version}: writer {part.writer}'s part does not report the replicas it registered.",
            remedy="Register the rank again under a new launch.",
        )


def find_diverged(cells: Sequence[Mapping[int, str]], parts: Sequence[PartRecord]) -> list[Diverged]:
    """Replicas whose bits are not the published ones, sorted, at most MAX_DIVERGED.

    `parts`: those of all writers, checked with `check_reported`; `cells`: by writer, slice number → cell.
    """
    held: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for part in parts:
        for r in part.replicas:
            held[r.cell, r.tensor][r.holders] += int(r.digest, 16)
    published: dict[tuple[str, str], int] = defaultdict(int)
    first: dict[tuple[str, str], int] = {}
    for part in parts:
        for s in part.slices:
            key = (cells[part.writer].get(s.slice, ""), s.tensor)
            if key in held:
                published[key] += int(s.digest, 16)
                first.setdefault(key, part.writer)
    found = {
        (key[1], first[key], holders)
        for key, sets in held.items()
        for holders, digest in sets.items()
        if (digest - published[key]) & _MASK
    }
    return [Diverged(tensor=t, writer=w, holders=h) for t, w, h in sorted(found)[:MAX_DIVERGED]]
