"""Keeps a receiver registered at its rollout daemon, across restarts of either.

One invariant: while no daemon owns the receiver it is announced again and again, with growing pauses; while one does,
nothing is sent.
"""

from __future__ import annotations

import logging
import random
import threading

import httpx

from clients.http import client_settings
from clients.protocol import ReceiverRegistration
from clients.rollout.server import ReceiverServer

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 10.0


class Registrar:
    """A background thread that posts the registration until the daemon has attached."""

    def __init__(
        self, daemon: str, registration: ReceiverRegistration, server: ReceiverServer, *, token: str | None = None
    ) -> None:
        self._client = client_settings(daemon, token)
        self._body = registration.model_dump(mode="json")
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"dte-registrar-{registration.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        with httpx.Client(timeout=10.0, **self._client) as http:
            while not self._stop.is_set():
                if self._server.owned:
                    pause = FIRST_PAUSE_S
                    self._stop.wait(FIRST_PAUSE_S)
                    continue
                self._post(http)
                if not self._server.wait_owned(pause * random.uniform(0.8, 1.2)):
                    pause = min(LAST_PAUSE_S, pause * 1.6)

    def _post(self, http: httpx.Client) -> None:
        try:
            answer = http.post("/receivers", json=self._body)
        except httpx.HTTPError as error:
            log.info("receiver not registered yet: %s: %s", type(error).__name__, error)
            return
        if answer.status_code >= 400:
            log.warning("the daemon refuses the registration (%d): %s", answer.status_code, answer.text[:500])
