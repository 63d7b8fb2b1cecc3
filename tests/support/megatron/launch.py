"""Starts the ranks of a rig session, gives them tasks and collects what they answer.

Ranks live on from task to task, since importing Megatron-Core takes seconds. The one invariant: whatever goes wrong (a
rank fails or ends, a task takes too long), all ranks of the session are killed and the error shows the end of each log.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from tests.support.megatron.job import Job

ROOT = Path(__file__).parents[3]
# Below the range from which the system takes ports for outgoing connections.
PORTS = range(20000, 32768)
TAIL_LINES = 40
TIMEOUT_S = 120.0


class RigError(AssertionError):
    """A rank failed, ended or took too long. The message has the end of every rank's log."""


@dataclass(frozen=True)
class Task:
    """`scenario` is `module:function`, called in every rank as `function(trainer, context)`; what it returns must be
    JSON. `args` is what `context.args` gives it."""

    job: Job
    scenario: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One rank's answer to a task, and the seconds it took: `build` (groups, model, optimizer) and `total`."""

    value: Any
    seconds: Mapping[str, float]


def _store() -> dist.TCPStore:
    """A store on a free port. It listens here, in the test's process, so that nobody can take the port in between."""
    ports = list(PORTS)
    random.SystemRandom().shuffle(ports)
    for port in ports[:50]:
        try:
            return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        except (RuntimeError, dist.DistNetworkError):
            continue
    raise RigError("no free port for the ranks' store")


class Session:
    """`world` ranks that run tasks one after another. `folder` gets their logs and each task's own folder.

    `env` is added to the ranks' environment. `processes` are the ranks, in order.
    """

    def __init__(self, world: int, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.world = world
        self.folder = folder
        self.import_seconds: dict[int, float] = {}
        self.alive = True
        self._tasks = 0
        self._timeout_s = TIMEOUT_S
        self._store = _store()
        self._logs = [folder / f"rank-{rank}.log" for rank in range(world)]
        self._said: list[deque[Any]] = [deque() for _ in range(world)]
        self._results: dict[int, Result] = {}
        self._buffers = [b""] * world
        self._killed: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self.processes = [self._start(rank, dict(env or {})) for rank in range(world)]

    def _start(self, rank: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        settings = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONUNBUFFERED": "1",
        }
        with self._logs[rank].open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.megatron.worker"],
                cwd=ROOT,
                env=os.environ | settings | env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, rank)
        return process

    # --- tasks -----------------------------------------------------------------------------------------------------

    def run(self, job: Job, scenario: str, *, timeout_s: float = TIMEOUT_S, **args: Any) -> list[Any]:
        """What the scenario returned in each rank, in rank order."""
        self.start(Task(job, scenario, args), timeout_s=timeout_s)
        return [result.value for result in self.wait()]

    def start(self, task: Task, *, timeout_s: float = TIMEOUT_S) -> Path:
        """Give the task to all ranks; `wait` must come before the next one. Returns the task's folder."""
        assert self.alive, "the session has ended"
        folder = self.folder / f"task-{self._tasks}"
        folder.mkdir()
        self._tasks += 1
        self._results = {}
        self._timeout_s = timeout_s
        self._write(
            range(self.world),
            {
                "job": task.job.to_json(),
                "scenario": task.scenario,
                "args": dict(task.args),
                "folder": str(folder),
                "timeout_s": timeout_s,
            },
        )
        return folder

    def wait(self) -> list[Result]:
        """Wait until every rank that was not killed has answered the task; their results in rank order."""
        ranks = [rank for rank in range(self.world) if rank not in self._killed]
        self._pump(lambda: all(rank in self._results for rank in ranks), "the task")
        return [self._results[rank] for rank in ranks]

    def say(self, value: Any, ranks: Iterable[int] | None = None) -> None:
        """Send a JSON value to ranks (all by default) that wait in `context.hear()`."""
        self._write(range(self.world) if ranks is None else ranks, {"said": value})

    def hear(self, rank: int = 0) -> Any:
        """The next value that the rank sent with `context.say`."""
        self._pump(lambda: bool(self._said[rank]), f"a word of rank {rank}")
        return self._said[rank].popleft()

    def kill(self, rank: int) -> None:
        """End a rank at once, as a crash does. Its end is then no error; the session runs no further task."""
        self._killed.add(rank)
        self.processes[rank].kill()
        self.processes[rank].wait()

    def close(self) -> None:
        """Kill what still runs."""
        self.alive = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    _close(pipe)
        self._selector.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- pipes -----------------------------------------------------------------------------------------------------

    def _write(self, ranks: Iterable[int], message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for rank in ranks:
            if rank in self._killed:
                continue
            pipe = self.processes[rank].stdin
            assert pipe is not None
            try:
                pipe.write(line)
                pipe.flush()
            except BrokenPipeError:
                self._fail(f"rank {rank} has ended")

    def _pump(self, done: Any, what: str) -> None:
        """Take in messages until `done()`, or fail."""
        deadline = time.monotonic() + self._timeout_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                self._fail(f"{what} took more than {self._timeout_s:.0f} s")
            for key, _ in self._selector.select(left):
                self._read(key)

    def _read(self, key: selectors.SelectorKey) -> None:
        rank: int = key.data
        data = os.read(key.fd, 1 << 20)
        if not data:
            self._selector.unregister(key.fileobj)
            if rank not in self._killed:
                code = self.processes[rank].wait()
                self._fail(f"rank {rank} ended with exit status {code}")
            return
        *lines, self._buffers[rank] = (self._buffers[rank] + data).split(b"\n")
        for line in lines:
            self._take(rank, json.loads(line))

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.import_seconds[rank] = message["ready"]
        elif "said" in message:
            self._said[rank].append(message["said"])
        elif "result" in message:
            self._results[rank] = Result(message["result"], message["seconds"])
        else:
            self._fail(f"rank {rank} failed:\n{message['failed']}")

    def _fail(self, why: str) -> None:
        self.close()
        tails = [f"--- {log.name} ---\n" + "\n".join(_tail(log)) for log in self._logs]
        raise RigError("\n".join([why, *tails]))


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-TAIL_LINES:]


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return


class Rig:
    """Sessions by world size, started when first asked for and started again after a failure."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sessions: dict[int, Session] = {}
        self._started = 0

    def session(self, world: int) -> Session:
        """A living session of that many ranks, shared by all who ask."""
        session = self._sessions.get(world)
        if session is None or not session.alive:
            self._started += 1
            session = self._sessions[world] = Session(world, self._folder / f"session-{self._started}-world-{world}")
        return session

    def run(self, world: int, job: Job, scenario: str, *, timeout_s: float = TIMEOUT_S, **args: Any) -> list[Any]:
        """Run a scenario in every rank of a session of that many; what it returned, in rank order."""
        return self.session(world).run(job, scenario, timeout_s=timeout_s, **args)

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
