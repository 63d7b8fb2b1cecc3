"""Walking a store's directories by descriptor, so that no name is ever resolved through a symlink or out of the root.

Invariant: every operation names one segment below an open directory; nothing here follows a symlink.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from transports.errors import KeyConflict, StoreError, StoreForbidden, StoreFull

_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REMEMBERED_DIRS = 4096
_MAKE_ATTEMPTS = 1000


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Turn OSError into the store's error tree. `what` names the operation and key, never a local path."""
    try:
        yield
    except OSError as e:
        reason = e.strerror or str(e)
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"{what}: {reason}.", remedy="Free space on the store's disk or raise its quota.") from e
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreForbidden(f"{what}: {reason}.", remedy="Check who owns the store directory.") from e
        if e.errno in (errno.EISDIR, errno.ENOTDIR, errno.ELOOP):
            raise key_conflict(what) from e
        raise StoreError(f"{what}: {reason}.", remedy="Check the store's disk.") from e


def key_conflict(what: str) -> KeyConflict:
    return KeyConflict(
        f"{what}: a directory, a symlink or an object stands where the other kind is needed.",
        remedy="Use a key that is no prefix of another one, and put nothing but objects into the store directory.",
    )


class Directories:
    """Opens, makes and prunes the directories below one root. Safe across threads and processes.

    A directory counts as durable once its parent was fsynced after it was seen; that is remembered by inode, so that
    the common put costs one directory fsync, not one a level.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._durable: OrderedDict[tuple[str, int], None] = OrderedDict()

    def open_root(self) -> int:
        """A descriptor of the root, which may itself be a symlink the operator made."""
        return os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open(self, segments: Sequence[str]) -> int | None:
        """A descriptor of an existing directory, or None. NotADirectoryError/ELOOP if something else is there."""
        fd = self.open_root()
        try:
            for segment in segments:
                child = os.open(segment, _DIR_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = child
            return os.dup(fd)
        except FileNotFoundError:
            return None
        finally:
            os.close(fd)

    def make(self, segments: Sequence[str]) -> int:
        """A descriptor of the directory, made with its parents where missing, and durable on return.

        A concurrent prune may remove a directory under us; then the walk starts over.
        """
        for _ in range(_MAKE_ATTEMPTS):
            try:
                return self._make_once(segments)
            except FileNotFoundError:
                continue
        raise StoreError("directories of the store vanish as fast as they are made.", remedy="Try again.")

    def _make_once(self, segments: Sequence[str]) -> int:
        fd = self.open_root()
        try:
            path = ""
            for segment in segments:
                path = f"{path}/{segment}"
                try:
                    child = os.open(segment, _DIR_FLAGS, dir_fd=fd)
                except FileNotFoundError:
                    with suppress(FileExistsError):
                        os.mkdir(segment, 0o755, dir_fd=fd)
                    child = os.open(segment, _DIR_FLAGS, dir_fd=fd)
                try:
                    self._make_durable(fd, path, os.fstat(child).st_ino)
                except BaseException:
                    os.close(child)
                    raise
                os.close(fd)
                fd = child
            return os.dup(fd)
        finally:
            os.close(fd)

    def _make_durable(self, parent: int, path: str, inode: int) -> None:
        with self._lock:
            if (path, inode) in self._durable:
                self._durable.move_to_end((path, inode))
                return
        os.fsync(parent)
        with self._lock:
            self._durable[path, inode] = None
            while len(self._durable) > _REMEMBERED_DIRS:
                self._durable.popitem(last=False)

    def prune(self, segments: Sequence[str]) -> None:
        """Remove the directory and its parents as far as they are empty. rmdir refuses anything else, so a create that
        runs at the same time either keeps the directory or starts over."""
        for depth in range(len(segments), 0, -1):
            parent = self.open(segments[: depth - 1])
            if parent is None:
                continue
            try:
                os.rmdir(segments[depth - 1], dir_fd=parent)
            except FileNotFoundError:
                pass  # somebody else pruned it
            except OSError:
                return
            finally:
                os.close(parent)
            gone = "/" + "/".join(segments[:depth])
            with self._lock:
                for known in [k for k in self._durable if k[0] == gone]:
                    del self._durable[known]


def regular_size(fd: int) -> os.stat_result | None:
    """The stat of an open descriptor if it is a regular file, else None."""
    st = os.fstat(fd)
    return st if stat.S_ISREG(st.st_mode) else None


def walk(directories: Directories, base: list[str], after: str) -> Iterator[str]:
    """Keys below the directory `base`, in lexicographic order of the whole key, those above `after` only.

    Holds one directory's names per level, never all keys. A directory sorts as its name plus `/`, which makes the
    depth-first order equal that of the keys. Hidden names, symlinks and special files are not objects.
    """
    prefix = "".join(f"{s}/" for s in base)
    try:
        fd = directories.open(base)
    except (NotADirectoryError, OSError) as e:
        if isinstance(e, NotADirectoryError) or e.errno == errno.ELOOP:
            return
        raise
    if fd is None:
        return
    try:
        with os.scandir(fd) as entries:
            names = sorted(
                entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
                for entry in entries
                if not entry.name.startswith(".")
                and (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))
            )
    finally:
        os.close(fd)
    for name in names:
        key = prefix + name
        if name.endswith("/"):
            if key > after or after.startswith(key):
                yield from walk(directories, [*base, name[:-1]], after)
        elif key > after:
            yield key
