"""The file of raw lanes of dense tiles: written while the trainer is held, read when chunks are encoded.

One invariant: `finish` returns only after every lane is durable, and `abandon` leaves no file.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from app.worker.protocol import SpoolLost
from app.worker.spool import full_as_error, sync_dir
from engine.detect.base import U16

_QUEUED = 4


class LanesWriter:
    """Writes arrays in the order given, in a thread of its own, at most `_QUEUED` arrays behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.Queue[U16 | None] = queue.Queue(maxsize=_QUEUED)
        self._error: BaseException | None = None
        self.lanes = 0
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    def put(self, lanes: U16) -> None:
        """Append lanes (the array must not change afterwards). Raises what an earlier write failed with."""
        if self._error is not None:
            raise self._error
        self.lanes += int(lanes.size)
        self._queue.put(lanes)

    def finish(self) -> None:
        """Wait until all is on disk; SpoolFull if it does not fit."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        sync_dir(self._path.parent)

    def abandon(self) -> None:
        """Stop and delete the file. Idempotent, also after `finish`."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        done = False
        try:
            with full_as_error(self._path.name), self._path.open("wb") as f:
                while (lanes := self._queue.get()) is not None:
                    f.write(np.ascontiguousarray(lanes).data)
                done = True
                f.flush()
                os.fsync(f.fileno())
        except BaseException as error:
            self._error = error
            while not done:
                done = self._queue.get() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc_type is not None:
            self.abandon()


class LanesReader:
    """Reads the lanes back, front to back. SpoolLost if they are not there."""

    def __init__(self, path: Path, expected_lanes: int) -> None:
        self._file = None
        if expected_lanes == 0:
            return
        try:
            self._file = path.open("rb")
        except FileNotFoundError:
            raise SpoolLost(f"{path.name} is missing from the spool.") from None
        size = os.fstat(self._file.fileno()).st_size
        if size != 2 * expected_lanes:
            self._file.close()
            raise SpoolLost(f"{path.name} has {size} bytes instead of {2 * expected_lanes}.")

    def take(self, lanes: int) -> U16:
        """The next `lanes` lanes."""
        if lanes == 0:
            return np.empty(0, np.uint16)
        if self._file is None:
            raise SpoolLost("lanes were asked for beyond the end of the spool.")
        return np.fromfile(self._file, dtype="<u2", count=lanes)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
