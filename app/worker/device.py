"""Trainer memory on CUDA devices, as the worker reads it: in parts, copied to pinned host memory.

One invariant: no allocation of the trainer's is mapped while its hold is released, so what the trainer frees then is
free.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from clients.protocol import CudaRef
from transports.memory.cuda_ipc import Cuda, DeviceMemoryError, Opened, SharedStorage, check_array


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A flat array on a device. Nothing is opened before it is read."""

    storage: SharedStorage
    offset_bytes: int
    numel: int
    dtype: torch.dtype
    memory: DeviceMemory

    def read(self, first: int, last: int) -> torch.Tensor:
        """A copy of elements [first, last) in host memory; DeviceMemoryError if the device's cannot be read."""
        at = self.offset_bytes + first * self.dtype.itemsize
        return self.memory.opened.read(self.storage, [(at, last - first, self.dtype)])[0]


Array = torch.Tensor | DeviceArray
"""A flat array of the trainer's, mapped or on a device."""


def part(array: Array, first: int, last: int) -> torch.Tensor:
    """Elements [first, last) in host memory: the trainer's own, or a copy."""
    return array.read(first, last) if isinstance(array, DeviceArray) else array[first:last]


class DeviceMemory:
    """What one rank has on devices."""

    def __init__(self, cuda: Cuda) -> None:
        self.opened = Opened(cuda)

    def array(self, ref: CudaRef) -> DeviceArray:
        """The array that `ref` names, checked but not opened. DeviceMemoryError if it cannot be one."""
        try:
            handle, event = (base64.b64decode(x, validate=True) for x in (ref.handle, ref.event))
        except binascii.Error:
            raise DeviceMemoryError("a handle of device memory is not base64.", remedy="Register again.") from None
        storage = SharedStorage(ref.device, handle, ref.storage_offset_bytes, ref.storage_bytes, event)
        kind = check_array(storage, ref.offset_bytes, ref.numel, ref.dtype)
        return DeviceArray(storage, ref.offset_bytes, ref.numel, kind, self)

    def try_out(self, arrays: Iterable[Array]) -> None:
        """Open every storage once and read an element of it. DeviceMemoryError where that is not possible."""
        firsts = {a.storage: a for a in arrays if isinstance(a, DeviceArray) and a.numel}
        try:
            for array in firsts.values():
                array.read(array.numel - 1, array.numel)
        finally:
            self.rest()

    def device_of(self, arrays: Sequence[Array]) -> int | None:
        """The number, in this process, of the device that the first of the arrays on one lies on."""
        found = next((a for a in arrays if isinstance(a, DeviceArray)), None)
        return None if found is None else self.opened.device(found.storage)

    def rest(self) -> None:
        """The trainer may go on: keep nothing mapped."""
        self.opened.close()

    def close(self) -> None:
        self.opened.forget()
