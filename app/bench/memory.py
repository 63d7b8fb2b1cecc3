"""`dte bench memory`: what a worker process needs while it publishes, certified detection beside the snapshot detector.

It runs the real thing: a daemon, its worker process, a trainer (this process) with the recorded state in shared memory,
and one more optimizer step. Invariant: only the worker's own (anonymous) memory is counted; the trainer's shared pages,
which it maps, are not its.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from app.bench.state import Workload, say, workload
from app.cli.output import human_bytes, print_table
from app.demo.stage import Stage
from clients.control import ControlClient
from clients.protocol import Detector, JobState
from clients.trainer import TorchSource
from engine.errors import DteError

TIMEOUT_S = 300.0
_SAMPLE_S = 0.002


@dataclass
class Measured:
    """A worker's anonymous memory in bytes: at rest after the first version, and at most during a publish."""

    rest_bytes: int
    peak_bytes: int
    changed: int


@dataclass
class Sampler:
    """Follows the anonymous memory of one process; `peak_bytes` is the most that was seen since the start."""

    pid: int
    peak_bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes(self.pid))


def anonymous_bytes(pid: int) -> int:
    """The process's own resident memory: neither files nor shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise DteError(f"the kernel does not tell the memory of process {pid}.", remedy="This benchmark needs Linux.")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def run_memory(record: Path | None, *, json_output: bool) -> None:
    """Measure and print."""
    work = workload(record)
    say("an idle worker, with one small tensor")
    idle = _measure(_small(work), None)
    results: dict[str, Measured] = {}
    detectors: dict[str, Detector | None] = {"certified": None, "snapshot": "snapshot"}
    for name, detector in detectors.items():
        say(f"publishing with the {name} detector")
        results[name] = _measure(work, detector)
    rows = {
        name: {
            "rest_bytes": max(0, m.rest_bytes - idle.rest_bytes),
            "peak_bytes": max(0, m.peak_bytes - idle.rest_bytes),
            "changed": m.changed,
        }
        for name, m in results.items()
    }
    model = 2 * work.numel
    print_table(
        ("detector", "held between versions", "peak while publishing", "of the BF16 model", "changed"),
        [
            (
                name,
                human_bytes(r["rest_bytes"]),
                human_bytes(r["peak_bytes"]),
                f"{r['peak_bytes'] / model:.1%}",
                f"{r['changed']:,}",
            )
            for name, r in rows.items()
        ],
        title=f"{work.numel:,} parameters, BF16 model {human_bytes(model)}; beyond an idle worker's "
        f"{human_bytes(idle.rest_bytes)}",
    )
    if json_output:
        print(
            json.dumps(
                {
                    "bench": "memory",
                    "parameters": work.numel,
                    "model_bytes": model,
                    "idle_worker_bytes": idle.rest_bytes,
                    "extra": rows,
                }
            )
        )


def _small(work: Workload) -> Workload:
    first = min(work.tensors, key=lambda t: t.numel)
    at = slice(first.start, first.start + first.numel)
    return Workload(
        work.formula,
        work.ctx,
        (type(first)(first.name, first.shape, 0, first.numel),),
        work.theta[at],
        work.exp_avg[at],
        work.exp_avg_sq[at],
        work.prev_bits[at],
    )


def _measure(work: Workload, detector: Detector | None) -> Measured:
    parameters, optimizer, names = _trainer(work)
    with Stage("bench", keep=False) as stage:
        daemon = stage.start_trainer_daemon()
        source = TorchSource(
            parameters, optimizer, daemon=stage.trainer_url, run="bench", names=names, detector=detector
        )
        try:
            source.register(step=work.ctx.step)
            with ControlClient(stage.trainer_url, run="bench") as control:
                control.wait_for_version(0, TIMEOUT_S)
                workers = _children(daemon)
                if len(workers) != 1:
                    raise DteError(f"the daemon has {len(workers)} child processes, one worker was expected.")
                _publish(work, optimizer, source, work.ctx.step + 1)
                rest = anonymous_bytes(workers[0])
                sampler = Sampler(workers[0])
                with sampler.running():
                    version = _publish(work, optimizer, source, work.ctx.step + 2)
                changed = control.version(version).changed if version is not None else 0
                return Measured(rest, sampler.peak_bytes, changed)
        finally:
            source.close()


def _trainer(work: Workload) -> tuple[torch.nn.Module, torch.optim.AdamW, dict[str, str]]:
    """Parameters and an optimizer in the recorded state, under plain names that map to the recorded ones."""
    parameters = torch.nn.ParameterList(
        torch.nn.Parameter(work.theta[t.start : t.start + t.numel].clone().view(t.shape)) for t in work.tensors
    )
    h = work.ctx.hyper
    optimizer = torch.optim.AdamW(
        parameters.parameters(), lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay, fused=True
    )
    for t, p in zip(work.tensors, parameters, strict=True):
        at = slice(t.start, t.start + t.numel)
        optimizer.state[p] = {
            "step": torch.tensor(float(work.ctx.step)),
            "exp_avg": work.exp_avg[at].clone().view(t.shape),
            "exp_avg_sq": work.exp_avg_sq[at].clone().view(t.shape),
        }
    return parameters, optimizer, {str(i): t.name for i, t in enumerate(work.tensors)}


def _publish(work: Workload, optimizer: torch.optim.Optimizer, source: TorchSource, step: int) -> int | None:
    """One more optimizer step, with the recorded momentum as gradient, published and waited for."""
    for group in optimizer.param_groups:
        for t, p in zip(work.tensors, group["params"], strict=True):
            p.grad = work.exp_avg[t.start : t.start + t.numel].view(t.shape)
    optimizer.step()
    job = source.sync(step).wait(TIMEOUT_S)
    if job.state not in (JobState.COMMITTED, JobState.UNCHANGED):
        raise DteError(f"the sync of step {step} ended as {job.state}.")
    return job.version if job.state is JobState.COMMITTED else None
