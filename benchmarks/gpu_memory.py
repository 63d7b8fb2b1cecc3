"""Trainer memory on a CUDA device between two processes: a part of `benchmarks.gpu_check`, which starts it.

    python -m benchmarks.gpu_memory [--device cuda:0] [--modes ipc,mirror]

This process trains a few tensors with torch's own AdamW and shares them as a source does; a second one opens them and
detects as a worker does. What it finds is compared bit for bit with what really changed, with both backends.
One invariant: the verdict compares arrays that this process took from its own tensors.

Exits with 0 if everything agrees, 1 if something does not, 3 if the device's memory cannot be opened.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from app.worker.reader import SliceReader
from app.worker.steps import StepReader
from clients.protocol import FormulaSpec, RankRegistration, SyncRequest
from clients.trainer.binding import Binding
from clients.trainer.formulas import hyper_of
from clients.trainer.places import MemoryMode, Places
from clients.trainer.plan import Planner
from engine.bf16 import lanes_of
from engine.detect import backends
from engine.detect.base import TILE
from engine.ledger import SliceLedger
from engine.optimizers import registry, selftest
from transports.memory.cuda_ipc import DeviceMemoryError, TorchCuda
from transports.memory.generation import shm_name

STEPS = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "foreach": {},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "single": {"foreach": False},
    "capturable, lr as a tensor": {"capturable": True, "lr": torch.tensor(1e-5)},
    "foreach, amsgrad": {"amsgrad": True},
}
ON_CPU = ("foreach", "fused", "single")


def ensure(right: bool, what: str) -> None:
    """End the run with 1 unless `right`."""
    if not right:
        print(f"WRONG: {what}", file=sys.stderr)
        raise SystemExit(1)


# --- the reading process ---------------------------------------------------------------------------------------------


class Reader:
    """Answers one line of JSON per request, as a worker would work, with every backend."""

    def __init__(self) -> None:
        self.readers: dict[str, StepReader] = {}
        self.known: dict[str, tuple[SliceLedger, ...]] = {}

    def open(self, body: Any) -> dict[str, Any]:
        """Map the memory of a registration and digest it."""
        self.close()
        registration = RankRegistration.model_validate(body)
        started = time.perf_counter()
        for name in backends.names():
            backend = backends.get(name, threads=4)
            reader = StepReader(registration, SliceReader(backend, group_tiles=16, dense_fraction=1.0))
            self.readers[name] = reader
            reader.attach()
            self.known[name] = tuple(reader.digests())
            reader.rest()
        return {"exact": self.readers["cpu"].exact, "ms": (time.perf_counter() - started) * 1e3}

    def read(self, body: Any, into: str) -> dict[str, Any]:
        """Read one step; what changed goes into files, one per backend and slice."""
        sync = SyncRequest.model_validate(body)
        answer: dict[str, Any] = {}
        for name, reader in self.readers.items():
            counts: Counter[str] = Counter()
            started = time.perf_counter()
            reader.move(sync)
            reads = reader.read(self.known[name], sync, counts)
            reader.rest()
            answer[name] = {"counts": dict(counts), "ms": (time.perf_counter() - started) * 1e3}
            for read in reads:
                p = read.ledger.pending
                np.savez(f"{into}/{name}-{read.ledger.slice}", ranks=p.ranks, old=p.base, new=p.cur, dense=p.dense)
            empty = [s.pending for s in self.known[name]]
            self.known[name] = tuple(
                SliceLedger(**{**_fields(r.ledger), "pending": e}) for r, e in zip(reads, empty, strict=True)
            )
        return answer

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        self.readers, self.known = {}, {}


def _fields(ledger: SliceLedger) -> dict[str, Any]:
    return {name: getattr(ledger, name) for name in ledger.__dataclass_fields__}


def serve() -> int:
    """The second process."""
    reader = Reader()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "open":
                answer = reader.open(request["body"])
            elif request["op"] == "read":
                answer = reader.read(request["body"], request["into"])
            else:
                reader.close()
                answer = {}
        except DeviceMemoryError as e:
            answer = {"unmappable": str(e)}
        print(json.dumps(answer), flush=True)
    return 0


class Other:
    """The second process as the first sees it."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTORCH_CUDA_ALLOC_CONF"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_memory", "--reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        ensure(bool(line), "the reading process has ended")
        answer: dict[str, Any] = json.loads(line)
        if "unmappable" in answer:
            print(f"NOT MAPPED: {answer['unmappable']}", file=sys.stderr)
            raise SystemExit(3)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


# --- the training process --------------------------------------------------------------------------------------------


class Trainer:
    """A few tensors under one optimizer, bound as a source binds them."""

    def __init__(self, device: torch.device, kind: str, mode: MemoryMode) -> None:
        torch.manual_seed(7)
        self.model = nn.Module()
        self.model.a = nn.Parameter(torch.randn((1 << 20) + 777, device=device) * 0.02)
        self.model.b = nn.Parameter((torch.randn(300, 500, device=device) * 0.02).t())
        self.model.c = nn.Parameter(torch.randn(333, device=device))
        options = {"lr": 1e-5, "weight_decay": 0.1, **OPTIMIZERS[kind]}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        planner = Planner([self.optimizer], names=None, detector=None, dtypes=None)
        planner.add_model(self.model, {})
        self.plan = planner.finish()
        self.device = device
        self.places = Places(mode, TorchCuda())
        self.binding = Binding(self.plan, [self.optimizer], [self.model], self.places)
        name = f"{mode}-{list(OPTIMIZERS).index(kind)}"
        self.binding.move_in(lambda k: shm_name("gpu-check", name, 0, f"m{k}"))

    def registration(self) -> RankRegistration:
        return RankRegistration(
            run="gpu-check", launch="check", rank=0, world=1, step=0, control="dte-gpu-check", generation=0, hold=1,
            tensors=self.plan.tensors, groups=[FormulaSpec(name=f) for f in self.plan.formulas],
            slices=self.binding.specs(), mirrored=self.binding.mirrored_slices,
        )  # fmt: skip

    def step(self, number: int) -> None:
        """Queue one optimizer step; on a device behind work that is still running when the other process looks."""
        for p in self.model.parameters():
            p.grad = torch.randn_like(p) * 10.0 ** torch.randint(-4, 1, p.shape, device=p.device)
        if self.device.type == "cuda":
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.places.written()

    def sync(self, number: int) -> SyncRequest:
        moved = self.binding.adopt()
        self.binding.refresh_mirrors()
        hypers = [hyper_of(self.optimizer, self.optimizer.param_groups[k.index]) for k in self.plan.groups]
        return SyncRequest(
            run="gpu-check", launch="check", epoch=1, rank=0, step=number, generation=0, hold=number + 1,
            version=number, hypers=hypers, steps=self.binding.steps(), handles=self.binding.specs(moved),
        )  # fmt: skip

    def bits(self) -> list[np.ndarray]:
        """The BF16 bits of every slice, in memory order."""
        return [lanes_of(_flat(s.home.memory()).cpu(), "bfloat16").copy() for s in self.plan.shards]

    def close(self) -> None:
        self.binding.move_out()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


@contextlib.contextmanager
def trainer(device: torch.device, kind: str, mode: MemoryMode) -> Iterator[Trainer]:
    made = Trainer(device, kind, mode)
    try:
        yield made
    finally:
        made.close()


def check(device: torch.device, kind: str, mode: MemoryMode, other: Other) -> None:
    """Train, read, compare."""
    with trainer(device, kind, mode) as t, tempfile.TemporaryDirectory() as folder:
        opened = other.ask(op="open", body=t.registration().model_dump(mode="json"))
        before, times, changed = t.bits(), [], 0
        for number in range(1, STEPS + 1):
            t.step(number)
            if number == STEPS:  # other memory for the moments, which is exported again
                t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))
            answer = other.ask(op="read", body=t.sync(number).model_dump(mode="json"), into=folder)
            after = t.bits()
            for backend in backends.names():
                counts = answer[backend]["counts"]
                for trouble in ("failed_tiles", "mismatched_tiles", "slices_unjoined", "outside_tiles"):
                    ensure(not counts.get(trouble), f"{kind}, {mode}, {backend}, step {number}: {counts}")
                for i, (old, new) in enumerate(zip(before, after, strict=True)):
                    compare(Path(folder, f"{backend}-{i}.npz"), old, new, f"{kind}, {mode}, {backend}, slice {i}")
            changed += sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
            before = after
            times.append(answer["cpu"]["ms"])
        ensure(changed > 1000, f"{kind}: only {changed} elements changed")
        other.ask(op="close")
    exact = ", ".join(f"{n} {'bit for bit' if ok else 'by interval'}" for n, ok in opened["exact"].items())
    shown = f"opened in {opened['ms']:.0f} ms, read in {min(times):.0f} ms"
    print(f"memory: {mode:6} {kind:28} {changed} changes found, {shown}; {exact}")


def compare(file: Path, old: np.ndarray, new: np.ndarray, what: str) -> None:
    """What was found is what changed."""
    with np.load(file) as found:
        sparse = np.flatnonzero(old != new)
        sparse = sparse[~found["dense"][sparse // TILE]]
        ensure(not found["dense"].any(), f"{what}: tiles went dense")
        ensure(np.array_equal(found["ranks"], sparse), f"{what}: other elements than those that changed")
        ensure(np.array_equal(found["old"], old[sparse]), f"{what}: old bits")
        ensure(np.array_equal(found["new"], new[sparse]), f"{what}: new bits")


def check_freed(device: torch.device, other: Other) -> None:
    """What the trainer frees after a read is free, although the reading process lives."""
    with trainer(device, "foreach", "ipc") as t:
        other.ask(op="open", body=t.registration().model_dump(mode="json"))
        torch.cuda.synchronize(device)
        t.places.drop()
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        for p in t.model.parameters():
            p.grad = None
            p.data = p.data.cpu()
        t.optimizer.state.clear()
        torch.cuda.empty_cache()
        gained, left = torch.cuda.mem_get_info(device)[0] - free, torch.cuda.memory_reserved(device)
        ensure(left < held, f"torch keeps {left} of {held} bytes")
        ensure(gained >= held - left, f"only {gained} of {held - left} freed bytes came back from the device")
        print(f"memory: {gained >> 20} MiB came back when the trainer offloaded, with the reader alive")
        other.ask(op="close")


def check_formulas(device: torch.device) -> None:
    """Which formulas are bit for bit those of this torch on this device."""
    for name in registry.names():
        if name.startswith("torch-adamw/cuda/") and not name.endswith("-fma"):
            formula, result = selftest.choose(name, device.index or 0)
            print(
                f"formula: {name:28} {'bit for bit as ' + formula.name if result.ok else 'NOT EXACT: ' + result.detail}"
            )


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description="Trainer memory on a device between two processes.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", default="ipc,mirror")
    parser.add_argument("--reader", action="store_true", help="be the second process")
    given = parser.parse_args()
    if given.reader:
        return serve()
    device = torch.device(given.device)
    on_cuda = device.type == "cuda"
    if on_cuda:
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        check_formulas(device)
    other = Other()
    try:
        for mode in given.modes.split(","):
            for kind in OPTIMIZERS if on_cuda else ON_CPU:
                check(device, kind, mode, other)
        if on_cuda and "ipc" in given.modes:
            check_freed(device, other)
    finally:
        other.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
