"""The processes of one demo: a trainer daemon, a rollout daemon, receivers, and lines to them.

Invariant: leaving the context ends every process, and removes the working folder unless it is to be kept.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from app.demo.grpo import GenerateRequest
from app.demo.link import Link, ReceiverFailed
from app.demo.processes import Children, free_port

START_TIMEOUT_S = 120.0
_ROOT = Path(__file__).resolve().parent.parent.parent


class Stage:
    """Starts everything but the trainer, which is the demo's own process."""

    def __init__(self, run: str, receivers: int, *, keep: bool) -> None:
        self.run = run
        self.names = [f"rollout-{n}" for n in range(receivers)]
        self.workdir = Path(tempfile.mkdtemp(prefix="dte-demo-"))
        self._keep = keep
        self._stack = ExitStack()
        self._links: list[Link] = []
        self._children = Children(self.workdir)
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
        self.start_trainer_daemon()
        self._serve("rollout", "subscriber", f"{self.trainer_url}/store")
        self._wait_up("rollout")

    def start_trainer_daemon(self) -> int:
        """Start the trainer's daemon, wait until it answers, and return its process id."""
        pid = self._serve("trainer", "store,coordinator,publisher", None)
        self._wait_up("trainer")
        return pid

    def start_receivers(self, config_json: str) -> None:
        """Start the receiver processes; `connect` waits for them."""
        config = self.workdir / "config.json"
        config.write_text(config_json)
        threads = max(1, (os.cpu_count() or 1) // len(self.names))
        for name in self.names:
            command = [sys.executable, "-m", "app.demo.receiver", "--name", name, "--run", self.run]
            command += ["--daemon", self.rollout_url, "--config", str(config), "--threads", str(threads)]
            command += ["--link", str(self._socket(name, "link")), "--socket", str(self._socket(name, "dte"))]
            self._children.start(name, command, _environment())

    def connect(self) -> None:
        """Wait until every receiver process answers."""
        for name in self.names:
            path = self._socket(name, "link")
            self._children.wait_until(f"the receiver process {name}", path.exists, START_TIMEOUT_S)
            link = Link(name, path)
            self._stack.callback(link.close)
            link.call("ping")
            self._links.append(link)

    def generate(self, request: GenerateRequest, version: int) -> list[list[int]]:
        """Completions from the receivers, each doing its share. ReceiverFailed if one is not at `version`."""
        self._children.check()
        share = -(-len(request.prompts) // len(self._links))
        shares = [request.prompts[i : i + share] for i in range(0, len(request.prompts), share)]

        def ask(number: int) -> dict[str, Any]:
            return self._links[number].call(
                "generate",
                prompts=shares[number],
                max_new_tokens=request.max_new_tokens,
                seed=request.seed * 31 + number,
            )

        with ThreadPoolExecutor(len(shares)) as pool:
            answers = list(pool.map(ask, range(len(shares))))
        for name, answer in zip(self.names, answers, strict=False):
            if answer["version"] != version:
                raise ReceiverFailed(f"{name} generated from version {answer['version']}, not from {version}.")
        return [[int(t) for t in tokens] for answer in answers for tokens in answer["completions"]]

    def dump(self) -> dict[str, Path]:
        """Have every receiver write its live weights to a safetensors file; paths by receiver."""
        files = {name: self.workdir / f"{name}.safetensors" for name in self.names}
        for link in self._links:
            link.call("dump", path=str(files[link.name]))
        return files

    def check(self) -> None:
        """ChildFailed if a process has ended."""
        self._children.check()

    def _serve(self, name: str, roles: str, store: str | None) -> int:
        command = [sys.executable, "-m", "app.cli", "serve", "--host", "127.0.0.1", "--port", str(self._ports[name])]
        command += ["--roles", roles, "--data-dir", str(self.workdir / name), "--run", self.run]
        if store is not None:
            command += ["--store", store]
        return self._children.start(f"{name}-daemon", command, _environment()).process.pid

    def _wait_up(self, name: str) -> None:
        url = f"http://127.0.0.1:{self._ports[name]}/healthz"

        def answers() -> bool:
            try:
                return httpx.get(url, timeout=1.0, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        self._children.wait_until(f"the {name} daemon", answers, START_TIMEOUT_S)

    def _socket(self, name: str, kind: str) -> Path:
        return self.workdir / f"{name}.{kind}.sock"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self._stack.close()
        finally:
            self._children.close()
            if not self._keep:
                shutil.rmtree(self.workdir, ignore_errors=True)


def _environment() -> dict[str, str]:
    """This process's environment with our packages on the path, without DTE_* variables (meant for other daemons)."""
    env = {k: v for k, v in os.environ.items() if not k.upper().startswith("DTE_")}
    inherited = env.get("PYTHONPATH")
    env["PYTHONPATH"] = str(_ROOT) + (os.pathsep + inherited if inherited else "")
    env["PYTHONUNBUFFERED"] = "1"
    return env
