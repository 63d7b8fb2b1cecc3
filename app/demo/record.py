"""A recorded optimizer step: what the benchmarks need to run change detection on real state again.

A record is a folder with `state.json` and four flat arrays over all parameters in order: `theta.npy`, `exp_avg.npy`,
`exp_avg_sq.npy` (FP32, after the step) and `prev_bits.npy` (BF16 bits before it). NumPy's format without objects: it
can be mapped, and reading it cannot run code. Invariant: `state.json` is written last, so a record that has one is
complete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import InvalidInput
from engine.optimizers.base import Hyper

SCHEMA = 1
_FLOAT_ARRAYS = ("theta", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class RecordedTensor:
    """One parameter's place in the flat arrays."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int


@dataclass(frozen=True)
class Recording:
    """An opened record. The arrays are read-only maps of the files."""

    formula: str
    step: int
    hyper: Hyper
    tensors: tuple[RecordedTensor, ...]
    theta: npt.NDArray[np.float32]
    exp_avg: npt.NDArray[np.float32]
    exp_avg_sq: npt.NDArray[np.float32]
    prev_bits: npt.NDArray[np.uint16]

    @property
    def numel(self) -> int:
        return int(self.theta.size)


class Recorder:
    """Records the step between `before` and `after`, replacing what the folder held."""

    def __init__(self, directory: Path, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._directory = directory
        self._parameters = list(parameters)
        self._tensors: list[RecordedTensor] = []
        start = 0
        for name, parameter in self._parameters:
            self._tensors.append(RecordedTensor(name, tuple(parameter.shape), start, parameter.numel()))
            start += parameter.numel()
        self._numel = start
        directory.mkdir(parents=True, exist_ok=True)

    def before(self) -> None:
        """Store the BF16 bits of the present weights. Call right before `optimizer.step()`."""
        (self._directory / "state.json").unlink(missing_ok=True)
        out = self._create("prev_bits", np.uint16)
        for place, (_, parameter) in zip(self._tensors, self._parameters, strict=True):
            bits = parameter.detach().bfloat16().view(torch.int16).reshape(-1).numpy().view(np.uint16)
            out[place.start : place.start + place.numel] = bits
        out.flush()

    def after(self, optimizer: torch.optim.Optimizer, formula: str, hyper: Hyper, step: int) -> None:
        """Store weights and moments after the step, then the description that makes the record complete."""
        outs = {name: self._create(name, np.float32) for name in _FLOAT_ARRAYS}
        for place, (_, parameter) in zip(self._tensors, self._parameters, strict=True):
            here = slice(place.start, place.start + place.numel)
            state = optimizer.state[parameter]
            outs["theta"][here] = parameter.detach().reshape(-1).numpy()
            outs["exp_avg"][here] = state["exp_avg"].reshape(-1).numpy()
            outs["exp_avg_sq"][here] = state["exp_avg_sq"].reshape(-1).numpy()
        for out in outs.values():
            out.flush()
        description = {
            "schema_version": SCHEMA,
            "formula": formula,
            "step": step,
            "hyper": asdict(hyper),
            "numel": self._numel,
            "tensors": [[t.name, list(t.shape)] for t in self._tensors],
        }
        partial = self._directory / "state.json.partial"
        partial.write_text(json.dumps(description))
        partial.replace(self._directory / "state.json")

    def _create(self, name: str, dtype: type[np.generic]) -> np.memmap[Any, np.dtype[Any]]:
        path = self._directory / f"{name}.npy"
        return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(self._numel,))


def is_complete(directory: Path) -> bool:
    """Whether the folder holds a complete record."""
    return (directory / "state.json").is_file()


def load(directory: Path) -> Recording:
    """Open a record; InvalidInput when the folder does not hold a complete and consistent one."""
    remedy = "Record one with: dte demo --record DIR."
    try:
        description = json.loads((directory / "state.json").read_text())
        if description["schema_version"] != SCHEMA:
            raise InvalidInput(f"the record in {directory} has another schema version.", remedy=remedy)
        numel = int(description["numel"])
        tensors: list[RecordedTensor] = []
        start = 0
        for name, shape in description["tensors"]:
            count = int(np.prod(shape, dtype=np.int64))
            tensors.append(RecordedTensor(str(name), tuple(int(n) for n in shape), start, count))
            start += count
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name in (*_FLOAT_ARRAYS, "prev_bits"):
            array = np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            expected = np.uint16 if name == "prev_bits" else np.float32
            if array.shape != (numel,) or array.dtype != expected or start != numel:
                raise InvalidInput(f"the array {name} in {directory} does not fit its description.", remedy=remedy)
            arrays[name] = array
        hyper = Hyper(**description["hyper"])
        return Recording(
            formula=str(description["formula"]),
            step=int(description["step"]),
            hyper=hyper,
            tensors=tuple(tensors),
            **arrays,
        )
    except FileNotFoundError:
        raise InvalidInput(f"there is no complete record in {directory}.", remedy=remedy) from None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InvalidInput(f"the record in {directory} cannot be read: {e}.", remedy=remedy) from None
