"""The compiled passes: `scan` streams everything, `judge` looks at what was flagged, `sweep` does both in pieces.

Invariant: an element that `scan` does not flag, or `judge` calls unchanged, provably had the same BF16 bits before the
step: the cheap interval (`FastBound`) contains the exact one, which `judge` computes as `bounds.invert_step` does, and
rounding is monotone. The loops of `scan` are branch-free, so they become vector code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from engine.detect.base import U16, U64
from engine.digest import run_digest

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
_F = TypeVar("_F", bound=Callable[..., object])

BLOCK = 1024
"""Elements whose intermediate values stay in the first-level cache."""


PIECE = 1 << 14
"""Elements scanned before the flagged among them are judged (192 KiB of state: the second-level cache)."""


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
def _compare(theta: U32, low: U32, high: U32, largest: np.uint32, rounding: U32, bits: U16, flags: U8) -> None:
    """BF16 bits of θ, and whether an end of the interval may round to others. FP32 arrays as bit patterns.

    All patterns strictly within 0x8000 of a BF16 value's pattern round to it, wherever ties go, so one subtraction and
    one unsigned comparison tell; ties, other signs, infinities and NaN lie outside. Every intermediate is cut back to
    32 bits by hand: numba would widen to 64, which halves the vector width.
    """
    half, sixteen, reach = np.uint32(0x7FFF), np.uint32(16), np.uint32(0xFFFE)
    magnitude = np.uint32(0x7FFF_FFFF)
    bias, parity, infinite, nan = rounding[0], rounding[1], rounding[2], np.uint16(rounding[3])
    for j in range(theta.shape[0]):
        t = theta[j]
        now = np.uint32(np.uint32(t + np.uint32(bias + np.uint32(np.uint32(t >> sixteen) & parity))) >> sixteen)
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
    rounding: U32,
    a: U64,
    b: U64,
    canonical_start: int,
    tile_lanes: int,
    digests: U64,
    flagged: I32,
) -> int:
    """Scan θ, m, v (one length, from a tile boundary on) and return how many element numbers went into `flagged`.

    `constants`: FP32 [8] = neg_s, inv_b, eps, inv_c, g_theta, g_q, tiny, largest known |θ|. `rounding`: as packed by
    `cpu.pack_rounding`. m and v: as stored, widened to FP32. `digests[t]` receives
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
    found = 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        stop = start + size
        _cheap_interval(theta[start:stop], m[start:stop], v[start:stop], constants, low, high)
        _compare(theta_bits[start:stop], low_bits, high_bits, largest, rounding, bits, flags)
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


@_kernel
def _end_bits(x: float, up: bool) -> np.uint32:
    """Bits of the FP32 value nearest to a finite x that is not inside of it: not below x if `up`, else not above."""
    f = np.float32(x)
    bits = f.view(np.uint32)
    sign = np.uint32(0x8000_0000)
    if x == 0.0:
        return np.uint32(0) if up else sign
    inside = np.float64(f) < x if up else np.float64(f) > x
    if not inside:
        return bits
    if f == np.float32(0.0):
        return np.uint32(1) if up else np.uint32(sign | np.uint32(1))
    grows = (f > np.float32(0.0)) == up
    return np.uint32(bits + np.uint32(1)) if grows else np.uint32(bits - np.uint32(1))


@_kernel
def _bf16(bits: np.uint32, bias: np.uint32, parity: np.uint32) -> np.uint32:
    return np.uint32(np.uint32(bits + np.uint32(bias + ((bits >> np.uint32(16)) & parity))) >> np.uint32(16))


@_kernel
def judge(
    theta: F32, m: F32, v: F32, step: F64, rounding: U32, flagged: I32, count: int, verdict: U8, old: U16
) -> None:
    """The exact interval of the first `count` flagged elements: verdict 0 unchanged, 1 changed with these old bits, 2
    ambiguous or unknown. `step`: FP64 [18] as packed by `cpu.pack_step`; m and v as stored, widened to FP32."""
    c, s, b, eps, q_rel, root_abs = step[0], step[1], step[2], step[3], step[4], step[5]
    num_abs, q_abs, out_abs, rounds_decay, decay_rel, largest = step[6], step[7], step[8], step[9], step[10], step[11]
    m_scale, m_rel, m_floor, v_scale, v_rel, v_floor = step[12], step[13], step[14], step[15], step[16], step[17]
    bias, parity = rounding[0], rounding[1]
    unit = 2.0**-24
    size = abs(c)
    for k in range(count):
        i = flagged[k]
        verdict[k] = np.uint8(2)
        t = np.float64(theta[i])
        mom, var = np.float64(m[i]) * m_scale, np.float64(v[i]) * v_scale
        root = np.sqrt(var)
        den = root / b + eps
        root_slack, num_slack = root_abs, num_abs
        if v_rel != 0.0:
            error = max(var * v_rel, v_floor)
            down, up = root - np.sqrt(max(var - error, 0.0)), np.sqrt(var + error) - root
            root_slack = max(down, up) / b + root_abs
        if m_rel != 0.0:
            num_slack = abs(s) * max(abs(mom) * m_rel, m_floor) + num_abs
        if (m_scale == 0.0 and m[i] != 0.0) or (v_scale == 0.0 and v[i] != 0.0):
            continue
        q = s * mom / den
        room = den - root_slack
        q_size, t_size = abs(q), abs(t)
        q_err = q_size * (q_rel + 1.01 * root_slack / room) + 1.01 * num_slack / room + q_abs
        a = unit * t_size + q_err + out_abs
        back = t + q
        if rounds_decay != 0.0:
            a = a + unit * (abs(back) + a) + out_abs
        centre = back / c
        a = a / size
        d = a + 1.05 * (decay_rel / size) * (abs(centre) + a)
        d = d * (1.0 + 2.0**-20) + 2.0**-50 * (t_size + q_size) / size
        lo, hi = centre - d, centre + d
        if not (np.isfinite(lo) and np.isfinite(hi) and room > 0.0 and t_size <= largest):
            continue
        least, most = _bf16(_end_bits(lo, False), bias, parity), _bf16(_end_bits(hi, True), bias, parity)
        if least == most:
            now = _bf16(np.float32(theta[i]).view(np.uint32), bias, parity)
            verdict[k] = np.uint8(0 if least == now else 1)
            old[k] = np.uint16(least)


@_kernel
def sweep(
    theta: F32,
    m: F32,
    v: F32,
    fast: F32,
    step: F64,
    rounding: U32,
    a: U64,
    b: U64,
    canonical_start: int,
    tile_lanes: int,
    digests: U64,
    sent: I32,
    verdict: U8,
    old: U16,
) -> int:
    """`scan` and `judge` piece by piece, while the piece is in the cache; returns how many elements were not unchanged.

    Those go into `sent` (element numbers, ascending), with their verdict (1, 2) and old bits (0 for verdict 2). The
    three outputs must have room for every element.
    """
    n = theta.shape[0]
    hits = np.empty(PIECE, np.int32)
    judged = np.empty(PIECE, np.uint8)
    bits = np.empty(PIECE, np.uint16)
    found = 0
    for start in range(0, n, PIECE):
        stop = min(start + PIECE, n)
        tile = start // tile_lanes
        t, mom, var = theta[start:stop], m[start:stop], v[start:stop]
        origin = canonical_start + start if canonical_start >= 0 else -1
        count = scan(t, mom, var, fast, rounding, a, b, origin, tile_lanes, digests[tile : tile + 1], hits)
        judge(t, mom, var, step, rounding, hits, count, judged, bits)
        for k in range(count):
            if judged[k] != 0:
                sent[found] = start + hits[k]
                verdict[found] = judged[k]
                old[found] = bits[k] if judged[k] == 1 else np.uint16(0)
                found += 1
    return found
