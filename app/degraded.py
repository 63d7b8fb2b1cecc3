"""Degraded modes are never silent: each use is logged, counted and shown in `/versions` and `/metrics`."""

from __future__ import annotations

import logging
import threading

from app.metrics import Metrics

log = logging.getLogger(__name__)


class Degraded:
    """Counts of degraded modes by name (a short kebab-case identifier from a closed set). Safe from any thread."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def count(self, name: str, n: int = 1, detail: str = "") -> None:
        """Record that the mode `name` was used `n` times; `detail` goes to the log only."""
        if n <= 0:
            return
        with self._lock:
            self._counts[name] = total = self._counts.get(name, 0) + n
        if self._metrics is not None:
            self._metrics.degraded.labels(name).inc(n)
        log.warning("degraded: %s (%d so far)%s", name, total, f": {detail}" if detail else "")

    def snapshot(self) -> dict[str, int]:
        """All counts so far, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))
