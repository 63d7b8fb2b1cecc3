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

from engine.detect.base import I64, U64
from engine.digest import run_digest

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
_F = TypeVar("_F", bound=Callable[..., object])

BLOCK = 1024
"""Elements whose intermediate values stay in the first-level cache."""


def _kernel(function: _F) -> _F:
    """Compile with C division (no zero check, which would hinder vector code); never fast math."""
    return cast(_F, numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")(function))


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
    neg_s, inv_b, eps, inv_c = constants[0], constants[1], constants[2], constants[3]
    g_theta, g_q, tiny, largest = constants[4], constants[5], constants[6], constants[7]
    n = theta.shape[0]
    theta_bits = theta.view(np.uint32)
    low = np.empty(BLOCK, np.float32)
    high = np.empty(BLOCK, np.float32)
    low_bits = low.view(np.uint32)
    high_bits = high.view(np.uint32)
    bits = np.empty(BLOCK, np.uint16)
    flags = np.empty(BLOCK, np.uint8)
    words = flags.view(np.uint64)
    half, one, sixteen = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
    nan = np.uint16(nan_bits)
    found = 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        t, mom, var, tb = (
            theta[start : start + size],
            m[start : start + size],
            v[start : start + size],
            theta_bits[start : start + size],
        )
        for j in range(size):
            q = (neg_s * mom[j]) / (np.sqrt(var[j]) * inv_b + eps)
            centre = (t[j] - q) * inv_c
            d = g_theta * abs(t[j]) + g_q * abs(q) + tiny
            low[j] = centre - d
            high[j] = centre + d
        for j in range(size):
            u, x, y = tb[j], low_bits[j], high_bits[j]
            now = (u + half + ((u >> sixteen) & one)) >> sixteen
            least = (x + half + ((x >> sixteen) & one)) >> sixteen
            most = (y + half + ((y >> sixteen) & one)) >> sixteen
            known = (abs(t[j]) <= largest) & (low[j] <= high[j])
            flags[j] = np.uint8((least != now) | (most != now) | (not known))
            bits[j] = nan if t[j] != t[j] else np.uint16(now)
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
