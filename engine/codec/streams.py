"""The integer streams of a chunk: rising positions and magnitudes as bytes, raw low bits and rare wide values.

One invariant: each list of numbers has exactly one encoding, and the decoders accept no other, read nothing beyond
their input and write nothing beyond the counts they are given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import CodecError
from engine.jit import njit

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]

ESCAPE = 255
"""The byte that says: 255 plus the next wide value."""
MAX_SHIFT = 48
MAX_WIDE_BYTES = 9
"""A wide value is below 2^62, so its LEB128 form has at most nine bytes."""


@dataclass(frozen=True, slots=True)
class Coded:
    """One coded list: `symbols` (one byte a value), `low` (`shift` raw bits a value), `wide` (LEB128)."""

    shift: int
    symbols: U8
    low: U8
    wide: U8


def low_bytes(count: int, shift: int) -> int:
    """Bytes that `count` values of `shift` bits take."""
    return (count * shift + 7) // 8


def choose_shift(values: I64) -> int:
    """Low bits to store raw: the median value keeps about five bits, below which gaps are close to uniform."""
    if values.size == 0:
        return 0
    median = int(np.partition(values, values.size // 2)[values.size // 2])
    return min(MAX_SHIFT, max(0, median.bit_length() - 5))


@njit
def _count_wide(values: I64, shift: int) -> int:
    """Bytes of all wide values."""
    total = 0
    for i in range(values.shape[0]):
        high = values[i] >> shift
        if high >= ESCAPE:
            high -= ESCAPE
            total += 1
            while high >= 128:
                high >>= 7
                total += 1
    return total


@njit
def _encode(values: I64, shift: int, symbols: U8, low: U8, wide: U8) -> None:
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    held = np.uint64(0)
    bits = 0
    at_low, at_wide = 0, 0
    for i in range(values.shape[0]):
        v = values[i]
        held |= (np.uint64(v) & mask) << np.uint64(bits)
        bits += shift
        while bits >= 8:
            low[at_low] = held & np.uint64(255)
            at_low += 1
            held >>= np.uint64(8)
            bits -= 8
        high = v >> shift
        if high < ESCAPE:
            symbols[i] = high
            continue
        symbols[i] = ESCAPE
        high -= ESCAPE
        while high >= 128:
            wide[at_wide] = (high & 127) | 128
            at_wide += 1
            high >>= 7
        wide[at_wide] = high
        at_wide += 1
    if bits:
        low[at_low] = held


@njit
def _decode(shift: int, symbols: U8, low: U8, wide: U8, limit: int, out: I64) -> int:
    """Fill `out` with values below `limit`; returns the wide bytes read, or −1 if the input is not an encoding."""
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    held = np.uint64(0)
    bits = 0
    at_low, at_wide = 0, 0
    highest = limit >> shift
    for i in range(symbols.shape[0]):
        while bits < shift:
            held |= np.uint64(low[at_low]) << np.uint64(bits)
            at_low += 1
            bits += 8
        part = np.int64(held & mask)
        held >>= np.uint64(shift)
        bits -= shift
        high = np.int64(symbols[i])
        if high == ESCAPE:
            wide_value = np.int64(0)
            moved = 0
            while True:
                if at_wide >= wide.shape[0] or moved >= 7 * MAX_WIDE_BYTES:
                    return -1
                byte = np.int64(wide[at_wide])
                at_wide += 1
                wide_value |= (byte & 127) << moved
                moved += 7
                if byte < 128:
                    break
            if byte == 0 and moved > 7:
                return -1  # a longer form than needed
            high += wide_value
        if high < 0 or high > highest:
            return -1
        value = (high << shift) | part
        if value >= limit:
            return -1
        out[i] = value
    if held != 0:
        return -1  # padding bits must be zero
    return at_wide


def encode_values(values: I64, shift: int) -> Coded:
    """Code non-negative values below 2^62."""
    symbols = np.empty(values.size, np.uint8)
    low = np.zeros(low_bytes(values.size, shift), np.uint8)
    wide = np.empty(_count_wide(values, shift), np.uint8)
    _encode(values, shift, symbols, low, wide)
    return Coded(shift, symbols, low, wide)


def decode_values(coded: Coded, limit: int) -> tuple[I64, int]:
    """Inverse of `encode_values`: the values, each below `limit` <= 2^62, and how many bytes of `wide` they used."""
    out = np.empty(coded.symbols.size, np.int64)
    if coded.low.size != low_bytes(out.size, coded.shift):
        raise CodecError("a stream of low bits has the wrong length.")
    used = int(_decode(coded.shift, coded.symbols, coded.low, coded.wide, limit, out))
    if used < 0:
        raise CodecError("a stream of gaps or magnitudes holds a value out of range.")
    return out, used


def gaps_of(positions: I64) -> I64:
    """Positions skipped before each of the strictly rising `positions`."""
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    return gaps


@njit
def _positions(gaps: I64, end: int) -> bool:
    at = np.int64(-1)
    for i in range(gaps.shape[0]):
        if gaps[i] >= end - 1 - at:
            return False
        at += 1 + gaps[i]
        gaps[i] = at
    return True


def positions_in_place(gaps: I64, end: int) -> I64:
    """Turn gaps into strictly rising positions below `end`, in the same array; CodecError if one is not."""
    if not _positions(gaps, end):
        raise CodecError(f"an index lies beyond the {end} elements it counts.")
    return gaps


@njit
def _split_diffs(diffs: U16, signs: U8, where: I64, magnitudes: I64) -> int:
    """Sign bitmap, and position and |diff| − 2 of everything that is not ±1; returns how many those are."""
    n = 0
    for i in range(diffs.shape[0]):
        d = np.int64(diffs[i])
        negative = d >= 32768
        m = 65536 - d if negative else d
        if negative:
            signs[i >> 3] |= np.uint8(1 << (i & 7))
        if m != 1:
            where[n] = i
            magnitudes[n] = m - 2
            n += 1
    return n


def split_diffs(diffs: U16) -> tuple[U8, I64, I64]:
    """Non-zero differences as (sign bitmap, positions of those that are not ±1, their magnitudes − 2)."""
    signs = np.zeros((diffs.size + 7) // 8, np.uint8)
    where, magnitudes = np.empty(diffs.size, np.int64), np.empty(diffs.size, np.int64)
    n = int(_split_diffs(diffs, signs, where, magnitudes))
    return signs, where[:n], magnitudes[:n]


def join_diffs(count: int, signs: U8, where: I64, magnitudes: I64) -> U16:
    """Inverse of `split_diffs`. CodecError for a sign bitmap with stray bits or a magnitude no difference has."""
    bits = np.unpackbits(signs, bitorder="little")
    if bits[count:].any():
        raise CodecError("a sign bitmap has bits beyond its entries.")
    negative = bits[:count].astype(np.bool_)
    size = np.ones(count, np.int64)
    size[where] = magnitudes + 2
    if magnitudes.size and bool(np.any(size > 32768 - (~negative))):
        raise CodecError("a difference is larger than 16 bits hold.")
    return np.where(negative, -size, size).astype(np.uint16)


def split_planes(bits: U16) -> tuple[U8, U8]:
    """Lanes as two byte planes of the lane rotated left by one: the BF16 exponent, then mantissa and sign."""
    rotated = (bits << np.uint16(1)) | (bits >> np.uint16(15))
    return (rotated >> np.uint16(8)).astype(np.uint8), (rotated & np.uint16(255)).astype(np.uint8)


def join_planes(high: U8, low: U8) -> U16:
    """Inverse of `split_planes`."""
    rotated = (high.astype(np.uint16) << np.uint16(8)) | low
    return (rotated >> np.uint16(1)) | (rotated << np.uint16(15))
