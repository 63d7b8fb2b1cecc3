"""Starts the ranks of a rig session, gives them tasks and collects what they answer.

Ranks are forked from one host, since importing Megatron-Core takes seconds, and live on from task to task. The one
invariant: whatever goes wrong (a rank fails or ends, a task takes too long), all ranks of the session are killed and
the error shows the end of each log.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from torch.distributed import DistNetworkError, TCPStore

from tests.support.megatron.job import Job

ROOT = Path(__file__).parents[3]
# Below the range from which the system takes ports for outgoing connections.
PORTS = range(20000, 32768)
TAIL_LINES = 60
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


def _store() -> TCPStore:
    """A store on a free port. It listens here, in the test's process, so that nobody can take the port in between."""
    ports = list(PORTS)
    random.SystemRandom().shuffle(ports)
    for port in ports[:50]:
        try:
            return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        except (RuntimeError, DistNetworkError):
            continue
    raise RigError("no free port for the ranks' store")


class Host:
    """The process that imports Megatron-Core once and forks the ranks of sessions. Its log is in `folder`."""

    def __init__(self, folder: Path, preload: Iterable[str] = ()) -> None:
        """`preload`: modules that it imports too, once for all ranks."""
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "host.log"
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.megatron.worker", str(theirs.fileno()), *preload],
                cwd=ROOT,
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, world: int, env: Mapping[str, str], fds: list[int]) -> None:
        """Start ranks. `fds` are, for each, its task pipe, its answer pipe and its log."""
        try:
            socket.send_fds(self._requests, [json.dumps({"world": world, "env": dict(env)}).encode()], fds)
        except BrokenPipeError:
            raise RigError(f"the ranks' host has ended\n{_tail(self.log)}") from None

    def close(self) -> None:
        """End the host. Ranks that it forked live on until their sessions close."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


class Session:
    """`world` ranks that run tasks one after another. `folder` gets their logs and each task's own folder.

    `env` is set in the ranks, after their imports. `pids` are those of the ranks that are ready, `import_seconds` what
    their host took to import Megatron-Core.
    """

    def __init__(self, world: int, folder: Path, host: Host, *, env: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.world = world
        self.folder = folder
        self.alive = True
        self.import_seconds = 0.0
        self.pids: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._tasks = 0
        self._timeout_s = TIMEOUT_S
        self._store = _store()
        self._logs = [folder / f"rank-{rank}.log" for rank in range(world)]
        self._said: list[deque[Any]] = [deque() for _ in range(world)]
        self._results: dict[int, Result] = {}
        self._buffers = [b""] * world
        self._killed: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._host = host
        self._pipes: list[IO[bytes]] = []
        self._answers: list[IO[bytes]] = []
        self._fork(env or {})

    def _fork(self, env: Mapping[str, str]) -> None:
        theirs: list[int] = []
        for rank in range(self.world):
            task_end, tasks = os.pipe()
            answers, answer_end = os.pipe()
            log = os.open(self._logs[rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            theirs += [task_end, answer_end, log]
            self._pipes.append(open(tasks, "wb", buffering=0))  # noqa: SIM115 - closed by `close`
            self._answers.append(open(answers, "rb", buffering=0))  # noqa: SIM115 - closed by `close`
            self._selector.register(answers, selectors.EVENT_READ, rank)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        try:
            self._host.fork(self.world, address | dict(env), theirs)
        finally:
            for fd in theirs:
                os.close(fd)

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
        self._pump(lambda: rank in self._handles, f"rank {rank}'s start")
        self._killed.add(rank)
        signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)

    def close(self) -> None:
        """Kill what still runs and wait for its end."""
        if not self.alive:
            return
        self.alive = False
        for pipe in self._pipes:
            pipe.close()  # a rank that has not said its pid yet ends by itself
        for handle in self._handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [])
            os.close(handle)
        for answers in self._answers:
            answers.close()
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
            try:
                self._pipes[rank].write(line)
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
            self._lost(rank, f"rank {rank} ended without an answer")
            return
        *lines, self._buffers[rank] = (self._buffers[rank] + data).split(b"\n")
        for line in lines:
            self._take(rank, json.loads(line))

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.import_seconds = message["ready"]
            self.pids[rank] = message["pid"]
            self._handles[rank] = os.pidfd_open(message["pid"])
        elif "said" in message:
            self._said[rank].append(message["said"])
        elif "result" in message:
            self._results[rank] = Result(message["result"], message["seconds"])
        else:
            self._lost(rank, f"rank {rank} failed: {message['failed']}")

    def _lost(self, rank: int, why: str) -> None:
        # After a kill, ranks that have answered fail as they leave: their groups are broken.
        if rank not in self._killed and not (self._killed and rank in self._results):
            self._fail(why)

    def _fail(self, why: str) -> None:
        self.close()
        raise RigError("\n".join([why, *(_tail(log) for log in [self._host.log, *self._logs])]))


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"--- {log.name} ---", *lines[-TAIL_LINES:]])


class Rig:
    """Sessions by world size, started when first asked for and started again after a failure. Every group that a task
    makes leaves threads behind in its ranks, which poll: a rig is one test's."""

    def __init__(self, folder: Path, host: Host) -> None:
        self._folder = folder
        self._host = host
        self._sessions: dict[int, Session] = {}
        self._started = 0

    def session(self, world: int) -> Session:
        """A living session of that many ranks, shared by all who ask."""
        session = self._sessions.get(world)
        if session is None or not session.alive:
            self._started += 1
            folder = self._folder / f"session-{self._started}-world-{world}"
            session = self._sessions[world] = Session(world, folder, self._host)
        return session

    def run(self, world: int, job: Job, scenario: str, *, timeout_s: float = TIMEOUT_S, **args: Any) -> list[Any]:
        """Run a scenario in every rank of a session of that many; what it returned, in rank order."""
        return self.session(world).run(job, scenario, timeout_s=timeout_s, **args)

    def close(self) -> None:
        """End all sessions."""
        for session in self._sessions.values():
            session.close()
