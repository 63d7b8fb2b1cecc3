"""Places in shared memory for a rank's tensors, filled one after the other so that memory is not needed twice.

One invariant: a slot's address and size never change while the arena lives. What moved away is copied back into its
slot, so references the daemon holds stay right.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from clients.protocol import MemoryRef
from transports.memory.shm import DTYPES, ShmFile, aligned, allocate

SEGMENT_BYTES: Final = 256 << 20
_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """The name of a dtype in records and references, or None if it cannot be carried."""
    return _DTYPE_NAMES.get(dtype)


def slot_bytes(tensor: torch.Tensor) -> int:
    """Bytes a slot for `tensor` takes, padding included."""
    return aligned(max(1, tensor.numel() * tensor.element_size()))


@dataclass(frozen=True)
class Slot:
    """A place for one tensor: `view` lies over shared memory with the tensor's shape and strides, `ref` says where."""

    view: torch.Tensor
    ref: MemoryRef

    @property
    def moves(self) -> bool:
        """The tensor that lies here is the trainer's own."""
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`'s storage is this slot."""
        return tensor.data_ptr() == self.view.data_ptr() and tensor.stride() == self.view.stride()

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` could be copied here unchanged."""
        same = tensor.shape == self.view.shape and tensor.dtype == self.view.dtype
        return same and tensor.device == self.view.device

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has the bits that lie here."""
        mine, theirs = (x.detach().cpu().reshape(-1).view(torch.uint8) for x in (self.view, tensor))
        return torch.equal(mine, theirs)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` in, bit for bit; returns the view to use in its place."""
        self.view.copy_(tensor.detach())
        return self.view


class Arena:
    """Shared memory files of about SEGMENT_BYTES each, handed out slot by slot."""

    def __init__(self, name_of: Callable[[int], str], total_bytes: int) -> None:
        """`name_of(k)` names the k-th file; `total_bytes` is the sum of `slot_bytes` to come (it sizes the files)."""
        self._name_of = name_of
        self._files: list[ShmFile] = []
        self._used_bytes = 0
        self._left_bytes = total_bytes
        # At a normal exit the names go at once; after a crash the next start removes them.
        self._finalizer = weakref.finalize(self, _unlink_all, self._files, os.getpid())

    @property
    def size_bytes(self) -> int:
        """Shared memory reserved so far."""
        return sum(f.size_bytes for f in self._files)

    def slot_like(self, tensor: torch.Tensor) -> Slot:
        """A zeroed place with the dtype, shape and strides of `tensor` (dense, without overlap).

        SharedMemoryFull when there is no room; nothing half-made is left.
        """
        need_bytes = slot_bytes(tensor)
        if not self._files or self._used_bytes + need_bytes > self._files[-1].size_bytes:
            size_bytes = max(need_bytes, min(SEGMENT_BYTES, self._left_bytes))
            self._files.append(allocate(self._name_of(len(self._files)), size_bytes))
            self._used_bytes = 0
        file, offset_bytes = self._files[-1], self._used_bytes
        self._used_bytes += need_bytes
        self._left_bytes -= need_bytes
        flat = file.tensor(offset_bytes, tensor.numel(), tensor.dtype)
        ref = MemoryRef(
            file=file.name,
            offset_bytes=offset_bytes,
            numel=tensor.numel(),
            dtype=_DTYPE_NAMES[tensor.dtype],  # type: ignore[arg-type]
        )
        return Slot(flat.as_strided(tensor.shape, tensor.stride()), ref)

    def close(self) -> None:
        """Remove the names. Tensors in the slots stay valid as ordinary memory of this process. Idempotent."""
        self._finalizer()


def _unlink_all(files: list[ShmFile], pid: int) -> None:
    if os.getpid() != pid:  # a forked child must not take its parent's names away
        return
    for file in files:
        file.unlink()
        file.close()
    files.clear()
