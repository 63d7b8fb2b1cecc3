"""The chunk codec: identity, determinism, cost, and refusal of everything that is not a chunk."""

from __future__ import annotations

import json
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.codec import baselines, chunk, streams, table
from engine.codec.chunk import ChunkHeader, ChunkItem, EncodedChunk, decode, encode
from engine.errors import CodecError, InvalidInput
from engine.layout.blocks import TILE_LANES
from engine.layout.meet import MAX_BLOCKS
from engine.records import keys
from engine.records.canonical import MAX_RECORD_BYTES

HEADER = ChunkHeader("run-1", 7, 2, 3, 0, 6)
NOTHING = np.empty(0, np.uint16)
NO_TILES = np.empty(0, np.int64)


def item(
    ranks: list[int] | np.ndarray,
    diffs: list[int] | np.ndarray,
    lanes: int,
    tiles: list[int] | None = None,
    bits: np.ndarray | None = None,
    name: str = "w",
    number: int = 0,
) -> ChunkItem:
    blocks = [[[lanes], 0, [1], 0, [1]]] if lanes else []
    return ChunkItem(
        name,
        (lanes,),
        "bfloat16",
        number,
        lanes,
        blocks,
        np.array(ranks, np.int64),
        np.array(diffs, np.int64).astype(np.uint16),
        np.array(tiles or [], np.int64),
        NOTHING if bits is None else bits,
    )


def same(a: ChunkItem, b: ChunkItem) -> bool:
    fixed = ("tensor", "shape", "dtype", "slice", "lanes", "blocks")
    arrays = ("ranks", "diffs", "dense_tiles", "dense_bits")
    return all(getattr(a, f) == getattr(b, f) for f in fixed) and all(
        getattr(a, f).dtype == getattr(b, f).dtype and np.array_equal(getattr(a, f), getattr(b, f)) for f in arrays
    )


def round_trip(items: list[ChunkItem], header: ChunkHeader = HEADER, level: int = 1) -> EncodedChunk:
    encoded = encode(header, items, level)
    assert encode(header, items, level).data == encoded.data
    got_header, got = decode(encoded.data, max_raw_bytes=encoded.raw_bytes, expect=header)
    assert got_header == header
    assert len(got) == len(items)
    assert all(same(a, b) for a, b in zip(items, got, strict=True))
    assert encoded.entries == sum(i.ranks.size for i in items)
    with pytest.raises(CodecError, match="are allowed"):
        decode(encoded.data, max_raw_bytes=encoded.raw_bytes - 1)
    return encoded


DIFFS = st.one_of(
    st.sampled_from([1, 65535, 2, 65534, 255, 256, 257, 258, 65279, 65280, 32767, 32768, 32769]), st.integers(1, 65535)
)
GAPS = st.one_of(
    st.integers(0, 3),
    st.sampled_from([253, 254, 255, 256, 257, 382, 383, 510, 65535, 1 << 20]),
    st.integers(0, 1 << 41),
)


@st.composite
def items(draw: st.DrawFn, number: int = 0) -> ChunkItem:
    gaps = draw(st.lists(GAPS, max_size=30))
    ranks = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    diffs = draw(st.lists(DIFFS, min_size=len(gaps), max_size=len(gaps)))
    lanes = (int(ranks[-1]) + 1 if gaps else 0) + draw(st.sampled_from([0, 1, 1000, 3 * TILE_LANES]))
    last = -(-lanes // TILE_LANES) - 1
    dense = sorted(draw(st.sets(st.integers(max(0, last - 4), last), max_size=3))) if last >= 0 else []
    outside = ~np.isin(ranks // TILE_LANES, dense)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    size = sum(min((t + 1) * TILE_LANES, lanes) - t * TILE_LANES for t in dense)
    bits = (rng.normal(0, 1, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return item(ranks[outside], np.array(diffs, np.int64)[outside], lanes, dense, bits, f"layer.{number}.w", number)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 4), st.sampled_from([1, 3]))
def test_identity(data: st.DataObject, count: int, level: int) -> None:
    round_trip([data.draw(items(k)) for k in range(count)], level=level)


@pytest.mark.parametrize("first", [0, 252, 253, 254, 255, 256, 257, 509, 510, 511, 255 + 127, 255 + 128, 1 << 40])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_escapes_at_their_boundaries(first: int, shift: int) -> None:
    values = np.array([first << shift, 0, (first << shift) + (1 << shift) - 1], np.int64)
    coded = streams.encode_values(values, shift)
    assert coded.symbols.size == 3
    assert (coded.wide.size > 0) == (first >= 255)
    back, used = streams.decode_values(coded, 1 << 62)
    assert back.tolist() == values.tolist()
    assert used == coded.wide.size
    with pytest.raises(CodecError):
        streams.decode_values(coded, int(values.max()))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, (1 << 62) - 1) | st.integers(0, 600), max_size=40), st.integers(0, streams.MAX_SHIFT))
def test_values_round_trip_at_any_shift(values: list[int], shift: int) -> None:
    array = np.array(values, np.int64)
    back, _ = streams.decode_values(streams.encode_values(array, shift), 1 << 62)
    assert back.tolist() == values


def test_special_chunks() -> None:
    round_trip([])
    round_trip([item([], [], 0)])
    round_trip([item([], [], 5)])
    round_trip([item([0], [1], 1)])
    round_trip([item([(1 << 61) - 1], [32768], 1 << 61)])
    round_trip([item([3], [1], 9)], ChunkHeader("r", 0, 1, 0, 0, None))
    rng = np.random.default_rng(0)
    short_last = rng.integers(0, 1 << 16, TILE_LANES + 5, dtype=np.uint16)
    round_trip([item([], [], 2 * TILE_LANES + 5, [0, 2], short_last)])
    every = item(np.arange(1000), rng.integers(1, 1 << 16, 1000), 1000)
    round_trip([every])


def test_strided_and_wide_dtypes_travel() -> None:
    blocks = [[[16, 4], 0, [4, 1], 8, [32, 1]]]
    fp32 = replace(item([1, 63], [1, 2], 64), shape=(16, 16), dtype="float32", blocks=blocks)
    round_trip([fp32])
    as_tuples: list[Any] = [((16, 4), 0, (4, 1), 8, (32, 1))]
    assert encode(HEADER, [replace(fp32, blocks=as_tuples)]).data == encode(HEADER, [fp32]).data
    odd = replace(item([1], [255], 2), shape=(3,), dtype="int8")
    round_trip([odd])


def typical(density: float, lanes: int = 1 << 21) -> ChunkItem:
    """Changes as a real step makes them: 88 % by one ulp, the rest by few."""
    rng = np.random.default_rng(5)
    ranks = np.flatnonzero(rng.random(lanes, np.float32) < density)
    c = rng.random(ranks.size)
    size = np.select(
        [c < 0.88, c < 0.94, c < 0.98], [1, 2, rng.integers(3, 5, ranks.size)], rng.integers(5, 99, ranks.size)
    )
    return item(ranks, np.where(rng.random(ranks.size) < 0.5, size, -size), lanes)


def test_cost_is_far_below_plain() -> None:
    it = typical(0.006)
    bits = 8 * len(encode(HEADER, [it]).data) / it.ranks.size
    new_bits = np.random.default_rng(0).normal(0, 0.02, it.ranks.size).astype(np.float32).view(np.uint32) >> 16
    pulse = baselines.pulse_bits(it.ranks, new_bits.astype(np.uint16))
    assert bits < 12
    assert pulse > 3 * bits


@pytest.mark.parametrize("density", [0.0002, 0.002, 0.006, 0.05, 0.3])
def test_cost_stays_near_the_entropy(density: float) -> None:
    it = typical(density)
    p = density
    entropy = -(np.log2(p) + (1 - p) / p * np.log2(1 - p)) + baselines.diff_entropy_bits(it.diffs)
    overhead = 8 * 600 / it.ranks.size  # header and table
    assert 8 * len(encode(HEADER, [it]).data) / it.ranks.size < 1.06 * entropy + overhead


def test_huge_gaps_cost_bytes_not_megabytes() -> None:
    encoded = round_trip([item([5, 1 << 40, 1 << 60], [1, 1, 1], 1 << 61)])
    assert encoded.raw_bytes < 1000


def test_pulse_and_entropy_baselines() -> None:
    assert baselines.pulse_bits(NO_TILES, NOTHING) == 0
    assert baselines.entropy_bits(np.array([1, 1, 2, 2])) == pytest.approx(1)
    assert baselines.entropy_bits(NOTHING) == 0
    assert baselines.gap_entropy_bits(np.array([0, 2, 4, 6, 8])) == pytest.approx(0.7219, abs=1e-3)
    with pytest.raises(InvalidInput):
        baselines.pulse_bits(np.array([1 << 31]), NOTHING)


# -- what encode refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": np.array([2, 1], np.int64)},
        {"ranks": np.array([1, 1], np.int64)},
        {"ranks": np.array([-1, 1], np.int64)},
        {"ranks": np.array([1, 10], np.int64)},
        {"ranks": np.array([1], np.int64)},
        {"ranks": np.array([1, 2], np.int32)},
        {"diffs": np.array([1, 0], np.uint16)},
        {"diffs": np.array([1, 1], np.int16)},
        {"dense_tiles": np.array([0], np.int64)},
        {"dense_tiles": np.array([1], np.int64)},
        {"dense_tiles": np.array([0], np.int64), "dense_bits": np.zeros(10, np.uint16)},
        {"dense_bits": np.zeros(1, np.uint16)},
        {"tensor": "../w"},
        {"tensor": ""},
        {"dtype": "float8"},
        {"shape": (9,)},
        {"shape": (-10,)},
        {"lanes": 9},
        {"lanes": -1},
        {"slice": -1},
        {"blocks": []},
        {"blocks": [[[10], 0, [1], 0, [0]]]},
        {"blocks": [[[10], 0, [1], 1, [1]]]},
    ],
)
def test_encode_refuses_items_that_break_the_rules(change: dict[str, Any]) -> None:
    good = item([1, 2], [1, 2], 10)
    encode(HEADER, [good])
    with pytest.raises(InvalidInput):
        encode(HEADER, [replace(good, **change)])


def test_encode_refuses_one_slice_twice_and_bad_headers() -> None:
    with pytest.raises(InvalidInput, match="twice"):
        encode(HEADER, [item([1], [1], 10), item([2], [1], 10)])
    for bad in ({"run": "../x"}, {"version": -1}, {"base": True}, {"epoch": 1 << 63}, {"seq": 1.0}):
        with pytest.raises(InvalidInput):
            replace(HEADER, **bad)


# -- what decode refuses ------------------------------------------------------------------------------------------


def small() -> EncodedChunk:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 16, 40, dtype=np.uint16)
    sparse = np.flatnonzero(rng.random(TILE_LANES) < 0.004)
    return encode(
        HEADER,
        [
            item(sparse, rng.choice([1, 65535, 2, 700], sparse.size), TILE_LANES + 40, [1], bits, "a"),
            item([3, 90_000], [1, 9], 100_000, name="b", number=1),
        ],
    )


def rebuilt(
    data: bytes, head: dict[str, Any] | None = None, bodies: dict[str, tuple[bytes, int]] | None = None
) -> bytes:
    """A chunk with some streams replaced by (raw bytes, method), sizes made consistent, header fields replaced."""
    length = struct.unpack_from("<4sHHI", data)[3]
    header = json.loads(data[12 : 12 + length])
    at, out = 12 + length, []
    for k, name in enumerate(chunk.STREAMS):
        stored = header["streams"][k][1]
        body = data[at : at + stored]
        at += stored
        if bodies and name in bodies:
            raw, method = bodies[name]
            body = zstandard.ZstdCompressor().compress(raw) if method else raw
            header["streams"][k] = [len(raw), len(body), method]
        out.append(body)
    header.update(head or {})
    text = json.dumps(header).encode()
    return struct.pack("<4sHHI", b"DTCK", 1, 0, len(text)) + text + b"".join(out)


def raw_stream(data: bytes, name: str) -> bytes:
    length = struct.unpack_from("<4sHHI", data)[3]
    at = 12 + length
    for s, (raw, stored, method) in zip(chunk.STREAMS, json.loads(data[12:at])["streams"], strict=True):
        if s == name:
            body = data[at : at + stored]
            return zstandard.ZstdDecompressor().decompress(body, max_output_size=raw) if method else body
        at += stored
    raise AssertionError(name)


def refuse(data: bytes, limit: int = 1 << 30) -> None:
    with pytest.raises(CodecError):
        decode(data, max_raw_bytes=limit)


def test_rebuilding_changes_nothing() -> None:
    good = small()
    decode(rebuilt(good.data), max_raw_bytes=good.raw_bytes)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damage_is_refused_or_harmless_never_a_crash(data: st.DataObject) -> None:
    """Bit flips, cuts, insertions and random bytes: CodecError, or items that still keep every rule."""
    damaged = bytearray(small().data)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "overwrite", "swap"]))
        at = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        if kind == "flip" and damaged:
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del damaged[at : at + data.draw(st.integers(1, 30))]
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif kind == "overwrite":
            new = data.draw(st.binary(min_size=1, max_size=8))
            damaged[at : at + len(new)] = new
        else:
            other = data.draw(st.integers(0, max(0, len(damaged) - 1)))
            if damaged:
                damaged[at], damaged[other] = damaged[other], damaged[at]
    try:
        header, items_ = decode(bytes(damaged), max_raw_bytes=1 << 24)
    except CodecError:
        return
    encode(header, items_)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_streams_behind_a_consistent_header(data: st.DataObject) -> None:
    """The same one layer deeper, where sizes agree and frames decompress."""
    good = small().data
    name = data.draw(st.sampled_from(chunk.STREAMS))
    raw = bytearray(raw_stream(good, name))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        header, items_ = decode(
            rebuilt(good, bodies={name: (bytes(raw), data.draw(st.integers(0, 1)))}), max_raw_bytes=1 << 24
        )
    except CodecError:
        return
    encode(header, items_)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    refuse(data)
    refuse(b"DTCK\x01\x00\x00\x00" + data)
    refuse(rebuilt(small().data, bodies={"table": (data, 0)}))


def test_every_truncation_and_any_trailing_byte() -> None:
    good = small()
    for n in range(len(good.data)):
        refuse(good.data[:n])
    refuse(good.data + b"\0")


def test_format_version_is_named() -> None:
    good = small().data
    with pytest.raises(CodecError, match="format version 2"):
        decode(good[:4] + b"\x02\x00" + good[6:], max_raw_bytes=1 << 20)


@pytest.mark.parametrize(
    "head",
    [
        {"base": -1}, {"base": "6"}, {"base": 6.0}, {"epoch": None}, {"run": 5}, {"run": "a/b"}, {"seq": True},
        {"version": 1 << 63}, {"writer": [1]}, {"streams": None}, {"streams": []}, {"streams": [[0, 0]] * 12},
        {"streams": [[0, 0, 2]] * 12}, {"streams": [[-1, -1, 0]] * 12}, {"streams": [[0.0, 0, 0]] * 12},
        {"streams": [[0, 0, 0]] * 12}, {"extra": 1},
    ],
)  # fmt: skip
def test_header_fields_are_typed(head: dict[str, Any]) -> None:
    refuse(rebuilt(small().data, head))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor", 5), ("tensor", "a b"), ("dtype", "x"), ("dtype", []), ("shape", "x"), ("shape", [1.5]),
        ("shape", [1 << 40] * 4), ("shape", [-5]), ("shape", [1]), ("shape", [2] * 17), ("slice", -1), ("slice", None),
        ("lanes", 1 << 62), ("lanes", 10), ("lanes", True), ("blocks", None), ("blocks", []), ("blocks", [[]]),
        ("blocks", [[[65576], 0, [1], 1, [1]]]), ("count", 1), ("count", -1), ("count", 1 << 50), ("shift", 49),
        ("shift", 4), ("exceptions", 0), ("exceptions", 1 << 30), ("exceptions_shift", 60), ("dense", None),
        ("dense", [[1]]), ("dense", [[1, 2]]), ("dense", [[0, 1]]), ("dense", [[1, 0]]), ("dense", [[1, 1], [1, 1]]),
        ("dense", [[1, 1 << 62]]), ("dense", [[1.0, 1]]), ("dense", []),
    ],
)  # fmt: skip
def test_table_fields_are_checked(field: str, value: object) -> None:
    good = small().data
    rows = json.loads(raw_stream(good, "table"))
    assert field in rows[0]
    rows[0][field] = value
    refuse(rebuilt(good, bodies={"table": (json.dumps(rows).encode(), 1)}))


@pytest.mark.parametrize(
    "text",
    [b"{}", b"[1]", b"[[]]", b"null", b"[{}]", b"[" * 100_000, b'[{"a":1,"a":2}]', b"[NaN]", b"\xff", b"1" * 5000],
)
def test_tables_of_other_shapes(text: bytes) -> None:
    refuse(rebuilt(small().data, bodies={"table": (text, 0)}))


def test_the_same_slice_twice_is_refused() -> None:
    good = encode(HEADER, [item([1], [1], 10, name="a"), item([1], [1], 10, name="b")]).data
    twice = raw_stream(good, "table").replace(b'"b"', b'"a"')
    with pytest.raises(CodecError, match="twice"):
        decode(rebuilt(good, bodies={"table": (twice, 0)}), max_raw_bytes=1 << 20)


def test_an_entry_in_a_dense_tile_is_refused() -> None:
    bits = np.zeros(TILE_LANES, np.uint16)
    good = encode(HEADER, [item([TILE_LANES], [1], 2 * TILE_LANES, [0], bits)]).data
    moved = raw_stream(good, "table").replace(b'"dense":[[0,1]]', b'"dense":[[1,1]]')
    with pytest.raises(CodecError, match="dense tile"):
        decode(rebuilt(good, bodies={"table": (moved, 0)}), max_raw_bytes=1 << 20)


def test_a_decompression_bomb_is_not_unpacked() -> None:
    """Frames that announce, or hold, more than the header declares or the part allows cost no memory."""
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    unsized = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(bytes(1 << 24))
    good = small().data
    length = struct.unpack_from("<4sHHI", good)[3]
    header = json.loads(good[12 : 12 + length])
    good_table = good[12 + length :][: header["streams"][0][1]]
    cases = []
    for frame in (bomb, unsized):
        for declared in (1 << 28, len(frame) + 1):
            for k in (0, 1):
                streams_ = [header["streams"][0], *([[0, 0, 0]] * 11)]
                streams_[k] = [declared, len(frame), 1]
                text = json.dumps({**header, "streams": streams_}).encode()
                body = frame if k == 0 else good_table + frame
                cases.append(struct.pack("<4sHHI", b"DTCK", 1, 0, len(text)) + text + body)
    tracemalloc.start()
    for case in cases:
        refuse(case, limit=1 << 20)
        refuse(case, limit=1 << 40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("name", ["gaps_wide", "exceptions_wide", "magnitudes_wide"])
def test_wide_values_that_belong_to_nothing_are_refused(name: str) -> None:
    good = small().data
    for wrong in (raw_stream(good, name) + b"\x00", raw_stream(good, name)[:-1] or b"\x05"):
        with pytest.raises(CodecError, match=r"belong to nothing|out of range"):
            decode(rebuilt(good, bodies={name: (wrong, 0)}), max_raw_bytes=1 << 20)


def test_a_rank_just_beyond_the_slice_is_refused() -> None:
    good = encode(HEADER, [item([3, 9], [1, 1], 10)]).data
    shorter = raw_stream(good, "table").replace(b"[[[10],", b"[[[9],").replace(b"10", b"9")
    with pytest.raises(CodecError, match="beyond the 9"):
        decode(rebuilt(good, bodies={"table": (shorter, 0)}), max_raw_bytes=1 << 20)


def test_stray_sign_and_padding_bits_are_refused() -> None:
    good = encode(HEADER, [item([600, 1300, 2100], [1, 65535, 1], 4000)]).data
    signs, low = raw_stream(good, "signs"), raw_stream(good, "gaps_low")
    assert signs == b"\x02"
    assert len(low) == 2  # 3 values of 5 bits: one bit of padding
    for name, wrong in (("signs", b"\x0a"), ("gaps_low", bytes([low[0], low[1] | 0x80]))):
        with pytest.raises(CodecError, match=r"bits beyond|out of range"):
            decode(rebuilt(good, bodies={name: (wrong, 0)}), max_raw_bytes=1 << 20)


def test_an_exception_just_beyond_the_entries_is_refused() -> None:
    good = encode(HEADER, [item([1, 2, 3], [5, 1, 5], 10)]).data
    assert raw_stream(good, "exceptions") == b"\x00\x01"
    with pytest.raises(CodecError, match="beyond the 3"):
        decode(rebuilt(good, bodies={"exceptions": (b"\x00\x02", 0)}), max_raw_bytes=1 << 20)


def test_a_header_other_than_expected_is_refused() -> None:
    good = small()
    for other in (replace(HEADER, version=8), replace(HEADER, base=None), replace(HEADER, run="x")):
        with pytest.raises(CodecError, match="expected"):
            decode(good.data, max_raw_bytes=good.raw_bytes, expect=other)
    assert chunk.read_header(good.data[:2000]) == HEADER


PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_page_names_every_stream_field_and_limit() -> None:
    page = PAGE.read_text()
    for word in (*chunk.STREAMS, *table._FIELDS, "DTCK"):
        assert f"`{word}`" in page, word
    limits = (chunk.MAX_HEADER_BYTES, chunk.MAX_CHUNK_RAW_BYTES, table.MAX_TABLE_BYTES, table.MAX_ITEMS)
    for limit in (*limits, table.MAX_ITEM_BLOCKS, MAX_BLOCKS, MAX_RECORD_BYTES, keys.MAX_KEY_LENGTH):
        assert f"{limit:,}" in page, limit


def test_the_page_shows_a_real_chunk() -> None:
    sparse = replace(item([5, 6, 300, 1100], [1, -1, 3, -32768], 1200, name="model.norm.weight"), shape=(4, 300))
    dense = item([], [], 3, [0], np.array([0x3F80, 0xBF80, 1], np.uint16), "model.bias", 1)
    data = encode(ChunkHeader("demo", 3, 1, 0, 0, 2), [sparse, dense]).data
    page = PAGE.read_text()
    squeezed = "".join(page.split())
    assert data[:12].hex() in squeezed
    assert raw_stream(data, "table").decode() in squeezed
    for name in chunk.STREAMS[1:]:
        raw = raw_stream(data, name)
        assert not raw or f"| `{name}` | `{raw.hex()}` |" in page
