"""A real daemon in a process of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.support.nursery import ForkedWorker, nursery
from tests.support.processes import Channel, Child


def serve(channel: Channel, *, workers: str = "", **settings: Any) -> None:
    """`dte serve` with these settings, in the process; says its address. `workers`: the nursery that they come from;
    else they are started as they are in earnest, which takes seconds."""
    from app.main import serve as run
    from app.settings import Settings
    from app.worker.launching import start_process

    launch = partial(ForkedWorker.launch, workers) if workers else start_process
    run(Settings(**settings), ready=lambda url: channel.send({"url": url}), launch_worker=launch)


class Daemon:
    """The parent's end of a daemon with these settings; what it prints is in `folder/daemon.log`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._child = Child("daemon", "tests.support.daemon_process:serve", folder, workers=nursery(), **settings)
        self.url: str = self._child.started()["url"]

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._child.kill()

    def end(self) -> None:
        self._child.end()
