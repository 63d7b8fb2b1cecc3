"""How the daemon can read a tensor of the trainer: moved into shared memory, copied there, or exported from a device.

One invariant: a tensor is moved only where it lies in ordinary memory of the host; on a device training keeps the
memory it has.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Literal, Protocol, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from clients.protocol import AnyRef, CudaRef, ElementType, MemoryRef
from clients.trainer.arena import Arena, Slot, dtype_name, slot_bytes
from engine.errors import InvalidInput
from transports.memory.cuda_ipc import Cuda, DeviceMemoryError, Exporter
from transports.memory.shm import DTYPES

MemoryMode = Literal["auto", "ipc", "mirror"]
"""`ipc`: memory of devices is read where it is. `mirror`: everything is copied to the host at every sync. `auto`: the
first, and where that is not possible the second."""


class Place(Protocol):
    """Where one tensor can be read. `moves`: the tensor itself lies there."""

    @property
    def moves(self) -> bool: ...

    @property
    def ref(self) -> AnyRef:
        """The place for the daemon."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the one that is read here."""

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` could be read here in place of the one that was."""

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is known to have the bits that were read here last."""

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Read `tensor` here from now on; returns what training is to use, itself unless `moves`."""


def _shape(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


class Mirror:
    """A copy in shared memory, made by every `take`. It is complete after `Places.settle`."""

    moves = False

    def __init__(self, slot: Slot, tensor: torch.Tensor, cuda: Cuda, busy: set[int]) -> None:
        self._slot, self._cuda, self._busy = slot, cuda, busy
        self._shape = _shape(tensor)
        self._address: int | None = None

    @property
    def ref(self) -> MemoryRef:
        return self._slot.ref

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == self._address and self.fits(tensor)

    def fits(self, tensor: torch.Tensor) -> bool:
        return _shape(tensor)[:3] == self._shape[:3]

    def same(self, tensor: torch.Tensor) -> bool:
        return self._slot.same(tensor)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        self._address = tensor.data_ptr()
        if self._cuda.on_device(tensor):
            index = self._cuda.index_of(tensor)
            if index not in self._busy:
                self._busy.add(index)
                self._cuda.begin_copies(index, None)
            self._cuda.copy(index, tensor, self._slot.view)
        else:
            self._slot.take(tensor)
        return tensor


class Exported:
    """Memory of a device, where training keeps it."""

    moves = False

    def __init__(self, tensor: torch.Tensor, cuda: Cuda, exporter: Exporter) -> None:
        self._cuda, self._exporter = cuda, exporter
        self._shape = _shape(tensor)
        self._address: int | None = None
        self._ref: CudaRef | None = None

    @property
    def ref(self) -> CudaRef:
        assert self._ref is not None
        return self._ref

    def holds(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return (
            tensor.data_ptr() == self._address
            and self.fits(tensor)
            and not self._storage.expired()  # type: ignore[no-untyped-call]  # or another storage may have got the number of the dead one
            and storage._cdata == self._number
            and not self._cuda.replaced(tensor)
        )

    def fits(self, tensor: torch.Tensor) -> bool:
        return _shape(tensor) == self._shape

    def same(self, tensor: torch.Tensor) -> bool:
        return False

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        name = dtype_name(tensor.dtype)
        if name is None:
            raise InvalidInput(f"a tensor of {tensor.dtype} cannot be published.")
        shared = self._exporter.export(tensor)
        storage = tensor.untyped_storage()
        self._address, self._number = tensor.data_ptr(), storage._cdata
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._ref = CudaRef(
            device=shared.device,
            handle=base64.b64encode(shared.handle).decode(),
            storage_offset_bytes=shared.offset_bytes,
            storage_bytes=shared.size_bytes,
            offset_bytes=tensor.data_ptr() - storage.data_ptr(),
            numel=tensor.numel(),
            dtype=cast("ElementType", name),
            event=base64.b64encode(shared.event).decode(),
        )
        return tensor


class Places:
    """Gives every tensor of a rank its place."""

    def __init__(self, mode: MemoryMode, cuda: Cuda) -> None:
        """DeviceMemoryError comes from `of` where `mode` is not `mirror` and CUDA exports nothing."""
        self._mode, self._cuda = mode, cuda
        self._exporter = Exporter(cuda)
        self._busy: set[int] = set()
        self.mirrored = 0
        self.exported = 0

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """InvalidInput if `ipc` was asked for and there is nothing for it."""
        if self._mode == "ipc" and not any(self._cuda.on_device(t) for t in tensors):
            raise InvalidInput(
                "memory='ipc' was asked for, but no declared tensor lies on a CUDA device.",
                remedy="Use memory='auto': tensors of the host are shared without a copy anyway.",
            )

    def need_bytes(self, tensor: torch.Tensor, *, side: bool) -> int:
        """Shared memory that a tensor's place takes."""
        return 0 if not side and self.exports(tensor) else slot_bytes(tensor)

    def of(self, tensor: torch.Tensor, arena: Arena, *, side: bool) -> Place:
        """A place for `tensor`, which `take` has to fill. `side`: it is to be copied whatever the mode."""
        if not side and self.exports(tensor):
            self.exported += 1
            return Exported(tensor, self._cuda, self._exporter)
        slot = arena.slot_like(tensor)
        if side or self._mode == "mirror":
            self.mirrored += not side
            return Mirror(slot, tensor, self._cuda, self._busy)
        return slot

    def moves(self, tensor: torch.Tensor, *, side: bool) -> bool:
        """Whether the tensor itself will lie in its place, and no longer where it does."""
        return not side and self._mode != "mirror" and not self._cuda.on_device(tensor)

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Everything was taken: finish the copies, and let readers wait for what the streams still write. `tensors`
        are read from now on, and kept alive until `drop`."""
        for index in self._busy:
            self._cuda.finish_copies(index)
        self._busy.clear()
        self._exporter.written()
        self._exporter.keep(t for t in tensors if self.exported and self._cuda.on_device(t))

    def written(self) -> None:
        """An optimizer step was queued: readers wait for its end."""
        self._exporter.written()

    def drop(self) -> None:
        """The reads are over; what the trainer frees may go."""
        self._exporter.drop()

    def exports(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies where it is read in place."""
        return self._mode != "mirror" and self._cuda.on_device(tensor)


def part_of(ref: AnyRef, start: int, numel: int) -> AnyRef:
    """Elements [start, start + numel) of an array."""
    if start == 0 and numel == ref.numel:
        return ref
    skipped = start * DTYPES[ref.dtype].itemsize
    return ref.model_copy(update={"offset_bytes": ref.offset_bytes + skipped, "numel": numel})


def whole_numbers(values: list[int | torch.Tensor]) -> list[int]:
    """Step counters as numbers. Those on devices come over in one piece per device, not one by one."""
    out: list[int] = [0] * len(values)
    there: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            there.setdefault(value.device, []).append(i)
        else:
            out[i] = int(value)
    for numbers in there.values():
        found = torch.stack([cast(torch.Tensor, values[i]).reshape(()).double() for i in numbers]).tolist()
        for i, number in zip(numbers, found, strict=True):
            out[i] = int(number)
    return out


def host_floats(values: list[torch.Tensor | None], otherwise: float) -> list[float]:
    """Tensors of one element as numbers, `otherwise` for None. Those on devices come over in one piece per device."""
    out = [otherwise] * len(values)
    there: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if value is not None:
            there.setdefault(value.device, []).append(i)
    for numbers in there.values():
        found = torch.stack([cast(torch.Tensor, values[i]).detach().reshape(()).double() for i in numbers]).tolist()
        for i, number in zip(numbers, found, strict=True):
            out[i] = number
    return out


__all__ = [
    "DeviceMemoryError",
    "Exported",
    "MemoryMode",
    "Mirror",
    "Place",
    "Places",
    "host_floats",
    "part_of",
    "whole_numbers",
]
