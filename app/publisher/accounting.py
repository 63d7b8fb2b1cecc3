"""What a read or a version adds to metrics and to the degraded modes. Nothing that went dense is silent."""

from __future__ import annotations

from app.publisher.publication import Outcome
from app.roles.base import Node
from app.worker.protocol import ReadDone
from engine.records import CommitDecision

_DEGRADED = {
    "failed_tiles": "proof-failed",
    "mismatched_tiles": "formula-mismatch",
    "outside_tiles": "write-outside-formula",
    "slices_unjoined": "step-unread",
}


def count_read(node: Node, name: str, done: ReadDone) -> None:
    """Counters of one read of the rank called `name`."""
    detail = done.detail
    node.metrics.ambiguous.inc(detail.get("ambiguous", 0))
    node.metrics.failed_tiles.inc(detail.get("failed_tiles", 0))
    for counter, mode in _DEGRADED.items():
        node.degraded.count(mode, detail.get(counter, 0), detail=name)
    for stage, ms in done.timings_ms.items():
        if stage in ("detect", "spool"):
            node.metrics.stage_seconds.labels(stage).observe(ms / 1e3)


def count_version(node: Node, outcome: Outcome) -> None:
    """Counters of one decided version."""
    for stage, ms in outcome.timings_ms.items():
        node.metrics.stage_seconds.labels(stage).observe(ms / 1e3)
    if outcome.problem is None and isinstance(outcome.decision, CommitDecision):
        node.metrics.entries.inc(outcome.entries)
        node.metrics.dense_tiles.inc(outcome.dense_tiles)
