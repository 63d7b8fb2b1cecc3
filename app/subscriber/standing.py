"""Where one receiver is, as everybody may see it: state, installed version, proof, last error.

One invariant: every change is an event, and `ready` is true only for a proven version with nothing in the way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from app.chain import Chain
from app.events import EventBus
from app.metrics import Metrics
from clients.protocol import ReceiverInfo, ReceiverRegistration, ReceiverState
from clients.rollout.protocol import Status
from engine.errors import DteError

log = logging.getLogger(__name__)

_SERVING = frozenset({ReceiverState.IN_SYNC, ReceiverState.INSTALLING, ReceiverState.BEHIND})


class Standing:
    """Written by the receiver's task, read by routes and readiness."""

    def __init__(self, registration: ReceiverRegistration, chain: Chain, events: EventBus, metrics: Metrics) -> None:
        self._registration = registration
        self._chain = chain
        self._events = events
        self._metrics = metrics
        self.state = ReceiverState.PROVING
        self.installed: int | None = None
        self.installed_step: int | None = None
        self.generations: list[int] = []
        self.ranks = len(registration.sockets)
        self.resyncs = 0
        self.last_error = ""
        self.last_install_ms: dict[str, float] = {}
        self.path: Literal["none", "store", "p2p"] = "none"
        """What brought the last version that was installed."""
        self.proof_failed = False
        self.converted = 0
        """Tensors that the engine keeps in another form than their bits."""
        self._said_ready = False

    @property
    def name(self) -> str:
        return self._registration.name

    @property
    def ready(self) -> bool:
        """At a proven version, and nothing stands in the way of the next."""
        return self.installed is not None and self.state in _SERVING and not self.last_error

    def lag(self) -> int | None:
        """Committed versions after the installed one; None if nothing is installed."""
        at = self.installed
        return None if at is None else sum(1 for c in self._chain.commits() if c.version > at)

    def info(self) -> ReceiverInfo:
        """The receiver as `GET /receivers` shows it."""
        unproven: Literal["failed", "none"] = "failed" if self.proof_failed else "none"
        proven: Literal["converted", "proven"] = "converted" if self.converted else "proven"
        return ReceiverInfo(
            name=self.name,
            kind=self._registration.kind,
            run=self._registration.run,
            ranks=self.ranks,
            state=self.state,
            ready=self.ready,
            installed=self.installed,
            installed_step=self.installed_step,
            lag=self.lag(),
            proof=proven if self.installed is not None else unproven,
            converted=self.converted,
            transport=self._registration.transport,
            path=self.path,
            resyncs=self.resyncs,
            last_error=self.last_error,
            last_install_ms=self.last_install_ms,
        )

    def become(self, state: ReceiverState, error: DteError | None = None) -> None:
        """Enter a state; an error is kept until the receiver is in sync."""
        message = self.last_error if error is None else str(error)
        if (state, message) == (self.state, self.last_error):
            return
        self.state, self.last_error = state, message
        self._metrics.receiver_lag.labels(self.name).set(self.lag() or 0)
        if self.ready != self._said_ready:
            self._said_ready = self.ready
            log.info("receiver %s is %s (%s)", self.name, "ready" if self.ready else "not ready", state.value)
        data: dict[str, object] = {"receiver": self.name, "state": state.value, "version": self.installed}
        if error is not None:
            data["error"] = message
            log.warning("receiver %s is %s: %s", self.name, state.value, message)
        self._events.publish("receiver-state", run=self._registration.run, **data)

    def proven(self, statuses: Sequence[Status], version: int, step: int) -> None:
        """The live weights of all ranks have been proven to be `version`."""
        self.installed, self.installed_step, self.proof_failed = version, step, False
        self.generations = [s.generation for s in statuses]
        self._metrics.receiver_version.labels(self.name).set(version)
        self._metrics.receiver_lag.labels(self.name).set(self.lag() or 0)
        self._events.publish("receiver-installed", run=self._registration.run, receiver=self.name, version=version)

    def forget(self) -> None:
        """Nothing is known about the live weights any more."""
        self.installed = self.installed_step = None
        self.generations = []

    def restore(self, statuses: Sequence[Status]) -> None:
        """A resync that wrote nothing leaves the version that the ranks themselves still call theirs."""
        held = {(s.version, s.step) for s in statuses}
        version, step = next(iter(held)) if len(held) == 1 else (None, None)
        if version is not None and step is not None:
            self.installed, self.installed_step = version, step
            self.generations = [s.generation for s in statuses]
