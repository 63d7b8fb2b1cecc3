"""Frames between the daemon and its worker: u32 little-endian length, then one JSON object.

One invariant: a peer can make the other side neither allocate more than `MAX_FRAME_BYTES` nor run anything.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, BinaryIO

from engine.errors import CodecError

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


def pack(message: dict[str, Any]) -> bytes:
    """One frame. CodecError if it would be longer than a frame may be."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise CodecError(f"a worker message has {len(body)} bytes; {MAX_FRAME_BYTES} are allowed.")
    return _LENGTH.pack(len(body)) + body


def _check_length(prefix: bytes) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise CodecError(f"a worker frame announces {length} bytes; {MAX_FRAME_BYTES} are allowed.")
    return int(length)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError:
        raise CodecError("a worker frame is not JSON.") from None
    if not isinstance(message, dict):
        raise CodecError("a worker frame is not a JSON object.")
    return message


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame, blocking; None when the peer is gone."""
    prefix = stream.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        return None
    length = _check_length(prefix)
    body = stream.read(length)
    return None if len(body) < length else _parse(body)


async def read_async(stream: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next frame; None when the peer is gone."""
    try:
        length = _check_length(await stream.readexactly(_LENGTH.size))
        return _parse(await stream.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
