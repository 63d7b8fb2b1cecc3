"""Memory of a CUDA device, shared with another process of the node as plain fields: no pickle, no copy.

One invariant: nothing is opened whose fields were not checked, and an opened allocation is given back by `close`, so
that memory the trainer frees really becomes free.

torch's own calls do the work. Its reference counter is released as soon as a storage is exported: it would keep memory
that the trainer frees in limbo for as long as a reader has not looked again, or for ever when the reader died. What
protects a read here is the generation word and the hold, as for memory of the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from engine.errors import DteError
from transports.memory.shm import DTYPES

EVENT_BYTES: Final = 64
"""Length of an interprocess event's handle (CUDA's cudaIpcEventHandle_t)."""
MAX_HANDLE_BYTES: Final = 1 << 18
"""An allocation's handle is some 66 bytes; of an expandable segment, up to 64 bytes for every 2 MiB or 20 MiB of it."""
MAX_STORAGE_BYTES: Final = 1 << 44
"""More than any device has."""

_UUID = re.compile(r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
_NO_COUNTER: Final = b"/dte-has-no-counter"
"""In place of the name of torch's counter, which was released at export. A missing counter is a case torch expects."""
REMEDY: Final = (
    "Trainer and daemon need the same GPU visible, the same PID and IPC namespaces (in containers: --ipc=host "
    "--pid=host), one user, and no MIG; with expandable segments also kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE. "
    "Otherwise use memory='mirror'."
)


class DeviceMemoryError(DteError):
    """Memory of a device cannot be exported here, or not be opened by another process."""

    code = "device-memory"


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """One storage on the device `device` (its UUID), as another process can open it.

    `handle` names the allocation, which the storage lies in from `offset_bytes` on, `size_bytes` long. `event` is the
    handle of the interprocess event that was recorded after the last write.
    """

    device: str
    handle: bytes
    offset_bytes: int
    size_bytes: int
    event: bytes

    def check(self) -> None:
        """DeviceMemoryError unless every field is one that an export may have made."""
        problem = ""
        if not _UUID.match(self.device):
            problem = f"{self.device[:60]!r} is not the UUID of a device"
        elif not 16 <= len(self.handle) <= MAX_HANDLE_BYTES:
            problem = f"a handle of {len(self.handle)} bytes"
        elif len(self.event) != EVENT_BYTES:
            problem = f"an event handle of {len(self.event)} bytes instead of {EVENT_BYTES}"
        elif not 0 < self.size_bytes <= MAX_STORAGE_BYTES or not 0 <= self.offset_bytes <= MAX_STORAGE_BYTES:
            problem = f"a storage of {self.size_bytes} bytes at byte {self.offset_bytes} of its allocation"
        if problem:
            raise DeviceMemoryError(
                f"not a reference to device memory: {problem}.", remedy="Register again with this version's client."
            )


def check_array(storage: SharedStorage, offset_bytes: int, numel: int, dtype: str) -> torch.dtype:
    """The dtype of an array of `numel` elements at byte `offset_bytes` of a storage; DeviceMemoryError if it is
    misaligned, unknown, or reaches beyond it."""
    storage.check()
    kind = DTYPES.get(dtype)
    if kind is None:
        raise DeviceMemoryError(f"unknown dtype {dtype[:40]!r} of device memory.", remedy="Register again.")
    item = kind.itemsize
    if numel < 0 or offset_bytes < 0 or offset_bytes % item or offset_bytes + numel * item > storage.size_bytes:
        raise DeviceMemoryError(
            f"an array of {numel} elements of {dtype} at byte {offset_bytes} does not lie in a storage of "
            f"{storage.size_bytes} bytes.",
            remedy="Register again; the trainer's memory has moved.",
        )
    return kind


class Event(Protocol):
    """What is needed of an event."""

    def ipc_handle(self) -> bytes:
        """EVENT_BYTES bytes."""


class Cuda(Protocol):
    """The calls to CUDA that sharing memory needs. `index` counts devices as this process sees them."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in memory of such a device."""

    def index_of(self, tensor: torch.Tensor) -> int:
        """The device it lies on."""

    def uuid(self, index: int) -> str:
        """The device's UUID."""

    def find(self, uuid: str) -> int | None:
        """The device with this UUID; None if this process sees none."""

    def share(self, tensor: torch.Tensor) -> tuple[bytes, int, int]:
        """(handle, offset in bytes, size in bytes) of the tensor's storage. RuntimeError where CUDA refuses."""

    def replaced(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage, shared before, has got other memory since (`resize_`)."""

    def open(self, index: int, handle: bytes, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """The storage's bytes, uint8 on the device. RuntimeError where CUDA refuses."""

    def new_event(self, index: int) -> Event:
        """An interprocess event, recorded now."""

    def record(self, event: Event, index: int) -> None:
        """Record the event behind the work of the current stream and of whatever it was recorded for before."""

    def open_event(self, index: int, handle: bytes) -> Event:
        """The event of another process. RuntimeError where CUDA refuses."""

    def begin_copies(self, index: int, event: Event | None) -> None:
        """Let copies of this process wait for `event`, or (None) for the current stream."""

    def copy(self, index: int, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Start to copy device memory into host memory, `into` or new pinned memory. Done after `finish_copies`."""

    def finish_copies(self, index: int) -> None:
        """Wait until the copies are done."""


class TorchCuda:
    """CUDA through torch. Copies run on a stream of their own per device."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def index_of(self, tensor: torch.Tensor) -> int:
        return tensor.get_device()

    def uuid(self, index: int) -> str:
        return str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-").lower()

    def find(self, uuid: str) -> int | None:
        if not torch.cuda.is_available():
            return None
        return next((i for i in range(torch.cuda.device_count()) if self.uuid(i) == uuid), None)

    def share(self, tensor: torch.Tensor) -> tuple[bytes, int, int]:
        storage: Any = tensor.untyped_storage()
        _, handle, size_bytes, offset_bytes, counter, counter_offset, _, _ = storage._share_cuda_()
        torch.UntypedStorage._release_ipc_counter(counter, counter_offset, device=tensor.device)  # type: ignore[no-untyped-call]
        return bytes(handle), int(offset_bytes), int(size_bytes)

    def replaced(self, tensor: torch.Tensor) -> bool:
        # A shared storage carries torch's counter as the owner of its memory; new memory has the allocator again.
        plain = getattr(torch._C, "_has_Standard_Deleter", None)
        return plain is not None and bool(plain(tensor.untyped_storage()._cdata))

    def open(self, index: int, handle: bytes, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        new: Any = torch.UntypedStorage._new_shared_cuda
        storage = new(index, handle, size_bytes, offset_bytes, _NO_COUNTER, 0, b"", False)
        return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)

    def new_event(self, index: int) -> Event:
        with torch.cuda.device(index):
            event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            event.record()
        return event

    def record(self, event: Event, index: int) -> None:
        assert isinstance(event, torch.cuda.Event)
        with torch.cuda.device(index):
            if torch.cuda.is_current_stream_capturing():  # a graph cannot hold another process's event
                return
            stream = torch.cuda.current_stream()
            event.wait(stream)
            event.record(stream)

    def open_event(self, index: int, handle: bytes) -> Event:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        event: Event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), handle)  # type: ignore[no-untyped-call]
        return event

    def begin_copies(self, index: int, event: Event | None) -> None:
        stream = self._stream(index)
        if event is None:
            stream.wait_stream(torch.cuda.current_stream(index))
        else:
            assert isinstance(event, torch.cuda.Event)
            stream.wait_event(event)

    def copy(self, index: int, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        if into is None:
            into = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream(index)):
            into.copy_(source.detach(), non_blocking=True)
        return into

    def finish_copies(self, index: int) -> None:
        self._stream(index).synchronize()

    def _stream(self, index: int) -> torch.cuda.Stream:
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        return self._streams[index]


class Exporter:
    """The owner's side: storages are exported once, and again only when they have moved."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._events: dict[int, Event] = {}
        self._kept: list[torch.UntypedStorage] = []

    def export(self, tensor: torch.Tensor) -> SharedStorage:
        """Share the tensor's storage; DeviceMemoryError where CUDA refuses."""
        index = self._cuda.index_of(tensor)
        try:
            handle, offset_bytes, size_bytes = self._cuda.share(tensor)
            if index not in self._events:
                self._events[index] = self._cuda.new_event(index)
            event = bytes(self._events[index].ipc_handle())
        except RuntimeError as e:
            raise DeviceMemoryError(f"CUDA does not share memory of device {index}: {e}.", remedy=REMEDY) from None
        shared = SharedStorage(self._cuda.uuid(index), handle, offset_bytes, size_bytes, event)
        shared.check()
        return shared

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep memory alive from now on that another process may be told of, whatever its owner does with it."""
        self._kept = [t.untyped_storage() for t in tensors]

    def drop(self) -> None:
        """Nobody reads any more: what the owner frees may go."""
        self._kept = []

    def written(self) -> None:
        """Readers shall wait for what the current streams do up to here."""
        for index, event in self._events.items():
            self._cuda.record(event, index)


class Opened:
    """The reader's side: each storage is opened once, and all are given back with `close`."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._storages: dict[SharedStorage, torch.Tensor] = {}
        self._events: dict[tuple[int, bytes], Event] = {}
        self._waited: set[tuple[int, bytes]] = set()

    def read(self, storage: SharedStorage, arrays: list[tuple[int, int, torch.dtype]]) -> list[torch.Tensor]:
        """Copies in host memory of arrays (offset in bytes, elements, dtype) of one storage, after its last write.

        DeviceMemoryError if it cannot be opened. The arrays have been checked with `check_array`.
        """
        index = self._index(storage)
        try:
            whole = self._storage(index, storage)
            self._wait(index, storage.event)
            parts = [whole[a : a + n * kind.itemsize].view(kind) for a, n, kind in arrays]
            copies = [self._cuda.copy(index, part) for part in parts]
            self._cuda.finish_copies(index)
        except RuntimeError as e:
            raise DeviceMemoryError(
                f"device memory of {storage.device} cannot be read: {type(e).__name__}: {e}.", remedy=REMEDY
            ) from None
        return copies

    def device(self, storage: SharedStorage) -> int:
        """The number of a storage's device in this process; DeviceMemoryError if there is none."""
        return self._index(storage)

    def close(self) -> None:
        """Give all allocations back; they are opened again when they are read again. Events stay open."""
        self._storages.clear()
        self._waited.clear()

    def forget(self) -> None:
        """Also give the events back."""
        self.close()
        self._events.clear()

    def _index(self, storage: SharedStorage) -> int:
        storage.check()
        index = self._cuda.find(storage.device)
        if index is None:
            raise DeviceMemoryError(f"the daemon sees no CUDA device {storage.device}.", remedy=REMEDY)
        return index

    def _storage(self, index: int, storage: SharedStorage) -> torch.Tensor:
        if storage not in self._storages:
            self._storages[storage] = self._cuda.open(index, storage.handle, storage.offset_bytes, storage.size_bytes)
        return self._storages[storage]

    def _wait(self, index: int, handle: bytes) -> None:
        key = (index, handle)
        if key in self._waited:
            return
        if key not in self._events:
            self._events[key] = self._cuda.open_event(index, handle)
        self._cuda.begin_copies(index, self._events[key])
        self._waited.add(key)
