"""The registered receivers in a file, so that a restarted daemon adopts them again, with a higher fence.

One invariant: the file is replaced whole and durably, or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from app.degraded import Degraded
from clients.protocol import ReceiverRegistration
from engine.errors import InvalidInput

log = logging.getLogger(__name__)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fence: int
    receivers: list[ReceiverRegistration]


@dataclass
class Registry:
    """The file at `path`. Blocking: call it from a thread."""

    path: Path
    degraded: Degraded
    fence: int = 0

    def load(self) -> list[ReceiverRegistration]:
        """What the last process had registered; sets `fence` above every earlier one and writes it."""
        receivers: list[ReceiverRegistration] = []
        last = 0
        try:
            known = _File.model_validate_json(self.path.read_bytes())
            receivers, last = known.receivers, known.fence
        except FileNotFoundError:
            pass
        except (OSError, ValidationError) as error:
            aside = self.path.with_suffix(".damaged")
            self.degraded.count("receivers-file-damaged", detail=f"moved to {aside}: {error}")
            if self.path.exists():
                self.path.replace(aside)
        # The clock orders daemons that do not share this file; the file keeps a clock that was set back from harm.
        self.fence = max(last + 1, time.time_ns() // 1_000_000)
        self.save(receivers)
        return receivers

    def next_fence(self) -> int:
        """A fence above every one given out so far; written with the next `save`."""
        self.fence = max(self.fence + 1, time.time_ns() // 1_000_000)
        return self.fence

    def save(self, receivers: Iterable[ReceiverRegistration]) -> None:
        """Replace the file."""
        body = {"fence": self.fence, "receivers": [r.model_dump(mode="json") for r in receivers]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump(body, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def check_registration(registration: ReceiverRegistration) -> None:
    """InvalidInput unless this daemon can drive such a receiver."""
    if registration.kind != "torch":
        raise InvalidInput(f"this daemon drives receivers of kind 'torch', not {registration.kind!r}.")
    if not 1 <= len(registration.sockets) <= 1024:
        raise InvalidInput("a receiver has between 1 and 1024 sockets, one per rank.")
    for path in registration.sockets:
        if not path.startswith("/") or "\0" in path or len(path) > 107:
            raise InvalidInput(f"not an absolute socket path: {path[:80]!r}.")
