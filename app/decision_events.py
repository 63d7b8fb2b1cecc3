"""Turns decisions, as a chain reads them, into events and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable

from app.events import EventBus
from app.metrics import Metrics
from engine.records import AbortDecision, CommitDecision, Decision

log = logging.getLogger(__name__)

DIVERGED = "diverged-replicas"
"""The degraded mode that is in force while the newest version has diverged replicas."""
_NAMED = 20


def observer(events: EventBus, metrics: Metrics) -> Callable[[Decision, bool], None]:
    """An observer for `Chain`. Decisions made before this daemon looked for the first time are counted in the gauges
    only: they are no events."""

    def observe(decision: Decision, fresh: bool) -> None:
        run, version, epoch = decision.run, decision.version, decision.epoch
        metrics.epoch.labels(run).set(epoch)
        if isinstance(decision, CommitDecision):
            metrics.head_version.labels(run).set(version)
            metrics.diverged.labels(run).set(len(decision.diverged))
        if not fresh:
            return
        metrics.decisions.labels(run, decision.kind).inc()
        if isinstance(decision, CommitDecision):
            totals = decision.totals
            metrics.changed_fraction.observe(totals.changed_fraction)
            events.publish(
                "version-committed",
                run,
                version=version,
                epoch=epoch,
                step=decision.step,
                base=decision.base,
                rewound=decision.rewound,
                changed=totals.changed,
                bytes=totals.bytes,
            )
            if decision.diverged:
                _diverged(decision, events, metrics)
        elif isinstance(decision, AbortDecision):
            events.publish("version-aborted", run, version=version, epoch=epoch, reason=decision.reason)
        else:
            events.publish(
                "epoch-opened",
                run,
                version=version,
                epoch=epoch,
                launch=decision.launch,
                base=decision.base,
                differs=len(decision.differs),
            )

    return observe


def _diverged(decision: CommitDecision, events: EventBus, metrics: Metrics) -> None:
    """Say it loudly: the trainer computes with different weights on ranks that should have the same."""
    found = decision.diverged
    metrics.degraded.labels(DIVERGED).inc(len(found))
    for d in found[:_NAMED]:
        log.error(
            "run %s: version %d: the ranks from %d on hold another %s than the ranks from %d on publish",
            decision.run, decision.version, d.holders, d.tensor, d.writer,
        )  # fmt: skip
    if len(found) > _NAMED:
        log.error("run %s: version %d: %d replicas diverged in all", decision.run, decision.version, len(found))
    events.publish(
        "replicas-diverged",
        decision.run,
        version=decision.version,
        step=decision.step,
        replicas=len(found),
        first=found[0].model_dump(),
    )
