"""What a rank declares, as data: shards of trainer memory, and the pieces of canonical tensors that lie in them.

One invariant: a shard's memory is moved once, however many canonical tensors have pieces in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from clients.protocol import Detector
from clients.trainer.home import Home
from engine.layout.blocks import Layout
from engine.records.models import BlockJson, TensorMeta

Names = Callable[[str], str | None] | Mapping[str, str | None]
Detectors = Detector | Mapping[str, Detector] | None


@dataclass(frozen=True)
class OwnedSlice:
    """A part of a canonical tensor that this rank owns, when it owns only ranges of parameters.

    `tensor` is the contiguous local memory (an optimizer's parameter for detector `certified`). It is the flat range of
    the canonical tensor that starts at `offset`, unless `layout` says where its elements lie. `side` tensors are not
    touched by an optimizer: they are copied at every sync instead of moved into shared memory. `cell` and `holders` as
    in OwnedShard.
    """

    name: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    offset: int = 0
    layout: Layout | None = None
    dtype: str | None = None
    detector: Detector | None = None
    side: bool = False
    cell: str | None = None
    holders: int | None = None


@dataclass(frozen=True)
class OwnedRun:
    """Elements [start, start + numel) of a shard's memory, all of one canonical tensor; `layout` says which of it."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    layout: Layout
    dtype: str | None = None
    detector: Detector | None = None


@dataclass(frozen=True)
class OwnedShard:
    """Memory of a trainer that this rank owns, and the runs of canonical tensors in it. What no run names is padding.

    `label` is the trainer's own name for it, for messages. `mirrored`: its memory cannot be moved into shared memory
    (it is part of a buffer that training keeps); it is copied there at every sync.

    `cell`: hex digits that all ranks give to the same content. With `holders` this is a replica: another rank publishes
    the cell, the ranks from `holders` on hold it too, together and whole, and their bits are compared at each version.
    """

    label: str
    home: Home
    runs: tuple[OwnedRun, ...]
    mirrored: bool = False
    cell: str | None = None
    holders: int | None = None


@dataclass(frozen=True)
class Piece:
    """A contiguous run of a shard's elements that belongs to one canonical tensor: one slice of the registration."""

    meta: TensorMeta
    start: int
    numel: int
    blocks: list[BlockJson]
    detector: Detector


@dataclass(eq=False)
class Shard:
    """One memory: `group` counts (optimizer, group) pairs of the plan, for shards with a certified piece. `cell` and
    `holders` as in OwnedShard. `split`: the memory is the upper half of masters, whose lower half is in the optimizer's
    state."""

    label: str
    home: Home
    pieces: tuple[Piece, ...]
    optimizer: int | None = None
    group: int | None = None
    mirrored: bool = False
    model_name: str | None = None
    cell: str | None = None
    holders: int | None = None
    split: bool = False

    @property
    def replica(self) -> bool:
        """Whether another rank publishes what lies here."""
        return self.holders is not None

    @property
    def frozen(self) -> bool:
        """Whether nothing here is expected to be written."""
        return all(p.detector == "frozen" for p in self.pieces)

    @property
    def name(self) -> str:
        """For messages."""
        return self.pieces[0].meta.name if len(self.pieces) == 1 else self.label


@dataclass(frozen=True)
class GroupKey:
    """A parameter group, by position: `load_state_dict` replaces the group's dict, never its place."""

    optimizer: int
    index: int


@dataclass
class Plan:
    """All shards of a rank, the groups they use formulas of, and names that are aliases of a piece's."""

    shards: list[Shard] = field(default_factory=list)
    groups: list[GroupKey] = field(default_factory=list)
    formulas: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def pieces(self) -> list[Piece]:
        """Every piece that is published, in the order of the registration's slices."""
        return [p for s in self.shards for p in s.pieces if not s.replica]

    @property
    def tensors(self) -> list[TensorMeta]:
        """Every canonical tensor once."""
        return list({p.meta.name: p.meta for s in self.shards for p in s.pieces}.values())
