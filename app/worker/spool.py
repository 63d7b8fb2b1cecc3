"""Files of one rank's spool: where they are and how they are written so that a crash leaves old or new, never a mix.

<spool_dir>/<run>/<launch>/<rank>/
    rank.json            the daemon's: the registration with the newest handles
    jobs.json            the daemon's: the epoch and the newest jobs
    ledger.dtl           the worker's: engine.ledger
    lanes-<version>.bin  raw lanes of the dense tiles of the version in flight, in slice and tile order
    chunks-<version>/    its encoded chunks
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from app.worker.protocol import SpoolFull

MAKE_ATTEMPTS = 100
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def full_as_error(what: str) -> Iterator[None]:
    """Turn "no space left" into SpoolFull; other OSErrors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise SpoolFull(
                f"no space left in the spool while writing {what}.",
                remedy="Free space under the daemon's data_dir; the next version carries what was missed dense.",
            ) from None
        raise


def sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dir(path: Path) -> None:
    """Make the directory and its parents. Ranks of one launch come and go at once: a parent that another rank removed
    as empty in between (`RankSpool.remove`) is made again; once `path` stands, its parents stay."""
    for _ in range(MAKE_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            return
    path.mkdir(parents=True, exist_ok=True, mode=0o700)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, durably: a reader sees the old bytes or the new ones. SpoolFull if there is no room."""
    part = path.with_name(path.name + ".part")
    try:
        with full_as_error(path.name):
            # Somebody may have deleted the directory under a running daemon, which then goes on from its memory.
            make_dir(path.parent)
            with part.open("wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, path)
    sync_dir(path.parent)


class RankSpool:
    """Paths of one rank."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, spool_dir: Path, run: str, launch: str, rank: int) -> RankSpool:
        return cls(spool_dir / run / launch / str(rank))

    @classmethod
    def of_root(cls, root: str) -> RankSpool:
        return cls(Path(root))

    def create(self) -> None:
        """Make the directory, for this user only."""
        with full_as_error("a new spool"):
            make_dir(self.root)

    @property
    def rank_file(self) -> Path:
        return self.root / "rank.json"

    @property
    def jobs_file(self) -> Path:
        return self.root / "jobs.json"

    @property
    def ledger_file(self) -> Path:
        return self.root / "ledger.dtl"

    def lanes_file(self, version: int) -> Path:
        return self.root / f"lanes-{version}.bin"

    def chunk_dir(self, version: int) -> Path:
        return self.root / f"chunks-{version}"

    def drop_version(self, version: int) -> None:
        """Delete what a decided version left. Idempotent."""
        self.lanes_file(version).unlink(missing_ok=True)
        shutil.rmtree(self.chunk_dir(version), ignore_errors=True)

    def drop_others(self, version: int | None) -> None:
        """Delete the leftovers of every version but `version`: of reads that died before their ledger was written."""
        for path in self.root.glob("lanes-*.bin"):
            if version is None or path != self.lanes_file(version):
                path.unlink(missing_ok=True)
        for path in self.root.glob("chunks-*"):
            if version is None or path != self.chunk_dir(version):
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Delete the rank's spool, and the directories above that it leaves empty."""
        shutil.rmtree(self.root, ignore_errors=True)
        for parent in (self.root.parent, self.root.parent.parent):
            with contextlib.suppress(OSError):
                parent.rmdir()
