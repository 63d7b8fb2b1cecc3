"""Proof that the slices of a launch cover every canonical tensor exactly once; taken before an epoch is claimed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.commit.launch import tensor_lanes
from engine.layout.algebra import from_json
from engine.layout.blocks import Layout
from engine.layout.cover import prove_exact_cover, validate_slice
from engine.records import LaunchRecord


def prove_cover(records: Sequence[LaunchRecord]) -> None:
    """Raise LayoutError, naming the tensor, the canonical range and the ranks, unless every lane has one owner.

    `records` are those of all ranks of one launch and have passed `summarize`.
    """
    lanes = {meta.name: tensor_lanes(meta) for record in records for meta in record.tensors}
    owners: dict[str, list[tuple[str, Layout]]] = defaultdict(list)
    for record in records:
        for decl in record.slices:
            layout = from_json(decl.blocks, decl.lanes, lanes[decl.tensor])
            validate_slice(layout, decl.lanes, tensor=decl.tensor)
            owners[decl.tensor].append((f"rank {record.rank}", layout))
    for name, count in lanes.items():
        if count or owners[name]:
            prove_exact_cover(count, owners[name], tensor=name)
