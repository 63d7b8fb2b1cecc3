"""Fetch one object to a local file, across interruptions and restarts.

Invariant: the file appears under its name only when its length and SHA-256 are right; until then its bytes are in a
hidden `.part` file beside it, from which a later call goes on.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from transports.errors import ObjectCorrupt, StoreError, StoreFull, StoreUnavailable
from transports.store._files import READ_BYTES, Guard, acquire
from transports.store.base import ChunkStore

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


async def download(
    store: ChunkStore, key: str, path: Path, size: int, sha256: str, *, attempts: int = 3, deadline_s: float = 600.0
) -> None:
    """Put the object `key` (of `size` bytes, with this SHA-256) at `path`, whose directory exists.

    Returns at once when the right file is there. Wrong bytes are thrown away and fetched again, `attempts` times in
    all, then ObjectCorrupt. StoreUnavailable after `deadline_s`; what has arrived is kept for the next call.
    Two calls for one path at the same time are safe; only one of them resumes.
    """
    try:
        async with asyncio.timeout(deadline_s):
            if await asyncio.to_thread(_is_there, path, size, sha256):
                return
            for _ in range(attempts):
                part = await acquire(lambda: _Part(path, size, sha256), _Part.close)
                try:
                    if await _fill(store, key, part, size) and await asyncio.to_thread(part.finish, path):
                        return
                finally:
                    part.close()
    except TimeoutError:
        raise StoreUnavailable(
            f"downloading {key}: not done after {deadline_s:g} s.", remedy="Try again; it goes on where it stopped."
        ) from None
    raise ObjectCorrupt(
        f"downloading {key}: {attempts} times the bytes did not have the expected length and hash.",
        remedy="The object in the store is damaged; resync from another version.",
    )


async def _fill(store: ChunkStore, key: str, part: _Part, size: int) -> bool:
    """Append what is missing; False (with the part emptied) if the object turns out too short."""
    pieces: list[bytes] = []
    pending = 0
    if part.have < size:
        try:
            async for piece in store.stream(key, start=part.have, length=size - part.have):
                pieces.append(piece)
                pending += len(piece)
                if pending >= READ_BYTES:
                    full, pieces, pending = pieces, [], 0
                    await asyncio.to_thread(part.append, full)
        except StoreError:
            await asyncio.to_thread(part.append, pieces)
            raise
        await asyncio.to_thread(part.append, pieces)
    if part.have == size:
        return True
    await asyncio.to_thread(part.discard)
    return False


def _is_there(path: Path, size: int, sha256: str) -> bool:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


class _Part:
    """The hidden file in which a download grows: open, locked, its hash known up to `have` bytes."""

    def __init__(self, path: Path, size: int, sha256: str) -> None:
        self._want, self._size = sha256, size
        self._digest = hashlib.sha256()
        self.have = 0
        self._path = path.with_name(f".{path.name[:150]}.{sha256[:16]}.part")
        self._resumable = True
        self._fd = self._open_locked(path)
        self._guard = Guard(self._release)
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def _open_locked(self, path: Path) -> int:
        with _disk_errors(path.name):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between open and lock its former owner may have renamed it into place.
                if os.stat(self._path).st_ino == os.fstat(fd).st_ino:
                    return fd
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            self._path = path.with_name(f".{path.name[:150]}.{secrets.token_hex(8)}.part")
            self._resumable = False
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o644)

    def _take_over(self) -> None:
        with _disk_errors(self._path.name):
            if os.fstat(self._fd).st_size > self._size:
                os.ftruncate(self._fd, 0)
            while piece := os.read(self._fd, READ_BYTES):
                self._digest.update(piece)
                self.have += len(piece)

    def append(self, pieces: Sequence[bytes]) -> None:
        """Write and hash; both advance together, so that a full disk leaves a part that can go on."""
        with _disk_errors(self._path.name), self._guard.use():
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    written = os.pwrite(self._fd, view, self.have)
                    self._digest.update(view[:written])
                    self.have += written
                    view = view[written:]

    def finish(self, path: Path) -> bool:
        """Move the file into place if its hash is right; else remove it and return False."""
        if self._digest.hexdigest() != self._want:
            self.discard()
            return False
        with _disk_errors(path.name), self._guard.use():
            os.fsync(self._fd)
            os.rename(self._path, path)
        self._resumable = True  # its hidden name is gone
        return True

    def discard(self) -> None:
        """Remove the hidden file."""
        with suppress(OSError):
            os.unlink(self._path)

    def close(self) -> None:
        """Release the lock. A part nobody could find again is removed."""
        self._guard.close()

    def _release(self) -> None:
        if not self._resumable:
            self.discard()
        os.close(self._fd)


@contextmanager
def _disk_errors(name: str) -> Iterator[None]:
    """Errors of the local disk, which are not the store's."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"no space left for {name}.", remedy="Free space in the daemon's data_dir.") from e
        raise StoreError(f"cannot write {name}: {e.strerror}.", remedy="Check the daemon's data_dir.") from e
