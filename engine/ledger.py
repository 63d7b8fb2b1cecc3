"""The publisher's durable memory of one trainer rank, as bytes.

Between two reads the trainer overwrites the state a delta was found in, so what a read learned must survive any crash
before the trainer goes on. One invariant: `decode(encode(ledger))` gives the same ledger, and no other bytes decode.

Format (little-endian): magic `DTEL`, u32 format version, u32 header length, header (JSON), the arrays in header order
without padding, SHA-256 over everything before it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.detect.base import I64, U16, U64, tile_count
from engine.errors import CodecError, InvalidInput
from engine.pending import Level

MAGIC = b"DTEL"
FORMAT = 1
_PREFIX = struct.Struct("<4sII")
_MAX_HEADER_BYTES = 256 << 20
_REMEDY = "The spool was damaged; the rank's next version is sent dense."


@dataclass(frozen=True, slots=True)
class SliceLedger:
    """What is known of one slice of `lanes` lanes and T tiles.

    `step`: the parameter's own step counter at the last read. `digest_last` U64[T]: digest per tile of the bits at the
    last read, None if the slice was never read. `digest_base` U64[T]: the same at the base version (the newest commit);
    None when not known per tile. `digest_base_total`: the slice's digest at the base version, None if unknown or if
    there is no base. `digest_sent` U64[T]: the digests at the version in flight, None if none is. `pending`: what
    differs between the version in flight (else the base) and the last read; `in_flight`: between the base and the
    version in flight, None if none is.
    """

    slice: int
    lanes: int
    step: int
    digest_last: U64 | None
    digest_base: U64 | None
    digest_base_total: int | None
    digest_sent: U64 | None
    pending: Level
    in_flight: Level | None


@dataclass(frozen=True, slots=True)
class InFlight:
    """The version this rank has promised and that is not decided yet. `detail`, `timings_ms` and `replicas` (cell,
    tensor, holders, digest in hex) go into the part."""

    version: int
    step: int
    base: int | None
    detail: dict[str, int] = field(default_factory=dict)
    timings_ms: dict[str, float] = field(default_factory=dict)
    replicas: tuple[tuple[str, str, int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Ledger:
    """One rank's ledger. `epoch` is None until it is open; `step` is the trainer step of the last read; `base` the
    newest committed version this rank knows of."""

    run: str
    launch: str
    rank: int
    epoch: int | None
    step: int
    base: int | None
    in_flight: InFlight | None
    slices: tuple[SliceLedger, ...]


def _level_header(level: Level) -> dict[str, int]:
    return {"entries": int(level.ranks.size)}


def _level_arrays(level: Level, lanes: int) -> list[bytes]:
    ranks = level.ranks.astype(_rank_dtype(lanes))
    return [a.tobytes() for a in (ranks, level.base, level.cur, np.packbits(level.dense, bitorder="little"))]


def _rank_dtype(lanes: int) -> type[np.uint32] | type[np.int64]:
    return np.uint32 if lanes <= 1 << 32 else np.int64


def encode(ledger: Ledger) -> bytes:
    """The bytes of a ledger. Size: 8 bytes a tile and digest, 8 bytes a pending entry."""
    slices: list[dict[str, Any]] = []
    body: list[bytes] = []
    for s in ledger.slices:
        digests = [d for d in (s.digest_last, s.digest_base, s.digest_sent) if d is not None]
        slices.append(
            {
                "slice": s.slice,
                "lanes": s.lanes,
                "step": s.step,
                "last": s.digest_last is not None,
                "base": s.digest_base is not None,
                "base_total": s.digest_base_total,
                "sent": s.digest_sent is not None,
                "pending": _level_header(s.pending),
                "in_flight": None if s.in_flight is None else _level_header(s.in_flight),
            }
        )
        body += [d.astype("<u8").tobytes() for d in digests]
        body += _level_arrays(s.pending, s.lanes)
        if s.in_flight is not None:
            body += _level_arrays(s.in_flight, s.lanes)
    flight = ledger.in_flight
    header = {
        "run": ledger.run,
        "launch": ledger.launch,
        "rank": ledger.rank,
        "epoch": ledger.epoch,
        "step": ledger.step,
        "base": ledger.base,
        "in_flight": None
        if flight is None
        else {
            "version": flight.version,
            "step": flight.step,
            "base": flight.base,
            "detail": flight.detail,
            "timings_ms": flight.timings_ms,
            "replicas": flight.replicas,
        },
        "slices": slices,
    }
    head = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    if len(head) > _MAX_HEADER_BYTES:
        raise CodecError(f"the ledger header of rank {ledger.rank} has {len(head)} bytes, too many.")
    data = b"".join([_PREFIX.pack(MAGIC, FORMAT, len(head)), head, *body])
    return data + hashlib.sha256(data).digest()


class _Cursor:
    """Takes arrays off a buffer, never past its end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, dtype: str, count: int) -> npt.NDArray[Any]:
        size = np.dtype(dtype).itemsize * count
        if count < 0 or size > len(self._data) - self._at:
            raise _bad("an array runs past the end")
        array = np.frombuffer(self._data, dtype=dtype, count=count, offset=self._at).copy()
        self._at += size
        return array

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def _bad(what: str) -> CodecError:
    return CodecError(f"not a usable ledger: {what}.", remedy=_REMEDY)


def _take_level(cursor: _Cursor, header: Any, lanes: int) -> Level:
    entries = int(header["entries"])
    if not 0 <= entries <= lanes:
        raise _bad(f"{entries} entries in a slice of {lanes} lanes")
    ranks: I64 = cursor.take("<u4" if lanes <= 1 << 32 else "<i8", entries).astype(np.int64)
    base: U16 = cursor.take("<u2", entries)
    cur: U16 = cursor.take("<u2", entries)
    tiles = tile_count(lanes)
    packed = cursor.take("u1", -(-tiles // 8))
    dense = np.unpackbits(packed, count=tiles, bitorder="little").astype(np.bool_)
    if entries and (int(ranks[0]) < 0 or int(ranks[-1]) >= lanes or bool(np.any(np.diff(ranks) <= 0))):
        raise _bad("ranks out of order or out of range")
    return Level(ranks=ranks, base=base, cur=cur, dense=dense)


def _take_slice(cursor: _Cursor, h: Any) -> SliceLedger:
    lanes = int(h["lanes"])
    if lanes < 0:
        raise _bad("a negative length")
    tiles = tile_count(lanes)
    last, base, sent = (cursor.take("<u8", tiles) if h[k] else None for k in ("last", "base", "sent"))
    total = h["base_total"]
    return SliceLedger(
        slice=int(h["slice"]),
        lanes=lanes,
        step=int(h["step"]),
        digest_last=last,
        digest_base=base,
        digest_base_total=None if total is None else int(total),
        digest_sent=sent,
        pending=_take_level(cursor, h["pending"], lanes),
        in_flight=None if h["in_flight"] is None else _take_level(cursor, h["in_flight"], lanes),
    )


def _flight(h: dict[str, Any]) -> InFlight:
    replicas = tuple((str(c), str(t), int(n), str(d)) for c, t, n, d in h.pop("replicas", ()))
    return InFlight(**h, replicas=replicas)


def decode(data: bytes) -> Ledger:
    """The ledger in `data`; CodecError if the bytes are not exactly one undamaged ledger."""
    if len(data) < _PREFIX.size + 32:
        raise _bad("too short")
    view = memoryview(data)
    if hashlib.sha256(view[:-32]).digest() != bytes(view[-32:]):
        raise _bad("the checksum is wrong")
    magic, version, head_bytes = _PREFIX.unpack_from(data)
    if magic != MAGIC or version != FORMAT:
        raise _bad("unknown format")
    if head_bytes > min(_MAX_HEADER_BYTES, len(data) - _PREFIX.size - 32):
        raise _bad("the header runs past the end")
    try:
        header = json.loads(bytes(view[_PREFIX.size : _PREFIX.size + head_bytes]))
        cursor = _Cursor(view[_PREFIX.size + head_bytes : -32])
        flight = header["in_flight"]
        ledger = Ledger(
            run=str(header["run"]),
            launch=str(header["launch"]),
            rank=int(header["rank"]),
            epoch=header["epoch"],
            step=int(header["step"]),
            base=header["base"],
            in_flight=None if flight is None else _flight(flight),
            slices=tuple(_take_slice(cursor, h) for h in header["slices"]),
        )
    except InvalidInput as error:
        raise _bad(error.message) from None
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(f"malformed header ({type(error).__name__})") from None
    if cursor.left:
        raise _bad(f"{cursor.left} bytes too many")
    return ledger
