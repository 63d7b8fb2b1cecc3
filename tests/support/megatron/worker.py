"""One rank of the rig: `python -m tests.support.megatron.worker`, started by `launch.Session`, runs the tasks it reads.

The parent sends one JSON line a task over standard input; the rank answers with JSON lines over what was its standard
output. Everything else that is printed goes to standard error, the rank's log. A task that fails ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import IO, Any


class Context:
    """What a scenario gets besides its trainer. `folder` is the task's own and shared by its ranks."""

    def __init__(self, folder: Path, args: dict[str, Any], answers: IO[str]) -> None:
        self.folder = folder
        self.args = args
        self._answers = answers

    def say(self, value: Any) -> None:
        """Send a JSON value to the test, which gets it from `Session.hear`."""
        print(json.dumps({"said": value}), file=self._answers, flush=True)

    def hear(self) -> Any:
        """Wait for the JSON value that the test sends with `Session.say`."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit("the test is gone")
        return json.loads(line)["said"]


def scenario_of(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    started = time.monotonic()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.support.megatron import shim

    shim.install()
    import torch
    import torch.distributed as dist

    from tests.support.megatron.job import Job
    from tests.support.megatron.train import Trainer

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    print(json.dumps({"ready": time.monotonic() - started}), file=answers, flush=True)
    for number, line in enumerate(iter(sys.stdin.readline, "")):
        task = json.loads(line)
        began = time.monotonic()
        print(f"--- task {number}: {task['scenario']} {task['job']}", file=sys.stderr, flush=True)
        try:
            # A group of its own for each task: what the last one left in flight cannot reach this one.
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"task-{number}", store),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=task["timeout_s"]),
            )
            trainer = Trainer(Job.from_json(task["job"]))
            built = time.monotonic()
            result = scenario_of(task["scenario"])(trainer, Context(Path(task["folder"]), task["args"], answers))
            dist.barrier()
            trainer.close()
            dist.destroy_process_group()
        except Exception:
            traceback.print_exc()
            print(json.dumps({"failed": traceback.format_exc()}), file=answers, flush=True)
            # Without clean-up: other ranks may wait for this one, and a group's end would wait for them.
            os._exit(1)
        seconds = {"build": built - began, "total": time.monotonic() - began}
        print(json.dumps({"result": result, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
