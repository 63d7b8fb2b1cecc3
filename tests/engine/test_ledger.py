"""The ledger's bytes: exact round trip, and nothing but an undamaged ledger decodes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detect.base import TILE, tile_count
from engine.errors import CodecError
from engine.ledger import InFlight, Ledger, SliceLedger, decode, encode
from engine.pending import Level


def level(rng: np.random.Generator, lanes: int) -> Level:
    tiles = tile_count(lanes)
    dense = rng.random(tiles) < 0.3
    ranks = np.flatnonzero(rng.random(lanes) < 0.01)
    ranks = ranks[~dense[ranks // TILE]].astype(np.int64)
    base = rng.integers(0, 1 << 16, ranks.size).astype(np.uint16)
    return Level(ranks, base, base + np.uint16(3), dense)


def digests(rng: np.random.Generator, tiles: int) -> np.ndarray | None:
    return None if rng.random() < 0.3 else rng.integers(0, 1 << 63, tiles).astype(np.uint64)


def ledger(seed: int) -> Ledger:
    rng = np.random.default_rng(seed)
    in_flight = bool(rng.random() < 0.5)
    slices = []
    for i in range(int(rng.integers(0, 4))):
        lanes = int(rng.choice([0, 1, 77, TILE, TILE + 1, 3 * TILE - 5]))
        tiles = tile_count(lanes)
        slices.append(
            SliceLedger(
                slice=i,
                lanes=lanes,
                step=int(rng.integers(-1, 100)),
                digest_last=digests(rng, tiles),
                digest_base=digests(rng, tiles),
                digest_base_total=None if rng.random() < 0.3 else (1 << 64) - 1 - i,
                digest_sent=digests(rng, tiles),
                pending=level(rng, lanes),
                in_flight=level(rng, lanes) if in_flight else None,
            )
        )
    flight = InFlight(7, 12, None, {"a": 1}, {"detect": 1.5}) if in_flight else None
    return Ledger("run", "launch", 3, None if seed % 2 else 4, 12, 6, flight, tuple(slices))


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    names = getattr(type(a), "__dataclass_fields__", None)
    if names is None:
        return a == b
    return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_round_trip(seed: int) -> None:
    original = ledger(seed)
    data = encode(original)
    assert same(decode(data), original)
    assert encode(decode(data)) == data


@given(st.integers(0, 50), st.data())
@settings(max_examples=60, deadline=None)
def test_damage_is_seen(seed: int, data: st.DataObject) -> None:
    good = encode(ledger(seed))
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CodecError):
        decode(bytes(flipped))
    with pytest.raises(CodecError):
        decode(good[:at])
    with pytest.raises(CodecError):
        decode(good + b"\0")


def resealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def test_a_ledger_that_lies_about_its_sizes_is_refused() -> None:
    """With a right checksum, so only the checks of the content stand in the way."""
    body = encode(ledger(4))[:-32]
    assert b'"lanes":' in body
    with pytest.raises(CodecError, match=r"too many|past the end"):
        decode(resealed(body + bytes(8)))
    for old, new in ((b'"entries":', b'"entriez":'), (b'"version"', b'"versiom"')):
        if old in body:
            with pytest.raises(CodecError, match="malformed"):
                decode(resealed(body.replace(old, new, 1)))


def test_ranks_must_rise() -> None:
    pending = Level(
        np.array([1, 2], np.int64), np.array([1, 1], np.uint16), np.array([2, 2], np.uint16), np.zeros(1, np.bool_)
    )
    s = SliceLedger(0, 10, 0, None, None, None, None, pending, None)
    data = bytearray(encode(Ledger("r", "l", 0, None, 0, None, None, (s,)))[:-32])
    at = data.rindex(np.array([1, 2], "<u4").tobytes())
    data[at : at + 8] = np.array([2, 1], "<u4").tobytes()
    with pytest.raises(CodecError):
        decode(resealed(bytes(data)))
