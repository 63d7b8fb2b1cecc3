"""Trainer memory as named files in /dev/shm, mapped without a copy by the trainer and by the daemon's worker.

One invariant: a mapping handed out as a tensor stays valid as long as the tensor lives. `close` and `unlink` only drop
the name and this object's own references; the kernel frees the pages when the last tensor over them is gone.

The process that allocated a file holds an exclusive `flock` on it for its whole life. So a file whose lock can be
taken belongs to nobody any more, and `remove_stale` may delete it, whatever way its owner died.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import warnings
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from engine.errors import DteError

SHM_DIR: Final = Path("/dev/shm")
PREFIX: Final = "dte-"
ALIGN_BYTES: Final = 64
"""Arrays in a shared file start at multiples of this (a cache line; enough for any vector load)."""

_NAME = re.compile(r"^dte-[A-Za-z0-9._-]{1,200}$")
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

DTYPES: Final[dict[str, torch.dtype]] = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
"""The dtypes that may be named in a memory reference."""


class SharedMemoryError(DteError):
    """A shared memory file could not be created, opened or used."""

    code = "shared-memory"


class SharedMemoryFull(SharedMemoryError):
    """/dev/shm has no room for the file. Nothing of it is left behind."""

    code = "shared-memory-full"


class SharedMemoryInvalid(SharedMemoryError):
    """A name, file or reference that must not be used: foreign, missing, too small, misaligned, or not a plain file."""

    code = "shared-memory-invalid"


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the next multiple of `ALIGN_BYTES`."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def check_name(name: str) -> str:
    """Return `name` if it may name a shared memory file of ours, else raise SharedMemoryInvalid."""
    if not _NAME.match(name):
        raise SharedMemoryInvalid(
            f"not a valid shared memory name: {name[:80]!r}.",
            remedy="Names are 'dte-' and up to 200 letters, digits, '.', '_' or '-'.",
        )
    return name


class ShmFile:
    """One open shared memory file. Made by `allocate` (the owner) or `open_existing` (a reader).

    Use as a context manager or call `close`. The owner also calls `unlink`, which frees the name at once.
    """

    def __init__(self, name: str, fd: int, size_bytes: int, *, owner: bool, writable: bool) -> None:
        """Take over `fd`. Use the module's functions instead of calling this."""
        self.name = name
        self.size_bytes = size_bytes
        self.owner = owner
        self.writable = writable
        self._fd: int | None = fd
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map: mmap.mmap | None = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, prot)
        self._inode = os.fstat(fd).st_ino

    def buffer(self) -> mmap.mmap:
        """The mapping itself, `size_bytes` long. SharedMemoryError after `close`."""
        if self._map is None:
            raise SharedMemoryError(f"shared memory file {self.name} is closed.")
        return self._map

    def tensor(self, offset_bytes: int, numel: int, dtype: str | torch.dtype) -> torch.Tensor:
        """A 1-D tensor of `numel` elements over the mapping, without a copy.

        `dtype` is a torch dtype or one of `DTYPES`. The tensor keeps the mapping alive. On a file that is not
        `writable` the pages are mapped read-only: writing to the tensor kills the process instead of corrupting the
        trainer. Raises SharedMemoryInvalid if the reference is misaligned or reaches beyond the file.
        """
        kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if kind is None:
            raise SharedMemoryInvalid(f"unknown dtype {dtype!r} for {self.name}.")
        item = kind.itemsize
        if numel < 0 or offset_bytes < 0 or offset_bytes % item:
            raise SharedMemoryInvalid(
                f"reference to {self.name} at byte {offset_bytes} with {numel} elements is negative or not aligned to "
                f"its {item}-byte elements."
            )
        end = offset_bytes + numel * item
        if end > self.size_bytes:
            raise SharedMemoryInvalid(
                f"reference to {self.name} ends at byte {end}, beyond its {self.size_bytes} bytes.",
                remedy="Register again; the trainer's memory has moved.",
            )
        if numel == 0:
            return torch.empty(0, dtype=kind)
        with warnings.catch_warnings():
            # Torch warns that a read-only buffer makes a tensor that must not be written; that is the intention here.
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(self.buffer(), dtype=kind, count=numel, offset=offset_bytes)

    def owner_alive(self) -> bool:
        """Whether the process that allocated the file still holds its lock. False for a name left by a dead one."""
        if self.owner:
            return True
        if self._fd is None:
            raise SharedMemoryError(f"shared memory file {self.name} is closed.")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def unlink(self) -> None:
        """Remove the name if it still names this very file. Existing mappings stay valid. Idempotent."""
        path = SHM_DIR / self.name
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_ino == self._inode:
                path.unlink()

    def close(self) -> None:
        """Drop this object's descriptor and mapping; tensors over it stay valid. The name stays. Idempotent."""
        # mmap.close() would pull the pages from under live tensors: only the reference is dropped.
        self._map = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def allocate(name: str, size_bytes: int) -> ShmFile:
    """Create the file `name` of `size_bytes` zero bytes, all of them really reserved, and hold its owner lock.

    Raises SharedMemoryFull when there is no room (nothing is left behind), SharedMemoryInvalid for a bad name, a size
    below 1, or a name that a living process uses. A file left by a dead owner under the same name is replaced.
    """
    check_name(name)
    if size_bytes < 1:
        raise SharedMemoryInvalid(f"shared memory file {name} needs at least 1 byte, not {size_bytes}.")
    fd = _create_locked(name)
    try:
        _reserve(name, fd, size_bytes)
        return ShmFile(name, fd, size_bytes, owner=True, writable=True)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            (SHM_DIR / name).unlink()
        os.close(fd)
        raise


def open_existing(name: str, *, writable: bool = False) -> ShmFile:
    """Open a file some process of the same user allocated. Read-only unless `writable`.

    Raises SharedMemoryInvalid unless it is a regular, non-empty file of our own user, reached through no link.
    """
    check_name(name)
    try:
        fd = os.open(SHM_DIR / name, (os.O_RDWR if writable else os.O_RDONLY) | _OPEN_FLAGS)
    except FileNotFoundError:
        raise SharedMemoryInvalid(
            f"no shared memory file {name}.",
            remedy="The trainer has ended, or trainer and daemon do not share one /dev/shm (in containers: ipc: host).",
        ) from None
    except OSError as e:
        raise SharedMemoryInvalid(
            f"shared memory file {name} cannot be opened: {os.strerror(e.errno or 0)}.",
            remedy="It must be a plain file that belongs to the daemon's own user.",
        ) from None
    try:
        size_bytes = _check_plain(name, fd)
        return ShmFile(name, fd, size_bytes, owner=False, writable=writable)
    except BaseException:
        os.close(fd)
        raise


def remove_stale(prefix: str = PREFIX) -> list[str]:
    """Delete our user's files whose name starts with `prefix` and whose owner is dead. Returns the names deleted."""
    removed = []
    for name in sorted(os.listdir(SHM_DIR)) if SHM_DIR.is_dir() else []:
        if name.startswith(prefix) and _NAME.match(name) and _remove_if_stale(name):
            removed.append(name)
    return removed


def _create_locked(name: str) -> int:
    """A new empty file under `name`, its exclusive lock held."""
    for _ in range(100):
        try:
            fd = os.open(SHM_DIR / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600)
        except FileExistsError:
            if _remove_if_stale(name):
                continue
            raise SharedMemoryInvalid(
                f"shared memory file {name} is in use by a living process.",
                remedy="Give every launch and rank its own name, and register a model only once per process.",
            ) from None
        except OSError as e:
            raise SharedMemoryError(f"shared memory file {name} cannot be created: {e.strerror}.") from None
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Between create and lock a cleaner may have taken the file for a stale one; then it has no name any more.
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)
    raise SharedMemoryError(f"shared memory file {name} keeps being removed while it is created.")


def _reserve(name: str, fd: int, size_bytes: int) -> None:
    """Reserve every page now: a sparse file would kill the process with SIGBUS in the middle of a training step."""
    room = os.statvfs(SHM_DIR)
    free_bytes = room.f_bavail * room.f_frsize
    full = SharedMemoryFull(
        f"/dev/shm has {free_bytes} bytes free, {name} needs {size_bytes}.",
        remedy="Make it larger (docker run --shm-size=…, ipc: host, or mount -o remount,size=… /dev/shm) or free it.",
    )
    if size_bytes > free_bytes:
        raise full
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise full from None
        raise SharedMemoryError(f"shared memory file {name} cannot be reserved: {e.strerror}.") from None


def _check_plain(name: str, fd: int) -> int:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_size < 1:
        raise SharedMemoryInvalid(
            f"shared memory file {name} is empty, not a plain file, or belongs to another user.",
            remedy="Run the daemon as the trainer's user.",
        )
    return info.st_size


def _remove_if_stale(name: str) -> bool:
    """Delete `name` if its owner is gone. True if the name is free now because of us or of somebody else."""
    path = SHM_DIR / name
    try:
        fd = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.lstat().st_ino == info.st_ino:
            path.unlink()
        return True
    except FileNotFoundError:
        return True
    except OSError:  # locked: the owner lives
        return False
    finally:
        os.close(fd)
