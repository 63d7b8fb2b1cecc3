"""Live memory as 16-bit lanes.

One invariant: a `LaneView` never owns or copies the memory it stands for; every write through it is a write to the
live tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.detect.base import I64, U16
from engine.errors import InvalidInput


class LaneView:
    """A contiguous piece of live memory seen as `lanes` 16-bit words, little-endian, a last odd byte zero-padded.

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

    def whole(self) -> U16:
        """All lanes: the live memory itself, or a padded copy when its length is odd (1-byte dtypes only)."""
        if self._words is not None:
            return self._words
        padded = np.zeros(self.lanes * 2, np.uint8)
        padded[: self.nbytes] = self._bytes
        return padded.view(np.uint16)

    def run(self, start: int, count: int) -> U16:
        """Lanes [start, start + count)."""
        return self.whole()[start : start + count]

    def gather(self, index: npt.NDArray[Any]) -> U16:
        """The lanes at `index`, as a copy."""
        if self._words is not None:
            taken: U16 = self._words[index]
            return taken
        taken = self.whole()[index]
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
