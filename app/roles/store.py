"""The store role: this daemon's own directory, served to others under `/store`."""

from __future__ import annotations

from fastapi import APIRouter

from app.api.store import store_router
from app.roles.base import Node, Role
from transports.errors import StoreError
from transports.store.local import LocalStore


class StoreRole(Role):
    """Serves `data_dir/store`. Shares the node's store object when the daemon uses its own store."""

    name = "store"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        own = node.store
        root = node.settings.store_dir.absolute()
        self.store = own if isinstance(own, LocalStore) and own.root == root else LocalStore(root)
        self._unready: str | None = "not started"

    async def start(self) -> None:
        """Makes the directory and removes what crashed writers left. StoreError if that cannot be done."""
        try:
            await self.store.prepare()
        except StoreError as e:
            self._unready = str(e)
            raise
        self._unready = None

    async def stop(self) -> None:
        self._unready = "stopped"

    def router(self) -> APIRouter:
        return store_router(self.store, self.node.metrics, max_object_bytes=self.node.settings.max_object_bytes)

    def unready(self) -> str | None:
        return self._unready
