"""The rig's ranks: `python -m tests.support.megatron.worker FD MODULE…` is their host, which `launch.Host` starts.

The host imports Megatron-Core, which takes seconds, once, and forks the ranks of each session it is asked for. A rank
reads one JSON line a task from its standard input and answers with JSON lines on its answer pipe; all that is printed
goes to its log. A task that fails ends the rank.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

FDS_PER_RANK = 3


@dataclass(frozen=True)
class Context:
    """What a scenario gets besides its trainer. `folder` is the task's own and shared by its ranks."""

    folder: Path
    args: dict[str, Any]
    _answers: IO[str] = field(repr=False)

    def say(self, value: Any) -> None:
        """Send a JSON value to the test, which gets it from `Session.hear`."""
        print(json.dumps({"said": value}), file=self._answers, flush=True)

    def hear(self) -> Any:
        """Wait for the JSON value that the test sends with `Session.say`."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit("the test is gone")
        return json.loads(line)["said"]


def serve(requests: socket.socket, preload: list[str]) -> None:
    """Fork a session's ranks for each request, until the other end closes."""
    began = time.monotonic()
    from tests.support.megatron import shim

    shim.install()
    import torch
    import torch._dynamo  # the optimizers import it when first made

    import tests.support.megatron.train  # noqa: F401

    for module in preload:
        importlib.import_module(module)
    torch.set_num_threads(1)
    seconds = time.monotonic() - began
    gc.freeze()
    # Ranks that end are reaped by the system; their sessions watch them through descriptors.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        line, fds, _, _ = socket.recv_fds(requests, 1 << 16, 256)
        if not line:
            return
        request = json.loads(line)
        for rank in range(request["world"]):
            if os.fork() == 0:
                requests.close()
                os._exit(_become(rank, fds, request, seconds))
        for fd in fds:
            os.close(fd)


def _become(rank: int, fds: list[int], request: dict[str, Any], seconds: float) -> int:
    """In the child: take the rank's own descriptors, close the others', and work. Returns the exit status."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        first = FDS_PER_RANK * rank
        tasks, answers, log = fds[first : first + FDS_PER_RANK]
        for source, target in ((tasks, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        for fd in fds:
            if fd != answers:
                os.close(fd)
        faulthandler.enable()
        os.environ.update(request["env"], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["world"]))
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
        with os.fdopen(answers, "w") as pipe:
            print(json.dumps({"ready": seconds, "pid": os.getpid()}), file=pipe, flush=True)
            return _work(rank, request["world"], pipe)
    except BaseException:
        traceback.print_exc()
        return 1


def _work(rank: int, world: int, answers: IO[str]) -> int:
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for number, line in enumerate(iter(sys.stdin.readline, "")):
        task = json.loads(line)
        print(f"--- task {number}: {task['scenario']} {_said(task['job'])}", file=sys.stderr, flush=True)
        # A group of its own for each task: what the last one left in flight cannot reach this one.
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"task-{number}", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=task["timeout_s"]),
        )
        try:
            _run(task, answers)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"failed": repr(error)}), file=answers, flush=True)
            # No clean-up: other ranks may wait for this one, and the end of a group would wait for them.
            return 1
        # The groups' threads, which poll for as long as they live, end only with what refers to them.
        gc.collect()
    return 0


def _said(job: dict[str, Any]) -> dict[str, Any]:
    from tests.support.megatron.job import Job

    usual = Job().to_json()
    return {name: value for name, value in job.items() if value != usual[name]}


def _run(task: dict[str, Any], answers: IO[str]) -> None:
    import torch.distributed as dist

    from tests.support.megatron.job import Job
    from tests.support.megatron.train import Trainer

    began = time.monotonic()
    module, _, function = task["scenario"].partition(":")
    scenario = getattr(importlib.import_module(module), function)
    trainer = Trainer(Job.from_json(task["job"]))
    built = time.monotonic()
    result = scenario(trainer, Context(Path(task["folder"]), task["args"], answers))
    seconds = {"build": built - began, "total": time.monotonic() - began}
    print(json.dumps({"result": result, "seconds": seconds}), file=answers, flush=True)
    dist.barrier()  # a rank that still works needs the others' ends of its groups
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
