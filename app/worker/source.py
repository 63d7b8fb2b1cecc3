"""A rank's slices as the worker sees them: validated declarations and mapped trainer memory.

One invariant: no tensor is touched before its declaration was checked against its canonical tensor, its layout and the
size of the shared file it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from app.worker.device import Array, DeviceArray, DeviceMemory, part
from clients.protocol import AnyRef, CudaRef, MemoryRef, RankRegistration, SliceSpec
from engine.bf16 import Rounding, join_master, lanes_of
from engine.detect.base import TILE, U16, SliceGeometry, tile_count
from engine.errors import InvalidInput, LayoutError, UnsupportedOptimizer
from engine.layout.algebra import contiguous, from_json, scaled, to_json, validate_slice
from engine.layout.blocks import Layout
from engine.optimizers import registry
from engine.records.models import ITEMSIZE, BlockJson, SliceDecl, TensorMeta
from transports.memory.cuda_ipc import Cuda, TorchCuda
from transports.memory.shm import ShmFile, open_existing

_MOMENT_DTYPES = {"float32", "bfloat16", "float16"}
_REGISTER_AGAIN = "Correct the registration and register again."


@dataclass(frozen=True, slots=True)
class SliceShape:
    """A slice in lanes: `layout` maps rank (lane of the slice) to canonical lane; `blocks` is the same as JSON."""

    spec: SliceSpec
    meta: TensorMeta
    lanes: int
    layout: Layout
    blocks: list[BlockJson]

    @property
    def tiles(self) -> int:
        return tile_count(self.lanes)

    @property
    def geometry(self) -> SliceGeometry:
        return SliceGeometry(self.meta.name, self.layout)


@dataclass(frozen=True, slots=True)
class SliceSource:
    """A slice with its memory. `theta` as the trainer stores it, 1-D; `m`, `v` only for the certified detector. With
    `remainder`, θ is the upper half of split masters, which are put together only where they are read."""

    shape: SliceShape
    theta: Array
    m: Array | None
    v: Array | None
    remainder: Array | None = None

    @property
    def arrays(self) -> list[Array]:
        """Everything it consists of."""
        return [x for x in (self.theta, self.m, self.v, self.remainder) if x is not None]

    @property
    def rounding(self) -> Rounding:
        """How masters become the bits that receivers hold."""
        return "even" if self.remainder is None else "away"

    def state(self, tile_start: int, tile_stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """θ, m and v of the certified detector in host memory, and the tile they begin with: the whole slice where it
        lies there as such, else a copy of the tiles asked for."""
        assert self.m is not None
        assert self.v is not None
        theta, m, v = self.theta, self.m, self.v
        on_device = isinstance(theta, DeviceArray) or isinstance(m, DeviceArray) or isinstance(v, DeviceArray)
        if self.remainder is None and not on_device:
            numel = self.shape.spec.numel
            return part(theta, 0, numel), part(m, 0, numel), part(v, 0, numel), 0
        first, last = tile_start * TILE, min(tile_stop * TILE, self.shape.spec.numel)
        held, low = part(theta, first, last), self.remainder
        masters = held if low is None else join_master(held, part(low, first, last))
        return masters, part(m, first, last), part(v, first, last), tile_start

    def read_lanes(self, tile_start: int, tile_stop: int) -> U16:
        """The lanes the receiver would store for tiles [tile_start, tile_stop), from memory as it is now."""
        item = ITEMSIZE[self.shape.meta.dtype]
        first = tile_start * TILE * 2 // item
        last = min(tile_stop * TILE * 2 // item, self.shape.spec.numel)
        return lanes_of(part(self.theta, first, last), self.shape.meta.dtype)


def _where(spec: SliceSpec) -> str:
    return f"slice {spec.slice} ({spec.tensor})"


def _check_ref(spec: SliceSpec, what: str, ref: AnyRef, dtypes: set[str] | None) -> None:
    if ref.numel != spec.numel:
        raise InvalidInput(
            f"{what} of {_where(spec)} has {ref.numel} elements, the slice {spec.numel}.", remedy=_REGISTER_AGAIN
        )
    if dtypes is not None and ref.dtype not in dtypes:
        raise InvalidInput(
            f"{what} of {_where(spec)} is {ref.dtype}; it must be {' or '.join(sorted(dtypes))}.",
            remedy="Use the detector 'snapshot' or 'dense' for this parameter.",
        )


def _check_certified(spec: SliceSpec, meta: TensorMeta, groups: int) -> None:
    if meta.dtype != "bfloat16":
        raise InvalidInput(
            f"{_where(spec)}: the certified detector needs a tensor the receiver stores as bfloat16, not {meta.dtype}.",
            remedy="Declare this tensor with the detector 'dense' or 'snapshot'.",
        )
    if spec.exp_avg is None or spec.exp_avg_sq is None or spec.group is None:
        raise InvalidInput(
            f"{_where(spec)}: the certified detector needs exp_avg, exp_avg_sq and group.",
            remedy="Register after the optimizer state exists, or use the detector 'snapshot' or 'dense'.",
        )
    if not 0 <= spec.group < groups:
        raise InvalidInput(f"{_where(spec)} names group {spec.group} of {groups}.", remedy=_REGISTER_AGAIN)
    if spec.remainder is None:
        _check_ref(spec, "theta", spec.theta, {"float32"})
    else:
        _check_ref(spec, "theta beside a remainder", spec.theta, {"bfloat16"})
        _check_ref(spec, "remainder", spec.remainder, {"int16"})
    _check_ref(spec, "exp_avg", spec.exp_avg, _MOMENT_DTYPES)
    _check_ref(spec, "exp_avg_sq", spec.exp_avg_sq, _MOMENT_DTYPES)


def slice_shape(spec: SliceSpec, meta: TensorMeta) -> SliceShape:
    """The slice in lanes, after its layout was checked. InvalidInput or LayoutError name what does not fit."""
    numel = prod(meta.shape)
    try:
        elements = from_json(spec.blocks, spec.numel, numel)
        validate_slice(elements, spec.numel)
    except LayoutError as error:
        raise LayoutError(f"{_where(spec)}: {error.message}", remedy=error.remedy or _REGISTER_AGAIN) from None
    item = ITEMSIZE[meta.dtype]
    if item == 1:
        b = elements.blocks[0].normalised() if len(elements.blocks) == 1 else None
        whole = spec.numel == numel and b is not None and b.src_strides == b.dst_strides == (1,)
        if numel and not whole:
            raise LayoutError(
                f"{_where(spec)}: a tensor of 1-byte elements must be one whole slice in canonical order.",
                remedy="Let one rank register the whole tensor.",
            )
        lanes = -(-numel // 2)
        layout = contiguous(0, lanes, lanes)
    else:
        layout = scaled(elements, item // 2)
        lanes = layout.src_numel
    blocks: list[Any] = to_json(layout)
    return SliceShape(spec, meta, lanes, layout, blocks)


def check_slice(spec: SliceSpec, metas: dict[str, TensorMeta], groups: int) -> SliceShape:
    """Check one declaration; returns it in lanes."""
    meta = metas.get(spec.tensor)
    if meta is None:
        raise InvalidInput(f"{_where(spec)} belongs to no declared tensor.", remedy=_REGISTER_AGAIN)
    _check_ref(spec, "theta", spec.theta, None)
    if spec.detector == "certified":
        _check_certified(spec, meta, groups)
    elif spec.remainder is not None:
        raise InvalidInput(
            f"{_where(spec)} has a remainder, which only the certified detector reads.", remedy=_REGISTER_AGAIN
        )
    return slice_shape(spec, meta)


def check_registration(registration: RankRegistration) -> list[SliceShape]:
    """Check everything that can be checked without touching memory. Raises InvalidInput, LayoutError or
    UnsupportedOptimizer, each naming the slice."""
    metas = {t.name: t for t in registration.tensors}
    if len(metas) != len(registration.tensors):
        raise InvalidInput("a tensor is declared twice.", remedy=_REGISTER_AGAIN)
    if registration.rank >= registration.world:
        raise InvalidInput(
            f"rank {registration.rank} does not exist in a world of {registration.world}.", remedy=_REGISTER_AGAIN
        )
    if [s.slice for s in registration.slices] != list(range(len(registration.slices))):
        raise InvalidInput("slices must be numbered 0, 1, 2, … in order.", remedy=_REGISTER_AGAIN)
    known = registry.names()
    for group in registration.groups:
        if group.name not in known:
            raise UnsupportedOptimizer(
                f"no formula is known for the optimizer {group.name!r}.",
                remedy="Register its parameters with the detector 'snapshot' (keeps the previous BF16) or 'dense'.",
            )
    return [check_slice(s, metas, len(registration.groups)) for s in registration.slices]


class Memory:
    """The memory of one rank: shared files, each mapped once, and arrays on devices."""

    def __init__(self, cuda: Cuda | None = None) -> None:
        self._files: dict[str, ShmFile] = {}
        self.device = DeviceMemory(cuda or TorchCuda())

    def array(self, ref: AnyRef) -> Array:
        """The array `ref` names, without a copy. SharedMemoryInvalid or DeviceMemoryError if it must not be read."""
        if isinstance(ref, CudaRef):
            return self.device.array(ref)
        file = self._files.get(ref.file)
        if file is None:
            file = self._files[ref.file] = open_existing(ref.file)
        return file.tensor(ref.offset_bytes, ref.numel, ref.dtype)

    def source(self, shape: SliceShape) -> SliceSource:
        """Map the memory of one slice."""
        spec = shape.spec
        certified = spec.detector == "certified"
        return SliceSource(
            shape,
            self.array(spec.theta),
            self.array(spec.exp_avg) if certified and spec.exp_avg is not None else None,
            self.array(spec.exp_avg_sq) if certified and spec.exp_avg_sq is not None else None,
            self.array(spec.remainder) if certified and spec.remainder is not None else None,
        )

    def keep_only(self, names: set[str]) -> None:
        """Give up the mappings of files no slice names any more."""
        for name in [n for n in self._files if n not in names]:
            self._files.pop(name).close()

    def close(self) -> None:
        self.keep_only(set())
        self.device.close()


def files_named(specs: Sequence[SliceSpec]) -> set[str]:
    """The shared files that these slices name."""
    refs = (r for s in specs for r in (s.theta, s.exp_avg, s.exp_avg_sq, s.remainder))
    return {r.file for r in refs if isinstance(r, MemoryRef)}


def declaration(shape: SliceShape, digest_hex: str) -> SliceDecl:
    """What the launch record says of a slice."""
    return SliceDecl(
        slice=shape.spec.slice,
        tensor=shape.meta.name,
        lanes=shape.lanes,
        blocks=shape.blocks,
        digest=digest_hex,
        cell=shape.spec.cell,
    )
