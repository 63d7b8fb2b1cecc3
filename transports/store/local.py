"""`LocalStore`: a directory as an object store, for one machine or a shared file system that has link(2) and flock.

Invariant: a name in the directory is a complete, fsynced object. Bytes are first written to a locked temporary file in
`.tmp` on the same file system; link(2) publishes a create (one winner, also across processes), rename(2) an overwrite.
A crash leaves at most a temporary file, which the next opening removes.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path

from engine.errors import InvalidInput
from engine.records.keys import check_key
from transports.errors import ObjectNotFound, ObjectTooLarge, StoreError
from transports.store._files import READ_BYTES, Reader, Temp, Upload, acquire
from transports.store._paths import Directories, key_conflict, os_errors, regular_size, walk
from transports.store.base import ChunkStore, ObjectInfo

TMP = ".tmp"
STALE_AFTER_S = 300.0
_LIST_BATCH = 512
_LINK_ATTEMPTS = 1000
_NO_BLOCK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Keys = list[str]


class LocalStore(ChunkStore):
    """Objects as files below `root`. The constructor touches nothing; the first use makes the root and cleans it."""

    def __init__(self, root: Path | str, *, stale_after_s: float = STALE_AFTER_S) -> None:
        self.root = Path(root).absolute()
        self._stale_after_s = stale_after_s
        self._dirs = Directories(self.root)
        self._lock = threading.Lock()
        self._prepared = False

    # --- the six verbs ----------------------------------------------------------------------------------------------

    async def put(self, key: str, data: bytes | Path) -> None:
        await asyncio.to_thread(self._put, check_key(key), data, False)

    async def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        return await asyncio.to_thread(self._put, check_key(key), data, True)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        check_key(key)

        def work() -> bytes:
            reader = self._open_reader(key)
            try:
                if reader.info.size > max_bytes:
                    raise ObjectTooLarge(
                        f"{key} has {reader.info.size} bytes; at most {max_bytes} are allowed here.",
                        remedy="Check who wrote it.",
                    )
                return reader.read_now(0, reader.info.size)
            finally:
                reader.close()

        return await asyncio.to_thread(work)

    async def stream(self, key: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        if start < 0 or (length is not None and length < 0):
            raise InvalidInput(f"not a byte range: start {start}, length {length}.")
        reader = await self.open(key)
        try:
            size = reader.info.size
            async for piece in reader.pieces(start, size if length is None else min(size, start + length)):
                yield piece
        finally:
            reader.close()

    async def head(self, key: str) -> ObjectInfo | None:
        check_key(key)

        def work() -> ObjectInfo | None:
            try:
                reader = self._open_reader(key)
            except ObjectNotFound:
                return None
            reader.close()
            return reader.info

        return await asyncio.to_thread(work)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        after = ""
        while batch := await self.page(prefix, after=after, limit=_LIST_BATCH):
            for key in batch:
                yield key
            after = batch[-1]

    async def delete(self, key: str) -> bool:
        return await asyncio.to_thread(self._delete, check_key(key))

    # --- what the embedded server needs beyond them -----------------------------------------------------------------

    async def prepare(self) -> None:
        """Make the root and remove what crashed writers left. Every verb does this on first use."""
        await asyncio.to_thread(self._prepare)

    async def open(self, key: str) -> Reader:
        """The object for reading; the caller closes it. ObjectNotFound if absent."""
        check_key(key)
        return await acquire(lambda: self._open_reader(key), Reader.close)

    def upload(self, key: str) -> Upload:
        """An upload in pieces, as an async context manager."""
        return Upload(self, check_key(key))

    async def page(self, prefix: str, *, after: str = "", limit: int = 1000) -> Keys:
        """Up to `limit` keys that start with `prefix` (empty, or ending with `/`) and are above `after`, in order."""
        if prefix:
            if not prefix.endswith("/"):
                raise InvalidInput(f"not a prefix: {prefix[:80]!r}.", remedy="A prefix ends with a slash.")
            check_key(prefix[:-1])
        segments = prefix.split("/")[:-1]

        def work() -> Keys:
            self._prepare()
            with os_errors(f"listing {prefix}"):
                return list(islice(walk(self._dirs, segments, after), limit))

        return await asyncio.to_thread(work)

    # --- synchronous work, run in threads ---------------------------------------------------------------------------

    def _put(self, key: str, data: bytes | Path, if_absent: bool) -> bool:
        temp = self.create_temp(key)
        try:
            if isinstance(data, Path):
                self._copy(data, temp)
            else:
                temp.write([data])
            return self.publish(temp, key, if_absent)
        finally:
            temp.discard()

    @staticmethod
    def _copy(source: Path, temp: Temp) -> None:
        try:
            file = source.open("rb")
        except OSError as e:
            raise InvalidInput(f"cannot read the file to store, {source.name}: {e.strerror}.") from e
        with file:
            while piece := file.read(READ_BYTES):
                temp.write([piece])

    def create_temp(self, key: str) -> Temp:
        self._prepare()
        with os_errors(f"writing {key}"):
            directory = self._dirs.make([TMP])
            try:
                name = f"{os.getpid()}-{secrets.token_hex(12)}"
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_BLOCK, 0o644, dir_fd=directory)
            except BaseException:
                os.close(directory)
                raise
            temp = Temp(directory, name, fd, key)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                temp.discard()
                raise
            return temp

    def publish(self, temp: Temp, key: str, if_absent: bool) -> bool:
        *parents, name = key.split("/")
        with os_errors(f"writing {key}"), temp.guard.use():
            os.fsync(temp.fd)
            for _ in range(_LINK_ATTEMPTS):
                directory = self._dirs.make(parents)
                try:
                    if if_absent:
                        os.link(temp.name, name, src_dir_fd=temp.directory, dst_dir_fd=directory, follow_symlinks=False)
                    else:
                        os.rename(temp.name, name, src_dir_fd=temp.directory, dst_dir_fd=directory)
                    os.fsync(directory)
                    return True
                except FileExistsError:
                    try:
                        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # deleted since: once more
                    if not stat.S_ISREG(st.st_mode):
                        raise key_conflict(f"writing {key}") from None
                    # Whoever lost may act on the winner's object at once, so it must be durable for the loser too.
                    os.fsync(directory)
                    return False
                except FileNotFoundError:
                    # The directory was pruned between opening and linking: once more. A temporary file that
                    # somebody removed would never come back, though: then this raises.
                    os.stat(temp.name, dir_fd=temp.directory, follow_symlinks=False)
                finally:
                    os.close(directory)
        raise StoreError(f"writing {key}: its directory vanishes as fast as it is made.", remedy="Try again.")

    def _open_reader(self, key: str) -> Reader:
        self._prepare()
        *parents, name = key.split("/")
        with os_errors(f"reading {key}"):
            fd = self._open_file(parents, name)
            if fd is not None:
                st = regular_size(fd)
                if st is not None:
                    return Reader(key, fd, st)
                os.close(fd)
        raise ObjectNotFound(f"no object has the key {key}.", remedy="It may have been pruned; resolve again.")

    def _open_file(self, parents: Sequence[str], name: str) -> int | None:
        """None where there is no such file; a symlink or a file in place of a directory counts as none."""
        try:
            directory = self._dirs.open(parents)
            if directory is None:
                return None
            try:
                return os.open(name, os.O_RDONLY | _NO_BLOCK, dir_fd=directory)
            finally:
                os.close(directory)
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                return None
            raise

    def _delete(self, key: str) -> bool:
        self._prepare()
        *parents, name = key.split("/")
        with os_errors(f"deleting {key}"):
            try:
                directory = self._dirs.open(parents)
            except OSError as e:
                if e.errno in (errno.ENOTDIR, errno.ELOOP):
                    return False
                raise
            if directory is None:
                return False
            try:
                if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                    return False
                os.unlink(name, dir_fd=directory)
                os.fsync(directory)
            except FileNotFoundError:
                return False
            finally:
                os.close(directory)
            self._dirs.prune(parents)
        return True

    def _prepare(self) -> None:
        if self._prepared:
            return
        with self._lock, os_errors("opening the store"):
            if self._prepared:
                return
            self.root.mkdir(parents=True, exist_ok=True)
            directory = self._dirs.make([TMP])
            try:
                for name in os.listdir(directory):
                    self._remove_if_stale(directory, name)
            finally:
                os.close(directory)
            self._prepared = True

    def _remove_if_stale(self, directory: int, name: str) -> None:
        """Remove a temporary file whose writer is gone: it is not locked, and older than any file just created."""
        try:
            fd = os.open(name, os.O_RDONLY | _NO_BLOCK, dir_fd=directory)
        except OSError:
            return
        try:
            st = regular_size(fd)
            if st is None or time.time() - st.st_mtime < self._stale_after_s:
                return
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=directory)
        except OSError:
            return  # locked: its writer lives
        finally:
            os.close(fd)
