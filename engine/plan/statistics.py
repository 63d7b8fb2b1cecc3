"""What a plan costs and how evenly: the numbers that `dte plan` prints.

One invariant: they follow from the plan and given counts alone, so every member reports the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from engine.errors import InvalidInput
from engine.plan.operations import Counts, Operation
from engine.plan.planning import Plan

COUNTS_BYTES = 3 * 8
"""Of the first round, for each operation: entries, tiles, dense lanes as int64."""
_TILE_BYTES = 2 * 8  # place of the part, tile of the slice
_LANE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Share:
    """`operations` of a pair or member, the `lanes` they can reach, and that as a `share` of the whole plan's."""

    operations: int
    lanes: int
    share: float


@dataclass(frozen=True)
class PlanStatistics:
    """`pairs` by (sender, receiver), those without operations left out; `senders`, `receivers` by number.

    `balance`: the most lanes a sender sends, divided by the mean over all senders; 1 is even, 1 too if nothing is sent.
    """

    operations: int
    lanes: int
    pairs: Mapping[tuple[int, int], Share]
    senders: tuple[Share, ...]
    receivers: tuple[Share, ...]
    balance: float


def statistics(plan: Plan) -> PlanStatistics:
    """Sum up a plan."""
    pairs: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for o in plan.operations:
        mine = pairs[o.sender, o.receiver]
        mine[0] += 1
        mine[1] += o.lanes
    total = sum(lanes for _, lanes in pairs.values())

    def share(of: Iterable[list[int]]) -> Share:
        rows = list(of)
        lanes = sum(r[1] for r in rows)
        return Share(sum(r[0] for r in rows), lanes, lanes / total if total else 0.0)

    def members(count: int, side: int) -> tuple[Share, ...]:
        rows: list[list[list[int]]] = [[] for _ in range(count)]
        for pair, row in pairs.items():
            rows[pair[side]].append(row)
        return tuple(share(r) for r in rows)

    senders = members(plan.senders, 0)
    most = max((s.lanes for s in senders), default=0)
    return PlanStatistics(
        operations=len(plan.operations),
        lanes=total,
        pairs={pair: share([row]) for pair, row in pairs.items()},
        senders=senders,
        receivers=members(plan.receivers, 1),
        balance=most * plan.senders / total if total else 1.0,
    )


def payload_bytes(operation: Operation, counts: Counts) -> int:
    """Bytes of one operation of a version in the second round: entries with their lanes, tile numbers, dense lanes."""
    index = np.dtype(operation.index_dtype).itemsize
    return counts.entries * (index + _LANE_BYTES) + counts.tiles * _TILE_BYTES + counts.dense_lanes * _LANE_BYTES


def version_bytes(plan: Plan, counts: Iterable[Counts]) -> dict[tuple[int, int], int]:
    """Bytes of one version by pair, both rounds, without headers; `counts` in plan order. InvalidInput if they are not
    one for each operation."""
    given = list(counts)
    if len(given) != len(plan.operations):
        raise InvalidInput(f"{len(given)} counts for the {len(plan.operations)} operations of a plan.")
    out: dict[tuple[int, int], int] = defaultdict(int)
    for operation, count in zip(plan.operations, given, strict=True):
        out[operation.sender, operation.receiver] += COUNTS_BYTES + payload_bytes(operation, count)
    return dict(out)
