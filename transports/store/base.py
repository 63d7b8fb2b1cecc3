"""`ChunkStore`: six verbs are all the protocol needs of a store.

The one invariant every implementation owes: `put_if_absent` has exactly one winner per key, and no verb ever shows an
object that is not complete and durable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Size in bytes and an opaque tag that changes with the content."""

    size: int
    etag: str


class ChunkStore(ABC):
    """An object store with immutable semantics. Keys are checked with `engine.records.keys.check_key`.

    All methods raise `transports.errors.StoreError` (or a subclass) when the store cannot do what was asked, after the
    implementation's own retries.
    """

    @abstractmethod
    async def put(self, key: str, data: bytes | Path) -> None:
        """Create or replace the object, from memory or from a local file. Durable on return."""

    @abstractmethod
    async def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        """Create the object if no object has this key. True: we created it. False: it was there. Durable on return."""

    @abstractmethod
    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object. `ObjectNotFound` if absent, `ObjectTooLarge` if longer than `max_bytes`."""

    @abstractmethod
    def stream(self, key: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The bytes [start, start+length) (to the end if None) in pieces. `ObjectNotFound` if absent."""

    @abstractmethod
    async def head(self, key: str) -> ObjectInfo | None:
        """Size and tag, or None if absent."""

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[str]:
        """All keys that start with `prefix` (which ends with `/`), in lexicographic order."""

    @abstractmethod
    async def delete(self, key: str) -> bool:
        """Remove the object. True if there was one."""

    async def aclose(self) -> None:  # noqa: B027 - most stores have nothing to release
        """Release connections. The store must not be used afterwards."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
