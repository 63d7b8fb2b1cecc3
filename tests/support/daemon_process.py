"""A real daemon in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.processes import Channel, Child


def serve(channel: Channel, **settings: Any) -> None:
    """`dte serve` with these settings, in the process; says its address."""
    from app.main import serve as run
    from app.settings import Settings

    run(Settings(**settings), ready=lambda url: channel.send({"url": url}))


class Daemon:
    """The parent's end of a daemon with these settings; what it prints is in `folder/daemon.log`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._child = Child("daemon", "tests.support.daemon_process:serve", folder, **settings)
        self.url: str = self._child.started()["url"]

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._child.kill()

    def end(self) -> None:
        self._child.end()
