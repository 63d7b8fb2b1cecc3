"""`Hub`: this daemon's end of all P2P groups, and the meetings it hosts if it is a coordinator."""

from __future__ import annotations

import os
import socket
import uuid

import httpx
from fastapi import FastAPI

from app import problems
from app.api.p2p import p2p_router
from app.events import EventBus
from app.p2p.meetings import Meetings
from app.p2p.rendezvous import Rendezvous
from app.settings import Settings


class Hub:
    """Builds nothing until it is asked. On the event loop only."""

    def __init__(self, settings: Settings, events: EventBus) -> None:
        self.enabled = settings.p2p
        """Whether this daemon takes part in P2P."""
        self._settings = settings
        self._daemon = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._rendezvous: dict[str, Rendezvous] = {}
        self.meetings = Meetings(settings, events)
        """Used only where this daemon is a coordinator."""

    def rendezvous(self, run: str) -> Rendezvous:
        """The one for the run."""
        known = self._rendezvous.get(run)
        if known is None:
            known = self._rendezvous[run] = self._meet(run)
        return known

    def _meet(self, run: str) -> Rendezvous:
        settings = self._settings
        secret = settings.store_token or settings.token
        url, transport = settings.p2p_coordinator, None
        if url is None:
            url, transport = "http://localhost", self._own()
        return Rendezvous(
            run,
            url,
            token=None if secret is None else secret.get_secret_value(),
            daemon=self._daemon,
            # No two daemons with one role use a data directory at once.
            directory=settings.data_dir / "p2p" / "-".join(settings.ordered_roles) / run,
            transport=transport,
        )

    def _own(self) -> httpx.ASGITransport:
        """This daemon's own coordinator, without a way over the network."""
        app = FastAPI(openapi_url=None)
        problems.install(app)
        app.include_router(p2p_router(self.meetings))
        return httpx.ASGITransport(app)

    async def aclose(self) -> None:
        """Leave every group."""
        for rendezvous in list(self._rendezvous.values()):
            await rendezvous.aclose()
        self._rendezvous.clear()
