"""Gets the benchmarks the recorded step they run on, making it first when there is none.

Invariant: what is measured is real RL state, never random numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from app.demo.record import RecordedTensor, Recording, is_complete, load
from engine.bf16 import round_to_bf16_bits
from engine.detect.base import U16, SliceGeometry
from engine.errors import DteError
from engine.layout.algebra import identity
from engine.optimizers import registry
from engine.optimizers.base import Formula, StepContext

DEFAULT_RECORD = Path(".cache") / "bench"
_STEPS = 6


@dataclass(frozen=True)
class Workload:
    """A recorded step in memory: flat FP32 arrays, and the bits before it."""

    formula: Formula
    ctx: StepContext
    tensors: tuple[RecordedTensor, ...]
    theta: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    prev_bits: U16

    @property
    def numel(self) -> int:
        return self.theta.numel()

    def slices(self) -> Iterator[tuple[SliceGeometry, slice]]:
        """Each tensor's geometry and its place in the flat arrays."""
        for t in self.tensors:
            yield SliceGeometry(t.name, identity(t.numel)), slice(t.start, t.start + t.numel)

    def new_bits(self) -> U16:
        """BF16 bits after the step."""
        return np.concatenate([round_to_bf16_bits(self.theta[at]) for _, at in self.slices()])


def say(text: str) -> None:
    """Progress, on stderr: stdout is for results."""
    print(f"· {text}", file=sys.stderr, flush=True)


def recording(directory: Path | None) -> Recording:
    """The record in `directory`, or the cached one, made by a short run of the demo if it does not exist yet.

    InvalidInput for a directory that was named and holds no record.
    """
    if directory is not None:
        return load(directory)
    if not is_complete(DEFAULT_RECORD):
        from app.demo.run import DemoOptions, run_demo

        say(f"no recorded step in {DEFAULT_RECORD}: recording one with a short RL run (about two minutes)")
        if run_demo(DemoOptions(steps=_STEPS, record=DEFAULT_RECORD)) != 0:
            raise DteError("the run that was to be recorded did not end bit-exact.", remedy="Run dte demo to see why.")
    return load(DEFAULT_RECORD)


def workload(directory: Path | None) -> Workload:
    """Read a record into memory."""
    record = recording(directory)
    say(f"{record.numel:,} parameters, optimizer step {record.step}, {record.formula}")
    return Workload(
        formula=registry.get(record.formula),
        ctx=StepContext(record.hyper, record.step),
        tensors=record.tensors,
        theta=torch.from_numpy(np.array(record.theta)),
        exp_avg=torch.from_numpy(np.array(record.exp_avg)),
        exp_avg_sq=torch.from_numpy(np.array(record.exp_avg_sq)),
        prev_bits=np.array(record.prev_bits),
    )
