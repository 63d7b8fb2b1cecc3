"""Prometheus metrics of one daemon, in a registry of their own.

Invariant: every label has a small, closed set of values (routes are templates, never paths), so the number of series
stays bounded.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_FRACTIONS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """All counters, gauges and histograms; roles use the attributes directly. Safe to use from any thread."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        ProcessCollector(registry=r)
        PlatformCollector(registry=r)
        # HTTP
        self.http_requests = Counter("dte_http_requests", "Requests served.", ["method", "route", "status"], registry=r)
        self.http_seconds = Histogram(
            "dte_http_request_seconds", "Time to serve a request.", ["route"], buckets=_SECONDS, registry=r
        )
        # versions
        self.decisions = Counter("dte_decisions", "Decisions seen.", ["run", "kind"], registry=r)
        self.head_version = Gauge("dte_head_version", "Newest committed version.", ["run"], registry=r)
        self.epoch = Gauge("dte_epoch", "Highest open epoch.", ["run"], registry=r)
        self.diverged = Gauge(
            "dte_diverged_replicas", "Replicas that differ from the newest version.", ["run"], registry=r
        )
        # publisher
        self.jobs = Counter("dte_jobs", "Jobs that reached a final state.", ["kind", "state"], registry=r)
        self.stage_seconds = Histogram(
            "dte_stage_seconds",
            "Time of one stage of publishing or installing.",
            ["stage"],
            buckets=_SECONDS,
            registry=r,
        )
        self.hold_seconds = Histogram(
            "dte_trainer_hold_seconds", "How long a read held the trainer.", buckets=_SECONDS, registry=r
        )
        self.changed_fraction = Histogram(
            "dte_changed_fraction",
            "Share of lanes a version changed.",
            buckets=_FRACTIONS,
            registry=r,
        )
        self.entries = Counter("dte_entries", "Sparse entries published.", registry=r)
        self.dense_tiles = Counter("dte_dense_tiles", "Tiles published dense.", registry=r)
        self.ambiguous = Counter("dte_ambiguous_elements", "Elements the interval test could not decide.", registry=r)
        self.failed_tiles = Counter("dte_failed_tiles", "Tiles whose proof failed and that went dense.", registry=r)
        self.published_bytes = Counter("dte_published_bytes", "Chunk bytes uploaded.", registry=r)
        # subscriber
        self.installs = Counter("dte_installs", "Versions installed in a receiver.", ["outcome"], registry=r)
        self.resyncs = Counter("dte_resyncs", "Dense resyncs of receivers.", registry=r)
        self.downloaded_bytes = Counter("dte_downloaded_bytes", "Chunk bytes downloaded.", registry=r)
        self.receiver_version = Gauge("dte_receiver_version", "Installed version.", ["receiver"], registry=r)
        self.receiver_lag = Gauge("dte_receiver_lag", "Committed versions not yet installed.", ["receiver"], registry=r)
        # rank to rank
        self.p2p_bytes = Counter("dte_p2p_bytes", "Bytes exchanged rank to rank.", ["direction"], registry=r)
        self.p2p_exchanges = Counter(
            "dte_p2p_exchanges", "Versions that a receiver was sent rank to rank.", ["outcome"], registry=r
        )
        # embedded store
        self.store_requests = Counter("dte_store_requests", "Requests to the store.", ["verb", "outcome"], registry=r)
        self.store_bytes = Counter("dte_store_bytes", "Object bytes moved.", ["direction"], registry=r)
        # everything that works, but worse than it should
        self.degraded = Counter("dte_degraded", "Times a degraded mode was used.", ["name"], registry=r)

    def render(self) -> bytes:
        """The text exposition format of all metrics."""
        return generate_latest(self.registry)
