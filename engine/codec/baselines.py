"""What other encodings of the same change would cost: the yardsticks of `dte bench wire`.

One invariant: nothing here is ever sent; every function returns bits per changed entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from engine.codec.streams import I64, U16, gaps_of
from engine.errors import InvalidInput


def pulse_bits(canonical: I64, bits: U16, level: int = 1) -> float:
    """Bits an entry of the plain layout: int32 flat indices, then the new BF16 bits, through zstd together.

    `canonical`: sorted flat indices of one tensor, below 2^31. 0.0 if there are none.
    """
    if canonical.size == 0:
        return 0.0
    if int(canonical.max()) >= 1 << 31 or int(canonical.min()) < 0:
        raise InvalidInput("an int32 index holds flat indices in [0, 2^31) only.")
    raw = canonical.astype("<i4").tobytes() + bits.astype("<u2").tobytes()
    return 8 * len(zstandard.ZstdCompressor(level=level).compress(raw)) / canonical.size


def entropy_bits(symbols: npt.NDArray[Any]) -> float:
    """Order-0 entropy of the symbols, in bits each; 0.0 if there are none."""
    if symbols.size == 0:
        return 0.0
    _, counts = np.unique(symbols, return_counts=True)
    p = counts / symbols.size
    return float(-(p * np.log2(p)).sum())


def gap_entropy_bits(ranks: I64) -> float:
    """Order-0 entropy of the gaps between sorted ranks, in bits an entry."""
    return entropy_bits(gaps_of(np.asarray(ranks, np.int64)))


def diff_entropy_bits(diffs: U16) -> float:
    """Order-0 entropy of the differences mod 2^16 (the ulp differences), in bits an entry."""
    return entropy_bits(diffs)
