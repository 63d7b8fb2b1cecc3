"""A scripted trainer: real torch AdamW over parameters in shared memory, several ranks in one process if wanted.

Every rank has its control block and its slices; the memory is shared, so one `step` moves all ranks at once, as a step
of a real job does.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from clients.protocol import FormulaSpec, HyperSpec, MemoryRef, RankRegistration, SliceSpec, SyncRequest
from engine.bf16 import lanes_of
from engine.records.models import ITEMSIZE, TensorMeta
from transports.memory.generation import ControlBlock
from transports.memory.shm import DTYPES, ShmFile, aligned, allocate

FORMULA = "torch-adamw/cpu/single"


@dataclass
class Piece:
    """One slice: `theta` is 1-D over shared memory, `index` its canonical element indices (for the test's check)."""

    tensor: str
    blocks: list[Any]
    index: np.ndarray
    detector: str
    theta: torch.Tensor
    ref: MemoryRef
    m: MemoryRef | None = None
    v: MemoryRef | None = None
    param: torch.nn.Parameter | None = None
    cell: str | None = None


@dataclass
class Replica:
    """A copy of `of` on another rank, in memory of its own. Elements from `start` on."""

    of: Piece
    holders: int
    start: int
    blocks: list[Any]
    theta: torch.Tensor
    ref: MemoryRef

    def follow(self) -> None:
        """Hold what the publishing rank holds."""
        self.theta.copy_(self.of.theta[self.start : self.start + self.theta.numel()])


@dataclass
class Rank:
    control: ControlBlock
    pieces: list[Piece] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    hold: int = 0


class ScriptedTrainer:
    """`world` ranks. Tensors: `embed` (two tiles, split by rows), `proj` (split by columns), `norm` and `expert` (one
    owner each), `table` (snapshot), `bias` (FP32, dense), `mask` (7 bytes, dense), `fixed` (frozen)."""

    def __init__(self, world: int = 1, *, run: str = "run", launch: str | None = None, seed: int = 0) -> None:
        self.run = run
        self.launch = launch or f"l{uuid.uuid4().hex[:12]}"
        self.world = world
        self.step_number = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.lr = 2e-6
        self.tensors = [
            TensorMeta(name="embed", shape=(72, 1024)),
            TensorMeta(name="proj", shape=(40, 96)),
            TensorMeta(name="norm", shape=(96,)),
            TensorMeta(name="expert", shape=(64, 64)),
            TensorMeta(name="table", shape=(1000,)),
            TensorMeta(name="bias", shape=(16,), dtype="float32"),
            TensorMeta(name="mask", shape=(7,), dtype="uint8"),
            TensorMeta(name="fixed", shape=(128,)),
        ]
        self._metas = {t.name: t for t in self.tensors}
        self._name = f"dte-{run}-{self.launch}-{os.getpid()}"
        self._file: ShmFile = allocate(f"{self._name}-data", 4 << 20)
        self._used = 0
        self.ranks = [Rank(ControlBlock.create(f"{self._name}-{r}-control")) for r in range(world)]
        self._build()
        params = [p.param for r in self.ranks for p in r.pieces if p.param is not None]
        self.optimizer = torch.optim.AdamW(
            params, lr=self.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, foreach=False
        )
        for r in self.ranks:
            for p in r.pieces:
                if p.param is not None:
                    assert p.m is not None
                    assert p.v is not None
                    self.optimizer.state[p.param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": self._view(p.m),
                        "exp_avg_sq": self._view(p.v),
                    }

    # --- memory ----------------------------------------------------------------------------------------------------

    def _alloc(self, numel: int, dtype: str) -> MemoryRef:
        ref = MemoryRef(file=self._file.name, offset_bytes=self._used, numel=numel, dtype=dtype)  # type: ignore[arg-type]
        self._used += aligned(numel * DTYPES[dtype].itemsize)
        return ref

    def _view(self, ref: MemoryRef) -> torch.Tensor:
        return self._file.tensor(ref.offset_bytes, ref.numel, ref.dtype)

    def _piece(self, rank: int, tensor: str, blocks: list[Any], index: np.ndarray, detector: str) -> None:
        certified = detector == "certified"
        dtype = "float32" if certified or tensor == "table" else self._metas[tensor].dtype
        ref = self._alloc(index.size, dtype)
        theta = self._view(ref)
        if theta.is_floating_point():
            theta.copy_(torch.randn(index.size, generator=self.generator) * 0.02)
        else:
            theta.copy_(torch.randint(0, 200, (index.size,), generator=self.generator))
        piece = Piece(tensor, blocks, index, detector, theta, ref)
        if certified:
            piece.m, piece.v = self._alloc(index.size, dtype), self._alloc(index.size, dtype)
            piece.param = torch.nn.Parameter(theta)
        self.ranks[rank].pieces.append(piece)

    def _build(self) -> None:
        w = self.world
        rows = 72 // w
        columns = 96 // w
        for r in range(w):
            start = r * rows * 1024
            size = rows * 1024
            self._piece(r, "embed", [[[size], 0, [1], start, [1]]], start + np.arange(size), "certified")
            index = (np.arange(40)[:, None] * 96 + r * columns + np.arange(columns)).reshape(-1)
            self._piece(r, "proj", [[[40, columns], 0, [columns, 1], r * columns, [96, 1]]], index, "certified")
        for rank, name, detector in (
            (0, "norm", "certified"),
            (w - 1, "expert", "certified"),
            (0, "table", "snapshot"),
            (0, "bias", "dense"),
            (w - 1, "mask", "dense"),
            (0, "fixed", "frozen"),
        ):
            size = int(np.prod(self._metas[name].shape))
            self._piece(rank, name, [[[size], 0, [1], 0, [1]]], np.arange(size), detector)

    def replicate(self, tensor: str, rank: int, holders: int | None = None, start: int = 0, stop: int = 0) -> Replica:
        """Let `rank` hold a copy of (elements [start, stop) of) the first slice of `tensor`, a flat range, before it
        registers."""
        of = self.piece(tensor)
        of.cell = hashlib.sha256(tensor.encode()).hexdigest()[:32]
        stop = stop or of.index.size
        ref = self._alloc(stop - start, of.ref.dtype)
        blocks = [[[stop - start], 0, [1], int(of.index[start]), [1]]]
        replica = Replica(of, rank if holders is None else holders, start, blocks, self._view(ref), ref)
        replica.follow()
        self.ranks[rank].replicas.append(replica)
        return replica

    def flip(self, replica: Replica, element: int = 0, bit: int = 16) -> None:
        """Change one bit of a replica."""
        words = replica.theta.view({2: torch.int16, 4: torch.int32}[replica.theta.element_size()])
        words[element] ^= 1 << bit

    def close(self) -> None:
        """Give the names back (what the last process does when it ends)."""
        for r in self.ranks:
            r.control.unlink()
            r.control.close()
        self._file.unlink()
        self._file.close()

    # --- training --------------------------------------------------------------------------------------------------

    def piece(self, tensor: str, rank: int | None = None) -> Piece:
        """The (first) slice of a tensor."""
        ranks = self.ranks if rank is None else [self.ranks[rank]]
        return next(p for r in ranks for p in r.pieces if p.tensor == tensor)

    def step(self, *, without: Iterable[str] = (), times: int = 1) -> None:
        """Optimizer steps with random gradients; tensors in `without` get none. `step_number` grows by one."""
        skipped = set(without)
        for _ in range(times):
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            for r in self.ranks:
                for p in r.pieces:
                    if p.param is not None:
                        grad = torch.randn(p.param.numel(), generator=self.generator) * 0.01
                        p.param.grad = None if p.tensor in skipped else grad
            for r in self.ranks:
                r.control.begin_mutation()
            self.optimizer.step()
            for replica in (x for r in self.ranks for x in r.replicas):
                replica.follow()
            for r in self.ranks:
                r.control.end_mutation()
        self.step_number += 1

    def counters(self, rank: int) -> list[int]:
        """Per-parameter step counters of a rank's slices."""
        return [
            0 if p.param is None else int(self.optimizer.state[p.param]["step"].item()) for p in self.ranks[rank].pieces
        ]

    def bits(self) -> dict[str, np.ndarray]:
        """The canonical lanes of every tensor as they are now: what a receiver of this step must hold."""
        out: dict[str, np.ndarray] = {}
        for meta in self.tensors:
            pieces = [p for r in self.ranks for p in r.pieces if p.tensor == meta.name]
            if ITEMSIZE[meta.dtype] == 1:
                out[meta.name] = lanes_of(pieces[0].theta, meta.dtype).copy()
                continue
            k = ITEMSIZE[meta.dtype] // 2
            lanes = np.zeros((int(np.prod(meta.shape)), k), np.uint16)
            for p in pieces:
                lanes[p.index] = lanes_of(p.theta, meta.dtype).reshape(-1, k)
            out[meta.name] = lanes.reshape(-1)
        return out

    # --- requests --------------------------------------------------------------------------------------------------

    def take_hold(self, rank: int) -> int:
        """A new hold of one rank."""
        self.ranks[rank].hold = self.ranks[rank].control.hold()
        return self.ranks[rank].hold

    def released(self, rank: int = 0, timeout_s: float = 60.0) -> bool:
        """Wait for the release of the newest hold."""
        return self.ranks[rank].control.wait_released(self.ranks[rank].hold, timeout_s)

    def specs(self, rank: int) -> list[SliceSpec]:
        return [
            SliceSpec(
                slice=i,
                tensor=p.tensor,
                numel=p.index.size,
                blocks=p.blocks,
                detector=p.detector,  # type: ignore[arg-type]
                theta=p.ref,
                exp_avg=p.m,
                exp_avg_sq=p.v,
                group=0 if p.param is not None else None,
                cell=p.cell,
            )
            for i, p in enumerate(self.ranks[rank].pieces)
        ]

    def replica_specs(self, rank: int) -> list[SliceSpec]:
        return [
            SliceSpec(
                slice=i,
                tensor=r.of.tensor,
                numel=r.theta.numel(),
                blocks=r.blocks,
                detector="dense",
                theta=r.ref,
                cell=r.of.cell,
                holders=r.holders,
            )
            for i, r in enumerate(self.ranks[rank].replicas)
        ]

    def registration(self, rank: int = 0, **changes: Any) -> RankRegistration:
        """`POST /ranks` of a rank, with a new hold taken."""
        owned = {p.tensor for p in self.ranks[rank].pieces} | {r.of.tensor for r in self.ranks[rank].replicas}
        body: dict[str, Any] = {
            "run": self.run,
            "launch": self.launch,
            "rank": rank,
            "world": self.world,
            "step": self.step_number,
            "control": self.ranks[rank].control.name,
            "generation": self.ranks[rank].control.generation,
            "hold": self.take_hold(rank),
            "tensors": [t for t in self.tensors if t.name in owned],
            "groups": [FormulaSpec(name=FORMULA)],
            "slices": self.specs(rank),
            "replicas": self.replica_specs(rank),
        }
        return RankRegistration(**{**body, **changes})

    def sync(self, version: int | None, *, rank: int = 0, epoch: int = 1, **changes: Any) -> SyncRequest:
        """`POST /sync` of a rank for the last step, with a new hold taken."""
        group = self.optimizer.param_groups[0]
        body: dict[str, Any] = {
            "run": self.run,
            "launch": self.launch,
            "epoch": epoch,
            "rank": rank,
            "step": self.step_number,
            "generation": self.ranks[rank].control.generation,
            "hold": self.take_hold(rank),
            "version": version,
            "hypers": [
                HyperSpec(lr=group["lr"], beta1=0.9, beta2=0.999, eps=group["eps"], weight_decay=group["weight_decay"])
            ],
            "steps": self.counters(rank),
        }
        return SyncRequest(**{**body, **changes})
