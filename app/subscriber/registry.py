"""The registered receivers in a file, so that a restarted daemon adopts them again, with a higher fence.

One invariant: the file is replaced whole and durably, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import aiofiles
import aiofiles.os
from pydantic import BaseModel, ConfigDict, ValidationError

from app.degraded import Degraded
from clients.protocol import ReceiverRegistration

log = logging.getLogger(__name__)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fence: int
    receivers: list[ReceiverRegistration]


@dataclass
class Registry:
    """The file at `path`."""

    path: Path
    degraded: Degraded
    fence: int = 0

    async def load(self) -> list[ReceiverRegistration]:
        """What the last process had registered; sets `fence` above every earlier one and writes it."""
        receivers: list[ReceiverRegistration] = []
        last = 0
        try:
            async with aiofiles.open(self.path, "rb") as file:
                known = _File.model_validate_json(await file.read())
            receivers, last = known.receivers, known.fence
        except FileNotFoundError:
            pass
        except (OSError, ValidationError) as error:
            aside = self.path.with_suffix(".damaged")
            self.degraded.count("receivers-file-damaged", detail=f"moved to {aside}: {error}")
            with contextlib.suppress(FileNotFoundError):
                await aiofiles.os.replace(self.path, aside)
        # The clock orders daemons that do not share this file; the file keeps a clock that was set back from harm.
        self.fence = max(last + 1, time.time_ns() // 1_000_000)
        await self.save(receivers)
        return receivers

    def next_fence(self) -> int:
        """A fence above every one given out so far; written with the next `save`."""
        self.fence = max(self.fence + 1, time.time_ns() // 1_000_000)
        return self.fence

    async def save(self, receivers: Iterable[ReceiverRegistration]) -> None:
        """Replace the file."""
        body = {"fence": self.fence, "receivers": [r.model_dump(mode="json") for r in receivers]}
        await aiofiles.os.makedirs(self.path.parent, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        async with aiofiles.open(temporary, "w") as file:
            await file.write(json.dumps(body, indent=1))
            await file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        await aiofiles.os.replace(temporary, self.path)
        await asyncio.to_thread(_sync_directory, self.path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
