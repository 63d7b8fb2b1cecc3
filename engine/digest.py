"""The linear 64-bit state digest of a tensor's 16-bit lanes, and what a change adds to it.

One invariant: every function here returns the same sum D = Σ w(i)·(lane_i + 1) mod 2^64 over the canonical lanes it was
given, whatever layout, order or piece they came in, so digests of disjoint pieces add up.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidInput, LayoutError
from engine.jit import njit
from engine.layout.blocks import TILE_LANES, Block, Layout

U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

ROW = 4096
"""Lanes that share one B word."""
_SHIFT = 12
_MASK = ROW - 1
_GOLDEN = 0x9E3779B97F4A7C15
_U64_MASK = (1 << 64) - 1
_KEY_CACHE = 512  # A is 32 KiB, so cached keys stay below 16 MiB plus their B words
_MAX_CANONICAL = 1 << 62
_SHORT_RUN = 8


@njit
def _word(seed: np.uint64, k: int) -> np.uint64:
    """Odd word number k of the stream that starts at `seed` (splitmix64)."""
    z = seed + (np.uint64(k) + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@njit
def _words(seed: np.uint64, start: int, out: U64) -> None:
    for k in range(out.shape[0]):
        out[k] = _word(seed, start + k)


@njit
def run_digest(lanes: U16, a: U64, b: U64, start: int) -> np.uint64:
    """Digest of lanes that lie at canonical indices start, start + 1, … (`b` must reach to the last one's row).

    No bounds are checked: this is the kernel other kernels call.
    """
    total = np.uint64(0)
    n = lanes.shape[0]
    k = 0
    while k < n:
        column = (start + k) & _MASK
        m = min(ROW - column, n - k)
        words, piece = a[column : column + m], lanes[k : k + m]  # plain indices: this loop becomes vector code
        s = np.uint64(0)
        for x in range(m):
            s += words[x] * np.uint64(np.uint32(piece[x]) + np.uint32(1))
        total += b[(start + k) >> _SHIFT] * s
        k += m
    return total


@njit
def strided_digest(lanes: U16, a: U64, b: U64, start: int, stride: int) -> np.uint64:
    """Digest of lanes that lie at canonical indices start, start + stride, …; no bounds are checked."""
    total = np.uint64(0)
    i = start
    for k in range(lanes.shape[0]):
        total += a[i & _MASK] * b[i >> _SHIFT] * (np.uint64(lanes[k]) + np.uint64(1))
        i += stride
    return total


@njit
def _block_digest(
    lanes: U16,
    a: U64,
    b: U64,
    shape: I64,
    src_offset: int,
    src_strides: I64,
    dst_offset: int,
    dst_strides: I64,
    tile_lanes: int,
    out: U64,
) -> None:
    """Add a block's lanes to `out[source index // tile_lanes]`, walking the outer dimensions like an odometer."""
    last = shape.shape[0] - 1
    n, ss, ds = shape[last], src_strides[last], dst_strides[last]
    counter = np.zeros(last + 1, np.int64)
    src, dst = src_offset, dst_offset
    while True:
        done = 0
        while done < n:
            s0 = src + done * ss
            tile = s0 // tile_lanes
            room = (tile + 1) * tile_lanes - s0  # source lanes left in this tile, at least 1
            m = n - done
            if ss > 0:
                m = min(m, (room + ss - 1) // ss)
            d0 = dst + done * ds
            if ss == 1:
                piece = lanes[s0 : s0 + m]
                if ds == 1:
                    out[tile] += run_digest(piece, a, b, d0)
                else:
                    out[tile] += strided_digest(piece, a, b, d0, ds)
            else:
                total = np.uint64(0)
                for k in range(m):
                    i = d0 + k * ds
                    total += a[i & _MASK] * b[i >> _SHIFT] * (np.uint64(lanes[s0 + k * ss]) + np.uint64(1))
                out[tile] += total
            done += m
        j = last - 1
        while j >= 0:
            counter[j] += 1
            src += src_strides[j]
            dst += dst_strides[j]
            if counter[j] < shape[j]:
                break
            src -= shape[j] * src_strides[j]
            dst -= shape[j] * dst_strides[j]
            counter[j] = 0
            j -= 1
        if j < 0:
            return


@njit
def _weights(canonical: I64, a: U64, seed_b: np.uint64, out: U64) -> None:
    row = np.int64(-1)
    word = np.uint64(0)
    for k in range(canonical.shape[0]):
        i = canonical[k]
        if i >> _SHIFT != row:  # neighbours mostly share a row
            row = i >> _SHIFT
            word = _word(seed_b, row)
        out[k] = a[i & _MASK] * word


@njit
def _delta(weights: U64, old: U16, new: U16) -> np.uint64:
    total = np.uint64(0)
    for k in range(weights.shape[0]):
        total += weights[k] * (np.uint64(new[k]) - np.uint64(old[k]))
    return total


@njit
def _delta_tiles(weights: U64, ranks: I64, old: U16, new: U16, tile_start: int, tile_lanes: int, out: U64) -> None:
    for k in range(weights.shape[0]):
        out[ranks[k] // tile_lanes - tile_start] += weights[k] * (np.uint64(new[k]) - np.uint64(old[k]))


class DigestKey:
    """The weights w(i) of one canonical tensor, derived from its name alone."""

    __slots__ = ("_b", "a", "name", "seed_a", "seed_b")

    def __init__(self, name: str) -> None:
        h = hashlib.sha256(name.encode()).digest()
        self.name = name
        self.seed_a = np.uint64(int.from_bytes(h[0:8], "little"))
        self.seed_b = np.uint64(int.from_bytes(h[8:16], "little"))
        self.a: U64 = np.empty(ROW, np.uint64)
        _words(self.seed_a, 0, self.a)
        self._b: U64 = np.empty(0, np.uint64)

    @staticmethod
    def for_tensor(name: str) -> DigestKey:
        """The key of the tensor `name`; recently used ones are kept."""
        return _cached_key(name)

    def b_words(self, numel: int) -> U64:
        """B words for canonical lanes [0, numel) or more; U64 [>= ceil(numel / 4096)]. Safe to call from threads."""
        rows = -(-numel // ROW)
        have = self._b
        if have.size < rows:
            grown = np.empty(rows, np.uint64)
            grown[: have.size] = have
            _words(self.seed_b, have.size, grown[have.size :])
            self._b = have = grown  # replaced whole: another thread sees the old table or the new one
        return have

    def weights(self, canonical: I64) -> U64:
        """w(i) of each canonical lane index, U64 of the same length. InvalidInput for negative indices."""
        index = np.ascontiguousarray(canonical, np.int64)
        if index.size and (int(index.min()) < 0 or int(index.max()) >= _MAX_CANONICAL):
            raise InvalidInput(f"canonical indices of {self.name!r} must lie in [0, 2^62).")
        out = np.empty(index.size, np.uint64)
        _weights(index, self.a, self.seed_b, out)
        return out


@functools.lru_cache(maxsize=_KEY_CACHE)
def _cached_key(name: str) -> DigestKey:
    return DigestKey(name)


def _flat_lanes(lanes: U16) -> U16:
    if lanes.dtype != np.uint16 or lanes.ndim != 1:
        raise InvalidInput(f"lanes must be a one-dimensional uint16 array, not {lanes.ndim}-d {lanes.dtype}.")
    return lanes


def digest_array(key: DigestKey, lanes: U16, start: int = 0) -> int:
    """Digest of lanes at canonical indices [start, start + len(lanes))."""
    lanes = _flat_lanes(lanes)
    if start < 0:
        raise InvalidInput(f"start must not be negative: {start}.")
    return int(run_digest(lanes, key.a, key.b_words(start + lanes.size), start))


def _block_into(key: DigestKey, lanes: U16, block: Block, tile_lanes: int, out: U64, b: U64) -> None:
    n = block.normalised()
    # Very short innermost runs (the lanes of a wide element) would cost an odometer step each: take them one by one.
    short = len(n.shape) > 1 and n.shape[-1] <= _SHORT_RUN
    d = len(n.shape) - 1 if short else len(n.shape)
    shape, src_strides, dst_strides = (np.array(x[:d], np.int64) for x in (n.shape, n.src_strides, n.dst_strides))
    for k in range(n.shape[-1] if short else 1):
        src, dst = n.src_offset + k * n.src_strides[-1], n.dst_offset + k * n.dst_strides[-1]
        _block_digest(lanes, key.a, b, shape, src, src_strides, dst, dst_strides, tile_lanes, out)


def check_reach(key: DigestKey, lanes: int, layout: Layout) -> None:
    """LayoutError unless every block stays inside memory of `lanes` lanes and inside the canonical tensor."""
    for block in layout.blocks:
        if block.src_last >= lanes or block.dst_last >= layout.dst_numel:
            raise LayoutError(
                f"a block of {key.name!r} reaches source lane {block.src_last} of {lanes} and canonical lane "
                f"{block.dst_last} of {layout.dst_numel}.",
                remedy="Register the tensor again with a layout that fits its memory.",
            )


def _digest_layout(key: DigestKey, lanes: U16, layout: Layout, tile_lanes: int, out: U64) -> None:
    check_reach(key, lanes.size, layout)
    b = key.b_words(max((block.dst_last for block in layout.blocks), default=-1) + 1)
    for block in layout.blocks:
        _block_into(key, lanes, block, tile_lanes, out, b)


def digest_slice(key: DigestKey, lanes: U16, layout: Layout, tile_lanes: int = TILE_LANES) -> U64:
    """Digest of every tile of a slice, U64 [ceil(len(lanes) / tile_lanes)], in rank order.

    `lanes`: all lanes of the slice in rank order; `layout`: rank → canonical lane (its source covers [0, len) once).
    """
    lanes = _flat_lanes(lanes)
    if lanes.size != layout.src_numel:
        raise LayoutError(f"slice of {key.name!r} has {lanes.size} lanes, its layout {layout.src_numel}.")
    out = np.zeros(-(-lanes.size // tile_lanes), np.uint64)
    _digest_layout(key, lanes, layout, tile_lanes, out)
    return out


def digest_live(key: DigestKey, lanes: U16, layout: Layout) -> int:
    """Digest of a receiver's local memory; `layout` maps flat lanes of it to canonical lanes and may leave some out."""
    out = np.zeros(1, np.uint64)
    _digest_layout(key, _flat_lanes(lanes), layout, max(1, lanes.size), out)
    return int(out[0])


def _same_length(*arrays: npt.NDArray[np.generic]) -> None:
    if len({x.size for x in arrays}) > 1:
        raise InvalidInput(f"arrays of a delta have different lengths: {[x.size for x in arrays]}.")


def delta_digest(key: DigestKey, canonical: I64, old: U16, new: U16) -> int:
    """What replacing `old` by `new` at these canonical lanes adds to the digest, mod 2^64."""
    _same_length(canonical, old, new)
    return int(_delta(key.weights(canonical), _flat_lanes(old), _flat_lanes(new)))


def delta_digest_tiles(
    key: DigestKey,
    ranks: I64,
    canonical: I64,
    old: U16,
    new: U16,
    tiles: int,
    tile_start: int = 0,
    tile_lanes: int = TILE_LANES,
) -> U64:
    """`delta_digest` per tile: U64 [tiles] for tiles [tile_start, tile_start + tiles) of a slice.

    `ranks[k]` is the slice rank of canonical lane `canonical[k]`; InvalidInput if one lies outside these tiles.
    """
    _same_length(ranks, canonical, old, new)
    lo, hi = tile_start * tile_lanes, (tile_start + tiles) * tile_lanes
    if ranks.size and (int(ranks.min()) < lo or int(ranks.max()) >= hi):
        raise InvalidInput(
            f"ranks of the delta of {key.name!r} lie outside tiles [{tile_start}, {tile_start + tiles})."
        )
    out = np.zeros(tiles, np.uint64)
    weights = key.weights(canonical)
    _delta_tiles(weights, np.ascontiguousarray(ranks, np.int64), old, new, tile_start, tile_lanes, out)
    return out


def add(*digests: int | np.uint64) -> int:
    """Sum mod 2^64. Subtract by adding the negative of a Python int."""
    return sum(int(d) for d in digests) & _U64_MASK


def add_all(digests: U64) -> int:
    """Sum mod 2^64 of an array of digests."""
    return int(digests.sum(dtype=np.uint64)) if digests.size else 0


def to_hex(digest: int) -> str:
    """16 lower-case hex digits, most significant first."""
    return f"{digest & _U64_MASK:016x}"


def from_hex(text: str) -> int:
    """Inverse of `to_hex`; InvalidInput for anything else."""
    if len(text) != 16 or any(c not in "0123456789abcdef" for c in text):
        raise InvalidInput(f"not a digest (16 lower-case hex digits): {text[:40]!r}.")
    return int(text, 16)
