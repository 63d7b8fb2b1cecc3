"""A CUDA device that does not exist: its memory is a shared file, its handles name the file.

One invariant: what is read through a handle is what lies there at that moment, and only after the event was waited for.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Self

import torch

from transports.memory.shm import ShmFile, allocate, open_existing

UUID = "01234567-89ab-cdef-0123-456789abcdef"
_count = itertools.count()


@dataclass(frozen=True)
class FakeEvent:
    handle: bytes

    def ipc_handle(self) -> bytes:
        return self.handle


@dataclass
class FakeCuda:
    """Both sides at once. `refuses`: sharing, or opening, fails as CUDA does. `calls` lists what was done."""

    refuses: str = ""
    calls: list[str] = field(default_factory=list)
    files: list[ShmFile] = field(default_factory=list)
    reallocated: bool = False
    device: str = UUID

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A copy of `like` in memory of the device."""
        size = max(64, like.numel() * like.element_size())
        self.files.append(allocate(f"dte-fake-{os.getpid()}-{next(_count)}", size))
        flat = self.files[-1].tensor(0, like.numel(), like.dtype)
        view = flat.as_strided(like.shape, like.stride())
        view.copy_(like.detach())
        return view

    def _file(self, tensor: torch.Tensor) -> ShmFile | None:
        at = tensor.untyped_storage().data_ptr()
        for file in self.files:
            start = file.tensor(0, file.size_bytes, "uint8").data_ptr()
            if start <= at < start + file.size_bytes:
                return file
        return None

    def on_device(self, tensor: torch.Tensor) -> bool:
        return self._file(tensor) is not None

    def index_of(self, tensor: torch.Tensor) -> int:
        return 0

    def uuid(self, index: int) -> str:
        return self.device

    def find(self, uuid: str) -> int | None:
        return 3 if uuid == UUID else None

    def share(self, tensor: torch.Tensor) -> tuple[bytes, int, int]:
        if self.refuses == "share":
            raise RuntimeError("CUDA error: operation not supported")
        file = self._file(tensor)
        assert file is not None
        self.calls.append("share")
        return file.name.encode().ljust(66, b" "), 0, tensor.untyped_storage().nbytes()

    def replaced(self, tensor: torch.Tensor) -> bool:
        return self.reallocated

    def open(self, index: int, handle: bytes, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        assert index == 3
        if self.refuses == "open":
            raise RuntimeError("CUDA error: invalid resource handle")
        self.calls.append("open")
        with open_existing(handle.decode().strip()) as file:
            return file.tensor(offset_bytes, size_bytes, torch.uint8)

    def new_event(self, index: int) -> FakeEvent:
        return FakeEvent(b"e" * 64)

    def record(self, event: object, index: int) -> None:
        self.calls.append("record")

    def open_event(self, index: int, handle: bytes) -> FakeEvent:
        return FakeEvent(handle)

    def begin_copies(self, index: int, event: object | None) -> None:
        self.calls.append("begin" if event is None else "wait")

    def copy(self, index: int, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        self.calls.append("copy")
        into = torch.empty_like(source) if into is None else into
        into.copy_(source.detach())
        return into

    def finish_copies(self, index: int) -> None:
        self.calls.append("finish")

    def close(self) -> None:
        for file in self.files:
            file.unlink()
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
