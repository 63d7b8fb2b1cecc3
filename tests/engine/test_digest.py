"""The state digest: definition, published vectors, linearity, and independence of layout."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import digest
from engine.errors import InvalidInput, LayoutError
from engine.layout.blocks import TILE_LANES, Block, Layout

M = (1 << 64) - 1

# The vectors of docs/formats.md: tensor name, lanes, digest.
VECTORS = [
    ("model.norm.weight", "empty", "0000000000000000"),
    ("model.norm.weight", "zero1", "f15b34177dad5e3d"),
    ("model.norm.weight", "count", "bfbc8b2c8c723a9a"),
    ("model.embed_tokens.weight", "count", "4c16e9cdb954bc90"),
    ("lm_head.weight", "ones", "a4945efc46b90000"),
]


def lanes_named(kind: str) -> np.ndarray:
    """Lane arrays of the published vectors."""
    return {
        "empty": np.zeros(0, np.uint16),
        "zero1": np.zeros(1, np.uint16),
        "count": np.arange(10000, dtype=np.int64).astype(np.uint16),
        "ones": np.full(4097, 0xFFFF, np.uint16),
    }[kind]


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M
    return z ^ (z >> 31)


def weight(name: str, i: int) -> int:
    """The definition, in plain integers."""
    h = hashlib.sha256(name.encode()).digest()
    a, b = int.from_bytes(h[:8], "little"), int.from_bytes(h[8:16], "little")
    word_a = mix((a + (i % 4096 + 1) * 0x9E3779B97F4A7C15) & M) | 1
    word_b = mix((b + (i // 4096 + 1) * 0x9E3779B97F4A7C15) & M) | 1
    return word_a * word_b & M


def brute(name: str, canonical: np.ndarray, lanes: np.ndarray) -> int:
    return sum(weight(name, int(i)) * (int(x) + 1) for i, x in zip(canonical, lanes, strict=True)) & M


@pytest.mark.parametrize(("name", "kind", "expected"), VECTORS)
def test_published_vectors(name: str, kind: str, expected: str) -> None:
    lanes = lanes_named(kind)
    key = digest.DigestKey.for_tensor(name)
    assert digest.to_hex(digest.digest_array(key, lanes)) == expected
    assert digest.to_hex(brute(name, np.arange(lanes.size), lanes)) == expected


def test_the_page_states_the_vectors() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    for name, _, expected in VECTORS:
        assert name in page
        assert expected in page


def test_tile_constant_is_the_detectors() -> None:
    assert TILE_LANES == pytest.importorskip("engine.detect.base").TILE


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.integers(0, (1 << 62) - 1))
def test_weights_follow_the_definition_and_are_odd(i: int, j: int) -> None:
    w = digest.DigestKey.for_tensor("t").weights(np.array([i, j, i], np.int64))
    assert [int(x) for x in w] == [weight("t", i), weight("t", j), weight("t", i)]
    assert all(int(x) & 1 for x in w)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9000), st.integers(0, 9000), st.integers(0, 2**32 - 1))
def test_pieces_add_up(cut: int, start: int, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 1 << 16, 9000, dtype=np.uint16)
    key = digest.DigestKey.for_tensor("t")
    whole = digest.digest_array(key, x, start)
    assert whole == digest.add(digest.digest_array(key, x[:cut], start), digest.digest_array(key, x[cut:], start + cut))
    assert digest.add(whole, -digest.digest_array(key, x[:cut], start)) == digest.digest_array(
        key, x[cut:], start + cut
    )


# Slices of one canonical tensor of 96 x 100 lanes: contiguous from mid-row, transposed, column-split, reversed blocks,
# pairs of lanes of a transposed FP32 tensor.
LAYOUTS = [
    Layout((Block((5000,), 0, (1,), 137, (1,)),), 5000, 9600),
    Layout((Block((100, 96), 0, (96, 1), 0, (1, 100)),), 9600, 9600),
    Layout((Block((96, 25), 0, (25, 1), 50, (100, 1)),), 2400, 9600),
    Layout((Block((100,), 300, (1,), 0, (1,)), Block((3, 100), 0, (100, 1), 9000, (100, 1))), 400, 9600),
    Layout((Block((50, 96, 2), 0, (192, 2, 1), 0, (2, 100, 1)),), 9600, 9600),
    Layout((Block((), 0, (), 77, ()),), 1, 9600),
    Layout((), 0, 9600),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile_lanes", [1, 7, 97, 4096, TILE_LANES])
def test_slice_tiles_match_brute_force(layout: Layout, tile_lanes: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 1 << 16, layout.src_numel, dtype=np.uint16)
    canonical = np.full(layout.src_numel, -1, np.int64)
    for b in layout.blocks:
        src, dst = np.array(b.src_offset), np.array(b.dst_offset)
        for n, s, d in zip(b.shape, b.src_strides, b.dst_strides, strict=True):
            src, dst = np.add.outer(src, np.arange(n) * s), np.add.outer(dst, np.arange(n) * d)
        canonical[src] = dst
    key = digest.DigestKey.for_tensor("t")
    weights = key.weights(canonical)
    tiles = -(-x.size // tile_lanes)
    expected = [
        digest.add_all(
            weights[t * tile_lanes :][:tile_lanes] * (x[t * tile_lanes :][:tile_lanes].astype(np.uint64) + 1)
        )
        for t in range(tiles)
    ]
    got = digest.digest_slice(key, x, layout, tile_lanes)
    assert got.dtype == np.uint64
    assert [int(d) for d in got] == expected
    assert digest.digest_live(key, x, layout) == digest.add(*expected)

    new = x.copy()
    ranks = np.flatnonzero(rng.random(x.size) < 0.1)
    new[ranks] ^= rng.integers(1, 1 << 16, ranks.size, dtype=np.uint16)
    change = digest.delta_digest_tiles(key, ranks, canonical[ranks], x[ranks], new[ranks], tiles, 0, tile_lanes)
    assert np.array_equal(got + change, digest.digest_slice(key, new, layout, tile_lanes))
    total = digest.delta_digest(key, canonical[ranks], x[ranks], new[ranks])
    assert digest.add(digest.add_all(got), total) == digest.digest_live(key, new, layout)


def test_live_memory_may_be_strided_partial_and_read_only() -> None:
    """A receiver's fused parameter: rows of another tensor lie between ours, and memory is not contiguous."""
    fused = np.random.default_rng(1).integers(0, 1 << 16, (40, 60), dtype=np.uint16)
    ours = fused[10:30, 5:35]
    key = digest.DigestKey.for_tensor("t")
    expected = digest.digest_array(key, np.ascontiguousarray(ours).reshape(-1))
    layout = Layout((Block((20, 30), 10 * 60 + 5, (60, 1), 0, (30, 1)),), 2400, 600)
    flat = fused.reshape(-1)
    flat.setflags(write=False)
    assert digest.digest_live(key, flat, layout) == expected
    every_other = np.repeat(flat, 2)[::2]
    assert digest.digest_live(key, every_other, layout) == expected
    column = Layout((Block((20,), 3, (60,), 0, (1,)),), 2400, 20)
    assert digest.digest_live(key, flat, column) == digest.digest_array(key, fused[:20, 3].copy())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 4999), st.integers(1, 0xFFFF))
def test_a_single_wrong_lane_always_shows(i: int, flip: int) -> None:
    x = np.zeros(5000, np.uint16)
    key = digest.DigestKey.for_tensor("t")
    before = digest.digest_array(key, x)
    x[i] ^= np.uint16(flip)
    assert digest.digest_array(key, x) != before


def test_swapped_lanes_show() -> None:
    x = np.arange(9000, dtype=np.uint16)
    key = digest.DigestKey.for_tensor("t")
    y = x.copy()
    y[[1, 8000]] = y[[8000, 1]]
    assert digest.digest_array(key, x) != digest.digest_array(key, y)


def test_nothing_is_read_or_written_out_of_bounds() -> None:
    key = digest.DigestKey.for_tensor("t")
    x = np.zeros(100, np.uint16)
    beyond = Layout((Block((10, 10), 1, (10, 1), 0, (10, 1)),), 100, 100)
    with pytest.raises(LayoutError, match="source lane 100 of 100"):
        digest.digest_slice(key, x, beyond)
    with pytest.raises(LayoutError, match="canonical lane"):
        digest.digest_live(key, x, Layout((Block((10,), 0, (1,), 95, (1,)),), 100, 100))
    with pytest.raises(LayoutError, match="its layout"):
        digest.digest_slice(key, x[:50], LAYOUTS[0])
    with pytest.raises(InvalidInput):
        digest.delta_digest_tiles(key, np.array([100]), np.array([1]), x[:1], x[:1], 1, 1, 100 - 1 + 2)
    with pytest.raises(InvalidInput):
        digest.delta_digest(key, np.array([-1]), x[:1], x[:1])
    with pytest.raises(InvalidInput):
        digest.delta_digest(key, np.array([1]), x[:2], x[:1])
    with pytest.raises(InvalidInput):
        digest.digest_array(key, x.astype(np.int32))  # type: ignore[arg-type]


def test_hex_round_trip() -> None:
    assert digest.from_hex(digest.to_hex(M)) == M
    for bad in ("", "0" * 15, "A" * 16, "0x" + "0" * 14):
        with pytest.raises(InvalidInput):
            digest.from_hex(bad)
