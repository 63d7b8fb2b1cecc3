"""DTC chunks: the immutable objects that carry a part of a version (docs/formats.md describes every byte).

One invariant: `decode` gives back what `encode` was given or raises CodecError, whatever the bytes, and allocates
nothing before its size is known to be declared, allowed and consistent.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import zstandard

from engine.codec import table
from engine.codec.streams import (
    Coded,
    choose_shift,
    decode_values,
    encode_values,
    gaps_of,
    join_diffs,
    join_planes,
    low_bytes,
    positions_in_place,
    split_diffs,
    split_planes,
)
from engine.codec.table import I64, ChunkItem, ItemHead
from engine.errors import CodecError, InvalidInput

__all__ = ["MAGIC", "ChunkHeader", "ChunkItem", "EncodedChunk", "decode", "encode", "read_header"]

U8 = npt.NDArray[np.uint8]

MAGIC = b"DTCK"
FORMAT_VERSION = 1
MAX_HEADER_BYTES = 1 << 16
MAX_CHUNK_RAW_BYTES = 1 << 31
STREAMS = (
    "table", "gaps", "gaps_low", "gaps_wide", "signs", "exceptions", "exceptions_low", "exceptions_wide",
    "magnitudes", "magnitudes_wide", "dense_high", "dense_low",
)  # fmt: skip
_PREFIX = struct.Struct("<4sHHI")
_STORED, _ZSTD = 0, 1
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REMEDY = "The object was damaged or written by an incompatible version; fetch it again."


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk belongs to. `base` is null when the version extends none; `seq` counts the writer's chunks."""

    run: str
    version: int
    epoch: int
    writer: int
    seq: int
    base: int | None

    def __post_init__(self) -> None:
        if not isinstance(self.run, str) or not _RUN.fullmatch(self.run):
            raise InvalidInput(f"not a run name: {str(self.run)[:40]!r}.")
        numbers = [self.version, self.epoch, self.writer, self.seq, *([] if self.base is None else [self.base])]
        if any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
            raise InvalidInput(f"the numbers of a chunk header must be integers in [0, 2^63): {numbers}.")


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's bytes; `raw_bytes` is what its streams decompress to, `entries` its sparse entries."""

    data: bytes = field(repr=False)
    raw_bytes: int
    entries: int


def _join(arrays: list[U8]) -> bytes:
    return b"".join(a.tobytes() for a in arrays)


def encode(header: ChunkHeader, items: list[ChunkItem], level: int = 1) -> EncodedChunk:
    """Encode items (distinct slices) into one chunk. The same input and level give the same bytes.

    InvalidInput if an item breaks the rules of `ChunkItem`.
    """
    heads: list[ItemHead] = []
    parts: dict[str, list[U8]] = {name: [] for name in STREAMS[1:]}
    for item in items:
        table.check_item(item)
        gaps = gaps_of(item.ranks)
        signs, where, magnitudes = split_diffs(item.diffs)
        skipped = gaps_of(where)
        coded_gaps = encode_values(gaps, choose_shift(gaps))
        coded_skips = encode_values(skipped, choose_shift(skipped))
        coded_sizes = encode_values(magnitudes, 0)
        high, low = split_planes(item.dense_bits)
        streams = (
            coded_gaps.symbols, coded_gaps.low, coded_gaps.wide, signs, coded_skips.symbols, coded_skips.low,
            coded_skips.wide, coded_sizes.symbols, coded_sizes.wide, high, low,
        )  # fmt: skip
        for name, array in zip(STREAMS[1:], streams, strict=True):
            parts[name].append(array)
        heads.append(ItemHead.of(item, coded_gaps.shift, where.size, coded_skips.shift))
    if not table.distinct(heads):
        raise InvalidInput("a chunk may not speak twice of the same slice.")
    raws = [table.to_bytes(heads), *(_join(parts[name]) for name in STREAMS[1:])]
    if len(raws[0]) > table.MAX_TABLE_BYTES or sum(map(len, raws)) > MAX_CHUNK_RAW_BYTES:
        raise InvalidInput(
            f"a chunk would hold {sum(map(len, raws))} raw bytes, {len(raws[0])} of them its table.",
            remedy="Spread the items over several chunks.",
        )
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)
    described, stored = [], []
    for raw in raws:
        packed = compressor.compress(raw) if raw else b""
        method, body = (_ZSTD, packed) if len(packed) < len(raw) else (_STORED, raw)
        described.append([len(raw), len(body), method])
        stored.append(body)
    head = {
        "base": header.base,
        "epoch": header.epoch,
        "run": header.run,
        "seq": header.seq,
        "streams": described,
        "version": header.version,
        "writer": header.writer,
    }
    head_bytes = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, 0, len(head_bytes))
    return EncodedChunk(
        b"".join((prefix, head_bytes, *stored)),
        sum(len(raw) for raw in raws),
        sum(item.ranks.size for item in items),
    )


def _bad(what: str) -> CodecError:
    return CodecError(f"not a valid chunk: {what}.", remedy=_REMEDY)


def _parse_header(data: bytes) -> tuple[ChunkHeader, list[tuple[int, int, int]], int]:
    """(header, [raw bytes, stored bytes, method] per stream, offset of the first stream)."""
    if len(data) < _PREFIX.size:
        raise _bad(f"{len(data)} bytes are too few")
    magic, version, reserved, length = _PREFIX.unpack_from(data)
    if magic != MAGIC or reserved != 0:
        raise _bad("it does not start like one")
    if version != FORMAT_VERSION:
        raise CodecError(
            f"the chunk has format version {version}, this program reads version {FORMAT_VERSION}.",
            remedy="Run the same release on every node.",
        )
    if length > MAX_HEADER_BYTES or _PREFIX.size + length > len(data):
        raise _bad(f"a header of {length} bytes does not fit")
    end = _PREFIX.size + length
    raw = table.parse_json(data[_PREFIX.size : end])
    if not isinstance(raw, dict) or set(raw) != {"base", "epoch", "run", "seq", "streams", "version", "writer"}:
        raise _bad("the header has other fields")
    streams = raw.pop("streams")
    if not isinstance(streams, list) or len(streams) != len(STREAMS):
        raise _bad("the list of streams is malformed")
    for s in streams:
        if not isinstance(s, list) or len(s) != 3 or any(type(n) is not int or not 0 <= n < 1 << 40 for n in s):
            raise _bad("a stream is described by something else than three sizes")
        if s[2] not in (_STORED, _ZSTD) or (s[1] != s[0] if s[2] == _STORED else s[1] >= s[0]):
            raise _bad("the sizes of a stream contradict its method")
    try:
        header = ChunkHeader(**raw)
    except InvalidInput as error:
        raise _bad(error.message) from None
    return header, [(s[0], s[1], s[2]) for s in streams], end


def read_header(data: bytes) -> ChunkHeader:
    """The header alone, from the first bytes of a chunk; nothing else is looked at."""
    return _parse_header(data)[0]


def _unpack(data: memoryview, raw_bytes: int, method: int) -> bytes:
    if method == _STORED:
        return bytes(data)
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != raw_bytes or frame.dict_id:
            raise _bad(f"a frame announces {frame.content_size} bytes, its header {raw_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _bad(f"a frame does not decompress ({error})") from None
    if len(raw) != raw_bytes:
        raise _bad(f"a frame holds {len(raw)} bytes instead of {raw_bytes}")
    return raw


class _Stream:
    """Takes consecutive pieces of one decompressed stream; CodecError when it runs out."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self._data: U8 = np.frombuffer(data, np.uint8)
        self._at = 0

    def take(self, count: int) -> U8:
        piece = self._data[self._at : self._at + count]
        if piece.size != count:
            raise _bad(f"stream {self.name} is cut short")
        self._at += count
        return piece

    def rest(self) -> U8:
        return self._data[self._at :]

    def finish(self) -> None:
        if self._at != self._data.size:
            raise _bad(f"stream {self.name} has bytes that belong to nothing")


def _values(streams: dict[str, _Stream], name: str, count: int, shift: int, limit: int) -> I64:
    low = streams[f"{name}_low"].take(low_bytes(count, shift)) if shift else np.empty(0, np.uint8)
    wide = streams[f"{name}_wide"]
    coded = Coded(shift, streams[name].take(count), low, wide.rest())
    values, used = decode_values(coded, limit)
    wide.take(used)
    return values


def _decode_item(head: ItemHead, streams: dict[str, _Stream]) -> ChunkItem:
    ranks = positions_in_place(_values(streams, "gaps", head.count, head.shift, head.lanes), head.lanes)
    signs = streams["signs"].take(low_bytes(head.count, 1))
    skips = _values(streams, "exceptions", head.exceptions, head.exceptions_shift, head.count)
    where = positions_in_place(skips, head.count)
    magnitudes = _values(streams, "magnitudes", head.exceptions, 0, 32767)
    diffs = join_diffs(head.count, signs, where, magnitudes)
    tiles = head.tiles()
    bits = join_planes(streams["dense_high"].take(head.dense_lanes), streams["dense_low"].take(head.dense_lanes))
    item = ChunkItem(
        head.tensor, head.shape, head.dtype, head.slice, head.lanes, head.blocks, ranks, diffs, tiles, bits
    )
    table.check_entries(item)
    return item


def _check_sizes(heads: list[ItemHead], streams: list[tuple[int, int, int]]) -> None:
    """Every stream whose length follows from the table has it, before any of them is decompressed."""
    count = sum(h.count for h in heads)
    exceptions = sum(h.exceptions for h in heads)
    dense = sum(h.dense_lanes for h in heads)
    expected = {
        "gaps": count,
        "gaps_low": sum(low_bytes(h.count, h.shift) for h in heads),
        "signs": sum(low_bytes(h.count, 1) for h in heads),
        "exceptions": exceptions,
        "exceptions_low": sum(low_bytes(h.exceptions, h.exceptions_shift) for h in heads),
        "magnitudes": exceptions,
        "dense_high": dense,
        "dense_low": dense,
    }
    for name, (raw, _, _) in zip(STREAMS, streams, strict=True):
        if raw != expected.get(name, raw):
            raise _bad(f"stream {name} has {raw} bytes, the table asks for {expected[name]}")


def decode(
    data: bytes, *, max_raw_bytes: int, expect: ChunkHeader | None = None
) -> tuple[ChunkHeader, list[ChunkItem]]:
    """Decode a chunk whose streams may hold at most `max_raw_bytes` (what its part declares).

    Memory: at most about 11 bytes an entry and 2 a dense lane beside the raw bytes. CodecError for anything that is not
    a valid chunk, that is larger, or whose header is not `expect`.
    """
    header, described, at = _parse_header(data)
    if expect is not None and header != expect:
        raise _bad(f"its header says {header}, expected is {expect}")
    raw_bytes = sum(s[0] for s in described)
    if raw_bytes > min(max_raw_bytes, MAX_CHUNK_RAW_BYTES):
        raise _bad(f"its streams hold {raw_bytes} bytes, {min(max_raw_bytes, MAX_CHUNK_RAW_BYTES)} are allowed")
    if sum(s[1] for s in described) != len(data) - at:
        raise _bad(f"{len(data) - at} bytes follow the header, it speaks of {sum(s[1] for s in described)}")
    if described[0][0] > table.MAX_TABLE_BYTES:
        raise _bad(f"a table of {described[0][0]} bytes is too large")
    view = memoryview(data)
    bodies = []
    for _, stored, _ in described:
        bodies.append(view[at : at + stored])
        at += stored
    heads = table.from_bytes(_unpack(bodies[0], described[0][0], described[0][2]))
    if not table.distinct(heads):
        raise _bad("it speaks twice of the same slice")
    _check_sizes(heads, described)
    streams = {
        name: _Stream(name, _unpack(body, raw, method))
        for name, body, (raw, _, method) in zip(STREAMS[1:], bodies[1:], described[1:], strict=True)
    }
    items = [_decode_item(head, streams) for head in heads]
    for stream in streams.values():
        stream.finish()
    return header, items
