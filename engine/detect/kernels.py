"""The vectorised first pass over a tile range: one streaming read that flags what needs a closer look, and digests θ.

Invariant: an element that is not flagged provably had the same BF16 bits before the step, because the cheap interval
(`FastBound`) contains the exact one and rounding is monotone. Loops are branch-free, so they become vector code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from engine.detect.base import I64, U16, U64
from engine.digest import run_digest

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
_F = TypeVar("_F", bound=Callable[..., object])

BLOCK = 1024
"""Elements whose intermediate values stay in the first-level cache."""


def _kernel(function: _F) -> _F:
    """Compile with C division (no zero check, which would hinder vector code); never fast math."""
    return cast(_F, numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")(function))


@_kernel
def _cheap_interval(theta: F32, m: F32, v: F32, constants: F32, low: F32, high: F32) -> None:
    """Ends of the cheap interval of each element. All arrays of one length."""
    neg_s, inv_b, eps, inv_c = constants[0], constants[1], constants[2], constants[3]
    g_theta, g_q, tiny = constants[4], constants[5], constants[6]
    for j in range(theta.shape[0]):
        q = (neg_s * m[j]) / (np.sqrt(v[j]) * inv_b + eps)
        centre = (theta[j] - q) * inv_c
        d = g_theta * abs(theta[j]) + g_q * abs(q) + tiny
        low[j] = centre - d
        high[j] = centre + d


@_kernel
def _compare(theta: U32, low: U32, high: U32, largest: np.uint32, nan: np.uint16, bits: U16, flags: U8) -> None:
    """BF16 bits of θ, and whether an end of the interval may round to others. FP32 arrays as bit patterns.

    All patterns strictly within 0x8000 of a BF16 value's pattern round to it, so one subtraction and one unsigned
    comparison tell; ties, other signs, infinities and NaN lie outside. Every intermediate is cut back to 32 bits by
    hand: numba would widen to 64, which halves the vector width.
    """
    half, one, sixteen, reach = np.uint32(0x7FFF), np.uint32(1), np.uint32(16), np.uint32(0xFFFE)
    magnitude, infinite = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)
    for j in range(theta.shape[0]):
        t = theta[j]
        now = np.uint32(np.uint32(t + np.uint32(half + np.uint32(np.uint32(t >> sixteen) & one))) >> sixteen)
        edge = np.uint32(np.uint32(now << sixteen) - half)
        size = np.uint32(t & magnitude)
        flags[j] = np.uint8((np.uint32(low[j] - edge) > reach) | (np.uint32(high[j] - edge) > reach) | (size > largest))
        bits[j] = nan if size > infinite else np.uint16(now)


@_kernel
def scan(
    theta: F32,
    m: F32,
    v: F32,
    constants: F32,
    nan_bits: int,
    a: U64,
    b: U64,
    canonical_start: int,
    tile_lanes: int,
    digests: U64,
    flagged: I32,
) -> int:
    """Scan θ, m, v (one length, from a tile boundary on) and return how many element numbers went into `flagged`.

    `constants`: FP32 [8] = neg_s, inv_b, eps, inv_c, g_theta, g_q, tiny, largest known |θ|. `digests[t]` receives
    the digest of tile t if the elements are canonical lanes canonical_start, …; with a negative canonical_start no
    digest is computed. `flagged` must have room for every element.
    """
    n = theta.shape[0]
    theta_bits = theta.view(np.uint32)
    largest = constants.view(np.uint32)[7]
    low = np.empty(BLOCK, np.float32)
    high = np.empty(BLOCK, np.float32)
    low_bits = low.view(np.uint32)
    high_bits = high.view(np.uint32)
    bits = np.empty(BLOCK, np.uint16)
    flags = np.empty(BLOCK, np.uint8)
    words = flags.view(np.uint64)
    nan = np.uint16(nan_bits)
    found = 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        stop = start + size
        _cheap_interval(theta[start:stop], m[start:stop], v[start:stop], constants, low, high)
        _compare(theta_bits[start:stop], low_bits, high_bits, largest, nan, bits, flags)
        if canonical_start >= 0:
            digests[start // tile_lanes] += run_digest(bits[:size], a, b, canonical_start + start)
        flags[size:] = 0
        for w in range((size + 7) // 8):
            if words[w] != 0:
                for j in range(w * 8, w * 8 + 8):
                    if flags[j] != 0:
                        flagged[found] = start + j
                        found += 1
    return found


def ranks_of(flagged: I32, count: int, first_rank: int) -> I64:
    """Slice ranks of the first `count` flagged element numbers."""
    return flagged[:count].astype(np.int64) + first_rank
