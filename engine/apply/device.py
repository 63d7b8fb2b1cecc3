"""Live memory on an accelerator as 16-bit lanes: digests are summed where the weights lie, only changes travel.

One invariant: beside the weights, at most `SCRATCH_BYTES` of device memory (and B words, 1/1024 of the tensor) are in
use at a time, and what a call read or wrote is complete when it returns.

**Streams.** Reads may come from any thread while the engine computes: they run on that thread's current stream and end
in a copy to the host, which waits for it. Writes come while nothing is served: they wait for the whole device first,
since a forward pass may still run on another stream, and again afterwards, so that whatever starts next sees them. Each
call selects the tensor's device for its thread. `settle` waits for the whole device, once before each full pass.

**Arithmetic.** int64 addition and multiplication wrap modulo 2^64, which is what the digest is taken in. A lane b is
read as the int16 b xor 0x8000 = b − 32768, which saves a wider copy: Σ w·(b + 1) = Σ w·(b − 32768) + 32769·Σ w.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.apply.lanes import Lanes, LaneView
from engine.detect.base import U16, U64
from engine.digest import ROW, DigestKey, check_reach
from engine.errors import InvalidInput
from engine.layout.blocks import Block, Layout

SCRATCH_BYTES = 32 << 20
"""Device memory a call may use for itself."""
_BYTES_A_LANE = 32  # of scratch: at most three int64 of each lane of a piece at a time, and an int16
_FLIP = -0x8000
_BACK = 0x8001
_MASK64 = (1 << 64) - 1


class DeviceLanes:
    """`Lanes` over a tensor on any device (the CPU included, for tests).

    `tensor`: contiguous, of a dtype of 2 or more bytes an element; InvalidInput for another one. It is not copied, and
    its version counter does not move when lanes are written.
    """

    __slots__ = ("_device", "_module", "_piece", "_words", "device", "lanes", "nbytes")

    def __init__(self, tensor: torch.Tensor, *, scratch_bytes: int = SCRATCH_BYTES) -> None:
        kind = tensor.device.type
        if tensor.layout != torch.strided or not tensor.is_contiguous() or kind == "meta":
            raise InvalidInput(
                f"a tensor on {tensor.device} ({tensor.layout}, strides {tensor.stride()}) is no contiguous memory.",
                remedy="Make it contiguous, and materialise it, before it is received into.",
            )
        if tensor.element_size() % 2:
            raise InvalidInput(
                f"1-byte elements ({tensor.dtype}) on {tensor.device} are not served.",
                remedy="Keep the tensor in CPU memory, or ignore it.",
            )
        # `.data` has a version counter of its own: our writes are not to be taken for somebody else's.
        self._words = tensor.data.view(-1).view(torch.int16)
        self._device = tensor.device
        self.device = str(tensor.device)
        self.lanes: int = self._words.numel()
        self.nbytes = 2 * self.lanes
        self._piece = max(ROW, scratch_bytes // _BYTES_A_LANE)
        self._module: Any = None if kind == "cpu" else torch.get_device_module(self._device)

    def settle(self) -> None:
        """Wait for everything that was issued to the device."""
        if self._module is not None:
            self._module.synchronize(self._device)

    def run(self, start: int, count: int) -> U16:
        """Lanes [start, start + count), a copy in host memory."""
        self._check(start, start + count)
        with self._here():
            return _to_host(self._words.narrow(0, start, count))

    def gather(self, index: npt.NDArray[Any]) -> U16:
        """The lanes at `index`, a copy in host memory. InvalidInput for one out of range."""
        self._check_index(index)
        out = np.empty(index.size, np.uint16)
        with self._here():
            for a in range(0, index.size, self._piece):
                at = self._put(index[a : a + self._piece].astype(np.int64))
                out[a : a + self._piece] = _to_host(self._words.take(at))
        return out

    def scatter(self, index: npt.NDArray[Any], values: U16) -> None:
        """Write `values` to the lanes at `index` (unique). InvalidInput, and nothing written, for one out of range."""
        self._check_index(index)
        with self._writing():
            for a in range(0, index.size, self._piece):
                at = self._put(index[a : a + self._piece].astype(np.int64))
                self._words.index_copy_(0, at, self._put(values[a : a + self._piece].astype(np.uint16).view(np.int16)))

    def write_run(self, start: int, values: U16) -> None:
        """Write consecutive lanes from `start` on."""
        self._check(start, start + values.size)
        with self._writing():
            for a in range(0, values.size, self._piece):
                piece = values[a : a + self._piece].astype(np.uint16).view(np.int16)
                self._words.narrow(0, start + a, piece.size).copy_(self._put(piece))

    def digest(self, key: DigestKey, layout: Layout) -> int:
        """Digest of what is in memory now: one pass on the device, piece by piece."""
        check_reach(key, self.lanes, layout)
        if not layout.blocks:
            return 0
        b = key.b_words(max(block.dst_last for block in layout.blocks) + 1)
        total = 0
        with self._here():
            words = self._put(key.a.view(np.int64)), self._put(b.view(np.int64))
            sums: list[torch.Tensor] = []
            for block in (block.normalised() for block in layout.blocks):
                if (block.src_strides, block.dst_strides) == ((1,), (1,)):
                    total += _BACK * _run_weight(key.a, b, block.dst_offset, block.numel)
                    sums += self._run_sums(words, block)
                else:
                    sums += [self._cell_sum(words, cell) for cell in _cells(block, self._piece)]
            total += int(torch.stack(sums).sum().cpu())
        return total & _MASK64

    # --- digest on the device -------------------------------------------------------------------------------------

    def _run_sums(self, words: tuple[torch.Tensor, torch.Tensor], block: Block) -> Iterator[torch.Tensor]:
        """Σ w·(b − 32768) of a run: [rows, 4096] products for whole rows, the cut ones at its ends one by one."""
        a, b = words
        at, to = block.dst_offset, block.dst_offset + block.numel
        shift = block.src_offset - block.dst_offset
        while at < to:
            column, row = at % ROW, at // ROW
            rows = 0 if column else min((to - at) // ROW, self._piece // ROW)
            n = rows * ROW or min(ROW - column, to - at)
            lanes = self._words.narrow(0, at + shift, n).bitwise_xor(_FLIP)
            if rows:
                yield ((lanes.view(rows, ROW) * a).sum(1) * b.narrow(0, row, rows)).sum()
            else:
                yield (lanes * a.narrow(0, column, n)).sum() * b.narrow(0, row, 1).sum()
            at += n

    def _cell_sum(self, words: tuple[torch.Tensor, torch.Tensor], cell: Block) -> torch.Tensor:
        """Σ w·(b + 1) of one piece of a block, its canonical indices made on the device."""
        a, b = words
        index = torch.full((), cell.dst_offset, dtype=torch.int64, device=self._device)
        for n, stride in zip(cell.shape, cell.dst_strides, strict=True):
            index = index.unsqueeze(-1) + torch.arange(n, dtype=torch.int64, device=self._device) * stride
        weights = a.take(index & (ROW - 1))
        index >>= ROW.bit_length() - 1
        weights *= b.take(index)
        del index
        constant = weights.sum() * _BACK
        first = self._words.storage_offset() + cell.src_offset
        weights *= self._words.as_strided(cell.shape, cell.src_strides, first).bitwise_xor(_FLIP)
        return weights.sum() + constant

    # --- the device -----------------------------------------------------------------------------------------------

    @contextmanager
    def _here(self) -> Iterator[None]:
        """This thread works on the tensor's device; also on tensors that were made in inference mode."""
        guard = getattr(self._module, "device", None)
        with torch.inference_mode(), nullcontext() if guard is None else guard(self._device):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._here():
            self.settle()
            try:
                yield
            finally:
                self.settle()

    def _put(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _check(self, first: int, stop: int) -> None:
        # Out of range on a device is an assertion there, which ends all work of the process with it.
        if not 0 <= first <= stop <= self.lanes:
            raise InvalidInput(f"lanes [{first}, {stop}) do not lie in memory of {self.lanes} lanes.")

    def _check_index(self, index: npt.NDArray[Any]) -> None:
        if index.size:
            self._check(int(index.min()), int(index.max()) + 1)


def _to_host(words: torch.Tensor) -> U16:
    copy: U16 = words.to("cpu", copy=True).numpy().view(np.uint16)
    return copy


def _run_weight(a: U64, b: U64, start: int, count: int) -> int:
    """Σ w(i) over canonical lanes [start, start + count), mod 2^64."""
    first, last = -(-start // ROW), (start + count) // ROW
    if first > last:  # inside one row
        return int(a[start % ROW : start % ROW + count].sum()) * int(b[last])
    total = int(a.sum()) * int(b[first:last].sum())
    if start % ROW:
        total += int(a[start % ROW :].sum()) * int(b[first - 1])
    tail = (start + count) % ROW
    return total + (int(a[:tail].sum()) * int(b[last]) if tail else 0)


def _cells(block: Block, limit: int) -> Iterator[Block]:
    """The block in pieces of at most `limit` elements."""
    if block.numel <= limit:
        yield block
        return
    inner = block.numel // block.shape[0]
    step = max(1, limit // inner)
    for k in range(0, block.shape[0], step):
        shape = (min(step, block.shape[0] - k), *block.shape[1:])
        src, dst = block.src_offset + k * block.src_strides[0], block.dst_offset + k * block.dst_strides[0]
        if inner > limit:  # one of the outer dimension: cut further in
            yield from _cells(Block(shape[1:], src, block.src_strides[1:], dst, block.dst_strides[1:]), limit)
        else:
            yield Block(shape, src, block.src_strides, dst, block.dst_strides)


def view_of(name: str, flat: torch.Tensor) -> Lanes:
    """A lane view of a flat, contiguous tensor where it lies. `name` is for the InvalidInput if it has no memory."""
    if flat.device.type == "cpu":
        return LaneView(flat.detach().view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8))
    try:
        return DeviceLanes(flat)
    except InvalidInput as error:
        raise InvalidInput(f"{name!r}: {error.message}", remedy=error.remedy) from None
