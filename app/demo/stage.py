"""The stage of one demo: a working folder, a trainer daemon, a rollout daemon, and room for what generates rollouts.

Invariant: leaving the context ends every process, and removes the working folder unless it is to be kept.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from app.demo.processes import Children, free_port

START_TIMEOUT_S = 120.0
_TRAINER_ROLES = "store,coordinator,publisher"
_ROOT = Path(__file__).resolve().parent.parent.parent


class Stage:
    """Starts everything but the trainer, which is the demo's own process.

    `children` and `stack` end and close what others start and open on it.
    """

    def __init__(self, run: str, *, keep: bool, p2p: bool = False) -> None:
        self.run = run
        self._p2p = p2p
        self.workdir = Path(tempfile.mkdtemp(prefix="dte-demo-"))
        self._keep = keep
        self.stack = ExitStack()
        self.children = Children(self.workdir)
        trainer, rollout = free_port(), free_port()
        self.trainer_url = f"http://127.0.0.1:{trainer}"
        self.rollout_url = f"http://127.0.0.1:{rollout}"
        self._ports = {"trainer": trainer, "rollout": rollout}

    @property
    def store_dir(self) -> Path:
        """The trainer daemon's store, as a directory."""
        return self.workdir / "trainer" / "store"

    def start_daemons(self) -> None:
        """Start both daemons and wait until they answer."""
        self._serve("trainer", _TRAINER_ROLES, None, guarded=True)
        self._wait_up("trainer")
        self._serve("rollout", "subscriber", f"{self.trainer_url}/store", guarded=True)
        self._wait_up("rollout")

    def start_trainer_daemon(self) -> int:
        """Start only the trainer's daemon, wait until it answers, and return its process id."""
        pid = self._serve("trainer", _TRAINER_ROLES, None, guarded=False)
        self._wait_up("trainer")
        return pid

    def check(self) -> None:
        """ChildFailed if a process has ended."""
        self.children.check()

    def _serve(self, name: str, roles: str, store: str | None, *, guarded: bool) -> int:
        command = [sys.executable, "-m", "app.cli", "serve", "--host", "127.0.0.1", "--port", str(self._ports[name])]
        command += ["--roles", roles, "--data-dir", str(self.workdir / name), "--run", self.run]
        if store is not None:
            command += ["--store", store]
        env = environment()
        if self._p2p:
            env["DTE_P2P"] = "true"
            if name != "trainer":
                env["DTE_P2P_COORDINATOR"] = self.trainer_url
        return self.children.start(f"{name}-daemon", command, env, guarded=guarded).process.pid

    def _wait_up(self, name: str) -> None:
        url = f"http://127.0.0.1:{self._ports[name]}/healthz"

        def answers() -> bool:
            try:
                return httpx.get(url, timeout=1.0, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        self.children.wait_until(f"the {name} daemon", answers, START_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self.stack.close()
        finally:
            self.children.close()
            if not self._keep:
                shutil.rmtree(self.workdir, ignore_errors=True)


def environment() -> dict[str, str]:
    """For a process of ours: this one's with our packages on the path, without DTE_* (meant for other daemons)."""
    env = {k: v for k, v in os.environ.items() if not k.upper().startswith("DTE_")}
    inherited = env.get("PYTHONPATH")
    env["PYTHONPATH"] = str(_ROOT) + (os.pathsep + inherited if inherited else "")
    env["PYTHONUNBUFFERED"] = "1"
    return env
