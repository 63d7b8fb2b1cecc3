"""What a role of the daemon is: something with a start, a stop, HTTP routes and a readiness of its own.

Roles share a `Node` and nothing else; each can run alone or beside the others in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fastapi import APIRouter

from app.chains import Chains
from app.degraded import Degraded
from app.events import EventBus
from app.metrics import Metrics
from app.p2p.hub import Hub
from app.settings import Settings
from app.worker.launching import Launcher, start_process
from transports.store.base import ChunkStore


@dataclass(frozen=True)
class Node:
    """The shared parts of one daemon process."""

    settings: Settings
    store: ChunkStore
    chains: Chains
    events: EventBus
    metrics: Metrics
    degraded: Degraded
    p2p: Hub
    launch_worker: Launcher = start_process


class Role(ABC):
    """One role in one daemon. `start` returns when the role can serve; `stop` cancels and waits for what it started."""

    name: str

    def __init__(self, node: Node) -> None:
        self.node = node

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    def router(self) -> APIRouter | None:
        """The role's HTTP routes, or None."""

    @abstractmethod
    def unready(self) -> str | None:
        """None when ready, else the reason in a few words (shown by /readyz)."""
