"""Open files of a local store: one being read, one being written, and what keeps them safe from cancellation.

Invariant: a descriptor is closed exactly once, and never while a thread is using it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Protocol, Self, TypeVar

from transports.errors import StoreError
from transports.store._paths import os_errors
from transports.store.base import ObjectInfo

READ_BYTES = 1 << 20

T = TypeVar("T")


def _info(st: os.stat_result) -> ObjectInfo:
    return ObjectInfo(st.st_size, f'"{st.st_ino:x}-{st.st_mtime_ns:x}-{st.st_size:x}"')


class Guard:
    """Descriptors shared by a task and the thread that works for it. A cancelled task cannot stop its thread, so
    `close` waits for no one, yet nothing is released under a running call: then the call releases at its end."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._running = 0
        self._closed = False

    @contextmanager
    def use(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreError("the file was closed while it was in use.", remedy="Try again.")
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                last = self._closed and not self._running
            if last:
                self._release()

    def close(self) -> None:
        with self._lock:
            now = not self._closed and not self._running
            self._closed = True
        if now:
            self._release()


async def acquire(make: Callable[[], T], release: Callable[[T], None]) -> T:
    """`make()` in a thread; if the caller is cancelled meanwhile, what it made is released."""
    future = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(lambda f: None if f.cancelled() or f.exception() else release(f.result()))
        raise


class Reader:
    """One open object; it stays readable, and the same, when the key is overwritten or deleted."""

    def __init__(self, key: str, fd: int, st: os.stat_result) -> None:
        self.key = key
        self.info = _info(st)
        self._fd = fd
        self._guard = Guard(lambda: os.close(fd))

    async def read(self, start: int, length: int) -> bytes:
        """Exactly min(length, what is there from `start`) bytes."""
        return await asyncio.to_thread(self.read_now, start, length)

    def read_now(self, start: int, length: int) -> bytes:
        """`read` for callers that are in a thread already."""

        pieces: list[bytes] = []
        left = min(length, self.info.size - start)
        with os_errors(f"reading {self.key}"), self._guard.use():
            while left > 0:
                piece = os.pread(self._fd, left, start)
                if not piece:
                    raise StoreError(f"{self.key} became shorter while it was read.", remedy="Check the store's disk.")
                pieces.append(piece)
                start += len(piece)
                left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def pieces(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """The bytes [start, stop) in pieces of READ_BYTES."""
        while start < stop:
            piece = await self.read(start, min(READ_BYTES, stop - start))
            start += len(piece)
            yield piece

    def close(self) -> None:
        self._guard.close()


class Temp:
    """A locked file in `.tmp`. The lock tells a cleaning process that the writer lives."""

    def __init__(self, directory: int, name: str, fd: int, key: str) -> None:
        self.directory, self.name, self.fd, self.key = directory, name, fd, key
        self.guard = Guard(self._remove)

    def write(self, pieces: Iterable[bytes]) -> None:
        with os_errors(f"writing {self.key}"), self.guard.use():
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[os.write(self.fd, view) :]

    def discard(self) -> None:
        """Remove the temporary name and close. After `publish` renamed it, only close. Idempotent."""
        self.guard.close()

    def _remove(self) -> None:
        with suppress(OSError):  # renamed into place; or it stays for the next opening's cleaning
            os.unlink(self.name, dir_fd=self.directory)
        os.close(self.fd)
        os.close(self.directory)


class _Uploads(Protocol):
    def create_temp(self, key: str) -> Temp: ...

    def publish(self, temp: Temp, key: str, if_absent: bool) -> bool: ...


class Upload:
    """An object in the making: an async context manager that leaves nothing behind unless `commit` returned True."""

    def __init__(self, store: _Uploads, key: str) -> None:
        self._store = store
        self.key = key
        self._temp: Temp | None = None

    async def __aenter__(self) -> Self:
        self._temp = await acquire(lambda: self._store.create_temp(self.key), Temp.discard)
        return self

    async def write(self, pieces: Sequence[bytes]) -> None:
        """Append. StoreFull when the disk is."""
        await asyncio.to_thread(self._open.write, pieces)

    async def commit(self, *, if_absent: bool) -> bool:
        """Publish durably. False: there was an object and `if_absent` was asked."""
        return await asyncio.to_thread(self._store.publish, self._open, self.key, if_absent)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._temp is not None:
            self._temp.discard()

    @property
    def _open(self) -> Temp:
        if self._temp is None:
            raise StoreError("the upload was not entered.")
        return self._temp


def hash_reader(reader: Reader) -> str:
    """SHA-256 of the whole file, in hexadecimal digits. For threads."""
    digest, at = hashlib.sha256(), 0
    while at < reader.info.size:
        piece = reader.read_now(at, READ_BYTES)
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest()
