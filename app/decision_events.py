"""Turns decisions, as a chain reads them, into events and metrics."""

from __future__ import annotations

from collections.abc import Callable

from app.events import EventBus
from app.metrics import Metrics
from engine.records import AbortDecision, CommitDecision, Decision


def observer(events: EventBus, metrics: Metrics) -> Callable[[Decision, bool], None]:
    """An observer for `Chain`. Decisions made before this daemon looked for the first time are counted in the gauges
    only: they are no events."""

    def observe(decision: Decision, fresh: bool) -> None:
        run, version, epoch = decision.run, decision.version, decision.epoch
        metrics.epoch.labels(run).set(epoch)
        if isinstance(decision, CommitDecision):
            metrics.head_version.labels(run).set(version)
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
