"""Live memory as 16-bit lanes.

One invariant: a lane view never owns or copies the memory it stands for; every write through it is a write to the live
tensor, and is done when the call returns.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.detect.base import I64, U16
from engine.digest import DigestKey, digest_array, digest_live
from engine.errors import InvalidInput
from engine.layout.blocks import Layout, contiguous_shift


class Lanes(Protocol):
    """A contiguous piece of live memory, wherever it lies, as `lanes` 16-bit words of `nbytes` bytes, little-endian.

    What comes out and goes in is in host memory. Indices are integers of any width.
    """

    @property
    def lanes(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> str:
        """Where the memory lies, as torch writes it; views on one device are settled together."""

    def settle(self) -> None:
        """Wait until writes that others have issued to the device are done, so that what is read next is what is."""

    def run(self, start: int, count: int) -> U16:
        """Lanes [start, start + count). It may be the live memory itself: to be read before the next write, only."""

    def gather(self, index: npt.NDArray[Any]) -> U16:
        """The lanes at `index` (in range), as a copy."""

    def scatter(self, index: npt.NDArray[Any], values: U16) -> None:
        """Write `values` to the lanes at `index` (in range, unique)."""

    def write_run(self, start: int, values: U16) -> None:
        """Write consecutive lanes from `start` on."""

    def digest(self, key: DigestKey, layout: Layout) -> int:
        """Digest of what is in memory now, one full pass. `layout`: lane → canonical lane; it may leave lanes out."""


class LaneView:
    """`Lanes` over host memory, a last odd byte zero-padded.

    `raw` is a writable, C-contiguous array of any dtype over the live memory.
    """

    __slots__ = ("_bytes", "_words", "lanes", "nbytes")

    def __init__(self, raw: npt.NDArray[Any]) -> None:
        if not raw.flags.c_contiguous or not raw.flags.writeable:
            raise InvalidInput("live memory must be contiguous and writable.", remedy="Pass the tensor's own storage.")
        self._bytes = raw.reshape(-1).view(np.uint8)
        self.nbytes = self._bytes.size
        self.lanes = -(-self.nbytes // 2)
        aligned = self.nbytes % 2 == 0 and (self.nbytes == 0 or self._bytes.ctypes.data % 2 == 0)
        self._words: U16 | None = self._bytes.view(np.uint16) if aligned else None

    @property
    def device(self) -> str:
        """Always "cpu"."""
        return "cpu"

    def settle(self) -> None:
        """Nothing to wait for."""

    def _whole(self) -> U16:
        """All lanes: the live memory itself, or a padded copy when its length is odd (1-byte dtypes only)."""
        if self._words is not None:
            return self._words
        padded = np.zeros(self.lanes * 2, np.uint8)
        padded[: self.nbytes] = self._bytes
        return padded.view(np.uint16)

    def run(self, start: int, count: int) -> U16:
        """Lanes [start, start + count)."""
        return self._whole()[start : start + count]

    def gather(self, index: npt.NDArray[Any]) -> U16:
        """The lanes at `index`, as a copy."""
        if self._words is not None:
            taken: U16 = self._words[index]
            return taken
        taken = self._whole()[index]
        return taken

    def scatter(self, index: npt.NDArray[Any], values: U16) -> None:
        """Write `values` to the lanes at `index` (in range, unique)."""
        if self._words is not None:
            self._words[index] = values
            return
        at: I64 = index.astype(np.int64) * 2
        self._bytes[at] = (values & 0xFF).astype(np.uint8)
        inside = at + 1 < self.nbytes
        self._bytes[at[inside] + 1] = (values[inside] >> 8).astype(np.uint8)

    def write_run(self, start: int, values: U16) -> None:
        """Write consecutive lanes from `start` on."""
        if self._words is not None:
            self._words[start : start + values.size] = values
            return
        self.scatter(np.arange(start, start + values.size, dtype=np.int64), values)

    def digest(self, key: DigestKey, layout: Layout) -> int:
        """Digest of what is in memory now, one full pass."""
        if self.lanes == 0:
            return 0
        shift = contiguous_shift(layout)
        if shift is not None:
            return digest_array(key, self._whole(), shift)
        return digest_live(key, self._whole(), layout)
