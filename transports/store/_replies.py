"""What the answers of an HTTP store mean: statuses, problem documents, ranges and pages.

Invariant: nothing an answer says is believed before it is checked; what does not fit is a StoreError.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from engine.errors import DteError, InvalidInput
from engine.records.keys import check_key
from transports.errors import (
    KeyConflict,
    ObjectCorrupt,
    ObjectNotFound,
    ObjectTooLarge,
    StoreError,
    StoreForbidden,
    StoreFull,
)

RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
CHECKSUM = "X-Checksum-SHA256"
WANT_CHECKSUM = "X-Want-Checksum"
CORRUPT_TYPE = f"urn:dte:problem:{ObjectCorrupt.code}"

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)
_UNSATISFIED = re.compile(r"bytes \*/(\d{1,19})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reply:
    """A response whose (bounded) body has been read."""

    status: int
    headers: httpx.Headers
    body: bytes = b""

    def document(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is none."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def is_corrupt_upload(self) -> bool:
        return self.status == 422 and self.document().get("type") == CORRUPT_TYPE


def error(reply: Reply, what: str) -> DteError:
    """The error an answer stands for."""
    document = reply.document()
    detail = str(document.get("detail") or f"HTTP {reply.status}")[:500]
    message = f"{what}: {detail}"
    remedy = str(document.get("remedy", ""))[:500]
    status = reply.status
    if status in (401, 403):
        return StoreForbidden(message, remedy=remedy or "Check the store's token.")
    if status == 404:
        return ObjectNotFound(message, remedy=remedy or "It may have been pruned; resolve again.")
    if status == 409:
        return KeyConflict(message, remedy=remedy)
    if status == 413:
        return ObjectTooLarge(message, remedy=remedy)
    if status == 422:
        return (ObjectCorrupt if reply.is_corrupt_upload else InvalidInput)(message, remedy=remedy)
    if status == 507:
        return StoreFull(message, remedy=remedy or "Free space on the store's disk.")
    if 300 <= status < 400:
        return StoreError(f"{what}: the store redirects, which is not followed.", remedy="Use its final address.")
    return StoreError(message, remedy=remedy or "Check that the address is that of a daemon's /store.")


def refuse_encoded(headers: httpx.Headers, what: str) -> None:
    """StoreError for a content-encoded answer: lengths and ranges would be those of other bytes."""
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise StoreError(
            f"{what}: the answer is {coding[:40]}-encoded although identity was asked for.",
            remedy="Turn off compression for /store in the proxy between here and the store.",
        )


def declared_length(headers: httpx.Headers, what: str) -> int:
    """Content-Length, which a store must send: without it a cut body looks whole."""
    value = headers.get("content-length", "")
    if not (value.isascii() and value.isdigit() and len(value) <= 19):
        raise StoreError(f"{what}: the answer does not declare its length.", remedy="Let the proxy pass it on.")
    return int(value)


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes [start, stop) of an object of `total` bytes that one answer carries."""

    start: int
    stop: int
    total: int


def extent(reply: Reply, what: str) -> Extent:
    """What a 200 or 206 answer carries. StoreError if its headers do not fit together."""
    length = declared_length(reply.headers, what)
    if reply.status == 200:
        return Extent(0, length, length)
    match = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
    if match:
        first, last, total = (int(g) for g in match.groups())
        if first <= last < total and last - first + 1 == length:
            return Extent(first, last + 1, total)
    raise StoreError(f"{what}: the answer's Content-Range does not fit its length.", remedy="Check the proxy.")


def unsatisfied_total(reply: Reply) -> int | None:
    """The object's length by a 416 answer."""
    match = _UNSATISFIED.fullmatch(reply.headers.get("content-range", ""))
    return int(match[1]) if match else None


def page(reply: Reply, prefix: str, after: str, what: str) -> tuple[list[str], str | None]:
    """Keys of a listing page and where the next one starts. StoreError unless they are valid, ordered and ours."""
    document = reply.document()
    keys, following = document.get("keys"), document.get("next")
    try:
        if not isinstance(keys, list) or not all(isinstance(k, str) and check_key(k).startswith(prefix) for k in keys):
            raise InvalidInput("a key is not ours.")
        if any(a >= b for a, b in pairwise([after, *keys])) or following not in (None, keys[-1] if keys else None):
            raise InvalidInput("the keys are not in order.")
    except InvalidInput as e:
        raise StoreError(f"{what}: not a listing: {e}", remedy="Check the store's address.") from None
    return keys, following
