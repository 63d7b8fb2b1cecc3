"""A real daemon in a process of its own: `python -m tests.support.daemon_process '{settings}'` prints its URL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class Daemon:
    """The parent's end."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._log = (folder / "daemon.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.daemon_process", json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, (folder / "daemon.log").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def main() -> None:
    from app.main import serve
    from app.settings import Settings

    serve(Settings(**json.loads(sys.argv[1])), ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    main()
