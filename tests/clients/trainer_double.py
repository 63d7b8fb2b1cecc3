"""A daemon double for trainer tests: answers the protocol in-process and reads shared memory like a worker would."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import torch

from clients.protocol import AnyRef, Cut, Job, JobState, MemoryRef, Problem, RankRegistration, SliceSpec, SyncRequest
from transports.memory import shm
from transports.memory.generation import ControlBlock
from transports.memory.shm import open_existing


def read(ref: AnyRef) -> torch.Tensor:
    """A private copy of what a reference to shared memory points to."""
    assert isinstance(ref, MemoryRef)
    with open_existing(ref.file) as file:
        return file.tensor(ref.offset_bytes, ref.numel, ref.dtype).clone()


@dataclass
class FakeDaemon:
    """Releases every hold at once unless `auto_release` is off. `down`: connections are refused.

    `faults` maps a path to a function that may answer instead (return None to go on).
    """

    auto_release: bool = True
    down: bool = False
    epoch: int = 1
    version: int | None = 0
    next_state: JobState = JobState.COMMITTED
    registration: RankRegistration | None = None
    syncs: list[SyncRequest] = field(default_factory=list)
    reads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    faults: dict[str, Callable[[httpx.Request], httpx.Response | None]] = field(default_factory=dict)
    control: ControlBlock | None = None

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.answer)

    @property
    def slices(self) -> dict[str, SliceSpec]:
        assert self.registration is not None
        return {s.tensor: s for s in self.registration.slices}

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.calls.append(f"{request.method} {path}")
        if self.down:
            raise httpx.ConnectError("connection refused", request=request)
        fault = self.faults.get(path)
        if fault is not None and (found := fault(request)) is not None:
            return found
        if request.method == "POST" and path == "/ranks":
            return self._register(RankRegistration.model_validate_json(request.content))
        if request.method == "POST" and path == "/sync":
            return self._sync(SyncRequest.model_validate_json(request.content))
        if request.method == "DELETE":
            return httpx.Response(204)
        if path.endswith("/cut"):
            return _json(200, Cut(epoch=self.epoch, version=self.version))
        if path.startswith("/jobs/"):
            job = self.jobs.get(path.removeprefix("/jobs/"))
            return problem(404, "not-found") if job is None else _json(200, job)
        return problem(404, "not-found")

    def set_job(self, job_id: str, **update: object) -> None:
        self.jobs[job_id] = self.jobs[job_id].model_copy(update=update)

    def close(self) -> None:
        if self.control is not None:
            self.control.close()

    def _register(self, body: RankRegistration) -> httpx.Response:
        self.registration = body
        self.close()
        self.control = ControlBlock.open(body.control)
        self._read()
        if self.auto_release:
            self.control.release(body.hold)
        return self._accept("register", body.run, body.rank, body.step, JobState.RELEASED, None)

    def _sync(self, body: SyncRequest) -> httpx.Response:
        assert self.control is not None
        assert self.registration is not None
        if (known := self.jobs.get(f"sync-{body.rank}-{body.step}")) is not None:
            return _json(200, known)
        if body.step <= max([self.registration.step, *(s.step for s in self.syncs)]):
            return problem(409, "state-conflict", f"step {body.step} is not newer")
        self.syncs.append(body)
        self._read()
        if self.auto_release:
            self.control.release(body.hold)
        state = self.next_state if body.version is not None else JobState.ACCUMULATED
        return self._accept("sync", body.run, body.rank, body.step, state, body.version)

    def _read(self) -> None:
        self.reads.append({name: read(s.theta) for name, s in self.slices.items() if isinstance(s.theta, MemoryRef)})

    def _accept(
        self, kind: str, run: str, rank: int, step: int, state: JobState, version: int | None
    ) -> httpx.Response:
        job = Job(
            id=f"{kind}-{rank}-{step}", kind=kind, run=run, rank=rank, step=step, state=state,  # type: ignore[arg-type]
            epoch=self.epoch, version=version,
        )  # fmt: skip
        self.jobs[job.id] = job
        return _json(202, job)


def adamw(net: torch.nn.Module, **options: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=options.pop("lr", 1e-2), **options)  # type: ignore[arg-type]


def step_once(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def own_files(run: str) -> list[str]:
    """Shared memory of a run."""
    return [n for n in os.listdir(shm.SHM_DIR) if n.startswith(f"dte-{run}-")]


def problem(status: int, code: str, detail: str = "no") -> httpx.Response:
    document = Problem(type=f"urn:dte:problem:{code}", title=code, status=status, detail=detail, remedy="Do better.")
    return httpx.Response(
        status, content=document.model_dump_json(), headers={"Content-Type": "application/problem+json"}
    )


def _json(status: int, body: Cut | Job) -> httpx.Response:
    return httpx.Response(status, content=body.model_dump_json(), headers={"Content-Type": "application/json"})
