"""The bytes of the two rounds: the fixed header with all counts, and where everything lies in what follows.

One invariant: what this module accepts is bounded by the plan, so a receiver that trusts it allocates no more than its
operations can carry. docs/p2p.md describes the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.layout.blocks import TILE_LANES
from engine.plan.operations import I64, Counts, Delivery, Operation
from engine.plan.selection import dense_counts
from transports.p2p.base import Bytes
from transports.p2p.errors import ProtocolError

PROTOCOL = 1
MAGIC = b"DTE-P2P\n"
HEADER = struct.Struct("<8sII32sqqqqQQ")
"""Magic, protocol, zero, plan digest, epoch, version, base (−1: none), step, bucket bytes, operations."""
NO_BASE = -1
COUNTS_DTYPE = np.dtype("<i8")
ALIGNMENT = 8
"""Every array of the payload starts at a multiple of this, so that it can be used where it arrived."""


@dataclass(frozen=True, slots=True)
class VersionHead:
    """Which version is exchanged: `base` is None for a version that stands on nothing."""

    epoch: int
    version: int
    base: int | None
    step: int


class Announcement(NamedTuple):
    """Round 1 of a pair: the version, how it will be cut, and what each operation carries."""

    plan_digest: str
    head: VersionHead
    bucket_bytes: int
    counts: tuple[Counts, ...]


class Sizes(NamedTuple):
    """Bytes of an operation's four arrays, without padding."""

    tiles: int
    local: int
    bits: int
    dense: int


def announcement_size(operations: int) -> int:
    """Bytes of round 1 for a pair with so many operations."""
    return HEADER.size + operations * 3 * COUNTS_DTYPE.itemsize


def encode(announcement: Announcement) -> Bytes:
    """Round 1 as bytes."""
    head, counts = announcement.head, announcement.counts
    packed = HEADER.pack(
        MAGIC,
        PROTOCOL,
        0,
        bytes.fromhex(announcement.plan_digest),
        head.epoch,
        head.version,
        NO_BASE if head.base is None else head.base,
        head.step,
        announcement.bucket_bytes,
        len(counts),
    )
    table = np.array([(c.entries, c.tiles, c.dense_lanes) for c in counts], COUNTS_DTYPE)
    return np.frombuffer(bytearray(packed + table.tobytes()), np.uint8)


def decode(
    data: Bytes,
    operations: Sequence[Operation],
    plan_digest: str,
    expected: VersionHead,
    bucket_bytes: int,
    member: int,
) -> tuple[Counts, ...]:
    """The counts in `data`, which came from `member`. ProtocolError unless all of it is what is expected and possible.

    `data`: as many bytes as `announcement_size` says.
    """
    magic, protocol, zero, digest, epoch, version, base, step, bucket, number = HEADER.unpack(
        data[: HEADER.size].tobytes()
    )
    if magic != MAGIC or protocol != PROTOCOL or zero != 0:
        raise _wrong(member, "speaks another protocol")
    if digest.hex() != plan_digest:
        raise _wrong(member, "sends by another plan")
    head = VersionHead(epoch, version, None if base == NO_BASE else base, step)
    if head != expected:
        raise _wrong(member, f"sends {head}, not {expected}")
    if bucket != bucket_bytes:
        raise ProtocolError(
            f"member {member} cuts into messages of {bucket} bytes, this one expects {bucket_bytes}.",
            member=member,
            remedy="Give all members the same bucket size.",
        )
    if number != len(operations):
        raise _wrong(member, f"announces {number} operations, the plan has {len(operations)}")
    table = np.frombuffer(data, COUNTS_DTYPE, offset=HEADER.size).reshape(-1, 3)
    counts = tuple(Counts(*row) for row in table.tolist())
    for operation, count in zip(operations, counts, strict=True):
        if (why := _impossible(operation, count)) is not None:
            raise _wrong(member, f"announces {count} of {operation.tensor!r}: {why}")
    return counts


def tiles_in(lanes: int) -> int:
    """Tiles of a slice of so many lanes."""
    return -(-lanes // TILE_LANES)


def _impossible(operation: Operation, c: Counts) -> str | None:
    if min(c.entries, c.tiles, c.dense_lanes) < 0:
        return "counts are not negative"
    if c.entries + c.dense_lanes > operation.lanes:
        return f"it has {operation.lanes} lanes"
    if c.tiles > sum(tiles_in(part.layout.src_numel) for part in operation.parts):
        return "its slices have fewer tiles"
    if not c.tiles <= c.dense_lanes <= c.tiles * TILE_LANES:
        return "tiles and lanes in them do not fit together"
    return None


def sizes(operation: Operation, counts: Counts) -> Sizes:
    """Bytes of the arrays that the operation carries."""
    index = np.dtype(operation.index_dtype).itemsize
    return Sizes(16 * counts.tiles, index * counts.entries, 2 * counts.entries, 2 * counts.dense_lanes)


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def payload_size(operations: Sequence[Operation], counts: Sequence[Counts]) -> int:
    """Bytes of round 2 of a pair."""
    return sum(padded(n) for o, c in zip(operations, counts, strict=True) for n in sizes(o, c))


def messages(total: int, bucket_bytes: int) -> int:
    """Messages that a payload of `total` bytes is cut into: an empty one is still one."""
    return max(1, -(-total // bucket_bytes))


def deliveries(
    payload: Bytes, operations: Sequence[Operation], counts: Sequence[Counts], member: int
) -> list[Delivery]:
    """The payload's arrays as views of it, checked: ProtocolError where a number would lead outside its operation."""
    at = 0
    out = []
    for operation, count in zip(operations, counts, strict=True):
        arrays: list[Bytes] = []
        for nbytes in sizes(operation, count):
            arrays.append(payload[at : at + nbytes])
            at += padded(nbytes)
        tiles, local, bits, dense = arrays
        delivery = Delivery(
            operation,
            local.view(operation.index_dtype),
            bits.view(np.uint16),
            tiles.view(np.int64).reshape(-1, 2),
            dense.view(np.uint16),
        )
        _check(delivery, member)
        out.append(delivery)
    return out


def _check(delivery: Delivery, member: int) -> None:
    operation, local = delivery.operation, delivery.local
    if local.size and not (int(local.min()) >= 0 and int(local.max()) < operation.span):
        raise _wrong(member, f"sends entries of {operation.tensor!r} outside the tensor")
    if delivery.tiles.size:
        reached = _reached(operation, delivery.tiles)
        if reached is None or reached.min() < 1 or int(reached.sum()) != delivery.dense.size:
            raise _wrong(member, f"sends tiles of {operation.tensor!r} that its slices do not have")


def _reached(operation: Operation, tiles: I64) -> I64 | None:
    """Lanes of each tile that the receiver has; None if the list is not one of rising tiles of the operation."""
    place, tile = tiles[:, 0], tiles[:, 1]
    limits = np.array([tiles_in(part.layout.src_numel) for part in operation.parts], np.int64)
    if place.min() < 0 or place.max() >= limits.size or tile.min() < 0 or bool((tile >= limits[place]).any()):
        return None
    rising = (place[1:] > place[:-1]) | ((place[1:] == place[:-1]) & (tile[1:] > tile[:-1]))
    if not rising.all():
        return None
    return np.concatenate([dense_counts(operation.parts[p], tile[place == p]) for p in np.unique(place).tolist()])


def _wrong(member: int, what: str) -> ProtocolError:
    return ProtocolError(f"member {member} {what}.", member=member)
