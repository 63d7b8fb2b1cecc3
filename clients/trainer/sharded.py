"""What torch keeps of a sharded parameter on this rank: which part of the whole it is, and the memory it lies in.

One invariant: all that is not public in torch's DTensor and FSDP2 is read and written here and nowhere else, and is
looked for before any memory is touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from clients.trainer.home import Home
from clients.trainer.shards import OwnedRun, OwnedShard
from engine.errors import InvalidInput, StateConflict, UnsupportedOptimizer
from engine.layout.blocks import Block, Layout
from engine.models.boxes import row_major

_NEEDED: Final = (
    "sharded_param",
    "_sharded_param_data",
    "padded_sharded_param_size",
    "fsdp_placement",
    "pin_memory",
    "reset_sharded_param",
)


@dataclass(frozen=True)
class Region:
    """A rectangle of a whole tensor: what one rank holds of it, contiguous in memory."""

    whole: tuple[int, ...]
    corner: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements held."""
        return prod(self.shape)

    def layout(self) -> Layout:
        """The held elements, in memory order, to elements of the whole."""
        there = row_major(self.whole)
        first = sum(at * step for at, step in zip(self.corner, there, strict=True))
        block = Block(self.shape, 0, row_major(self.shape), first, there).normalised()
        return Layout((block,), self.numel, prod(self.whole))

    def key(self, name: str) -> str:
        """The same on every rank that holds the same part of the tensor `name`."""
        text = f"{name}|{self.whole}|{self.corner}|{self.shape}"
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def region_of(name: str, tensor: torch.Tensor) -> Region:
    """What this rank holds of `tensor`: torch's own answer for a DTensor, the whole of a plain one."""
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Region(whole, (0,) * len(whole), whole)
    if any(p.is_partial() for p in tensor.placements):
        raise InvalidInput(
            f"{name} is placed as {tensor.placements}: no rank holds its values, only parts of their sum.",
            remedy="Redistribute it to Replicate or Shard before registering.",
        )
    shape, corner = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    held = tuple(tensor._local_tensor.shape)
    if not prod(held):
        return Region(whole, (0,) * len(whole), (0,) * len(whole) or (0,))
    if held != tuple(shape):
        raise InvalidInput(
            f"{name}: this rank holds {held} of {whole}, but its placements {tensor.placements} over "
            f"{tuple(tensor.device_mesh.shape)} ranks say {tuple(shape)} (torch {torch.__version__}).",
            remedy="Declare what each rank holds with TorchSource(slices=[OwnedSlice(…)]).",
        )
    return Region(whole, tuple(corner), held)


@dataclass(frozen=True, eq=False)
class LocalHome:
    """A DTensor that FSDP2 does not manage (tensor parallel, or ignored)."""

    param: DTensor

    def memory(self) -> torch.Tensor:
        return self.param._local_tensor

    def replace(self, memory: torch.Tensor) -> None:
        self.param._local_tensor = memory


@dataclass(frozen=True, eq=False)
class FsdpHome:
    """A DTensor that FSDP2 shards. Its memory is FSDP's input of the all-gather: flat, with padding at its end.

    `kept` is FSDP's own record of the parameter. The DTensor's local tensor is a view of the same memory.
    """

    param: DTensor
    kept: Any

    def memory(self) -> torch.Tensor:
        if self.kept.sharded_param is not self.param:
            raise StateConflict(
                "a sharded parameter was replaced by another object.",
                remedy="Close this source and register a new one (load_state_dict with assign=True replaces "
                "parameters).",
            )
        flat: torch.Tensor = self.kept._sharded_param_data
        local = self.param._local_tensor
        if local.numel() and local.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            raise StateConflict(
                "a sharded parameter lies in other memory than what FSDP gathers it from.",
                remedy="Load weights with load_state_dict, or write them into the parameter in place.",
            )
        return flat

    def replace(self, memory: torch.Tensor) -> None:
        dim = self.kept.fsdp_placement.dim
        length = self.param._local_tensor.size(dim)
        self.kept._sharded_param_data = memory
        self.param._local_tensor = memory.view(self.kept.padded_sharded_param_size).narrow(dim, 0, length)


class Sharded:
    """The parameters that FSDP2 manages in some modules."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        """Collect them, and put them back into their sharded state if the last forward left them gathered.

        UnsupportedOptimizer or InvalidInput for those whose memory cannot be moved.
        """
        self._kept: dict[int, Any] = {}
        for model in models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
                    for kept in _records(module):
                        if kept.pin_memory:
                            raise InvalidInput(
                                f"{kept} is offloaded to pinned memory, which cannot be shared memory as well.",
                                remedy="Use CPUOffloadPolicy(pin_memory=False).",
                            )
                        self._kept[id(kept.sharded_param)] = kept

    def owned(
        self, name: str, param: DTensor, region: Region, cell: str | None = None, holders: int | None = None
    ) -> OwnedShard:
        """This rank's memory of `param` as a declaration: the region it holds, and padding."""
        kept = self._kept.get(id(param))
        home: Home = LocalHome(param) if kept is None else FsdpHome(param, kept)
        run = OwnedRun(name, region.whole, 0, region.numel, region.layout())
        return OwnedShard(name, home, (run,), cell=cell, holders=holders)


def _records(module: FSDPModule) -> list[Any]:
    """FSDP's records of the parameters that `module` gathers at its forward."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.11 has one group a module
        groups = [g for g in [getattr(state, "_fsdp_param_group", None)] if g is not None]
    found = [kept for group in groups for kept in group.fsdp_params]
    missing = sorted({a for kept in found for a in _NEEDED if not hasattr(kept, a)})
    if missing:
        raise UnsupportedOptimizer(
            f"FSDP2 of torch {torch.__version__} keeps its parameters in another way than is known here: "
            f"{', '.join(missing)} missing.",
            remedy="Use another version of torch, or declare what each rank holds with "
            "TorchSource(slices=[OwnedSlice(…)]).",
        )
    return found
