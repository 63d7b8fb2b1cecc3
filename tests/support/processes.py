"""Real processes for tests: forked from a server that has imported everything, so that each starts at once.

One invariant: no process outlives the test process; each watches it (a stopped one ends once it is continued).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE_S = 180.0
WORKER_SAYS = "worker process"
"""What a daemon logs of a worker from the nursery, before its number."""
PRELOADED = [
    "app.cli.inspecting",
    "app.cli.root",
    "app.cli.verifying",
    "app.roles.coordinator",
    "app.roles.publisher",
    "app.roles.store",
    "app.roles.subscriber",
    "clients.rollout.torch",
    "clients.trainer",
    "tests.clients.trainer_double",
    "tests.faults.receiver",
    "tests.faults.trainer",
    "tests.support.daemon_process",
    "tests.support.receiver_process",
    "torch._dynamo",
    "torch.distributed",
]


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Channel:
    """JSON messages over a pipe; at the child's end `Channel` is what its main function gets."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """EOFError when the other end is gone, TimeoutError after `timeout_s`."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return message

    def close(self) -> None:
        self._connection.close()


def _end_with_the_tests() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _enter(main: str, connection: Connection, log: str, config: str) -> None:
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    module, _, function = main.partition(":")
    getattr(import_module(module), function)(Channel(connection), **json.loads(config))


class Child:
    """A process that runs `main` ("module:function") with a channel and `config`."""

    def __init__(self, name: str, main: str, folder: Path, /, **config: Any) -> None:
        self.name = name
        self.stopped = False
        self.log = folder / f"{name}.log"
        context = _context()
        here, there = context.Pipe()
        self._channel = Channel(here)
        self._process = context.Process(target=_enter, args=(main, there, str(self.log), json.dumps(config)))
        self._process.start()
        there.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return int(self._process.pid)

    def send(self, op: str, **values: Any) -> None:
        self._channel.send({"op": op, **values})

    def receive(self) -> dict[str, Any]:
        """The next answer. AssertionError with the log's end if it died or is silent for too long."""
        try:
            return self._channel.receive(PATIENCE_S)
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise AssertionError(f"{self.name}: {type(error).__name__}\n{self.tail()}") from None

    def started(self) -> dict[str, Any]:
        """Its first answer; a process that does not start is ended."""
        try:
            return self.receive()
        except BaseException:
            self.end()
            raise

    def ask(self, op: str, **values: Any) -> dict[str, Any]:
        self.send(op, **values)
        return self.receive()

    def tail(self) -> str:
        """The end of what it printed."""
        return self.log.read_text()[-6000:] if self.log.exists() else ""

    def workers(self) -> list[int]:
        """The workers that a daemon got from the nursery and that live, in the order of their start."""
        said = re.findall(rf"^{WORKER_SAYS} (\d+)$", self.log.read_text(), re.MULTILINE) if self.log.exists() else []
        return [int(pid) for pid in said if Path(f"/proc/{pid}").exists()]

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.join(PATIENCE_S)

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._channel.close()
