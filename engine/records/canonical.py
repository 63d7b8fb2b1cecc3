"""Canonical bytes of records: UTF-8 JSON, keys sorted, no white space. Parsing is bounded and never trusts sizes."""

from __future__ import annotations

import hashlib
import hmac as hmac_module
import json
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from engine.errors import CodecError
from engine.records.models import AnchorRecord, Decision, Record

MAX_RECORD_BYTES = 64 << 20

R = TypeVar("R", bound=Record)
S = TypeVar("S", bound=Record)
_DECISION: TypeAdapter[Decision] = TypeAdapter(Decision)


def record_bytes(record: Record) -> bytes:
    """The canonical bytes of a record."""
    return json.dumps(record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def _explain(what: str, error: ValidationError) -> CodecError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(p) for p in first["loc"]) or "top level"
    return CodecError(
        f"{what} is malformed at {where}: {first['msg']}.",
        remedy="The object was damaged or written by an incompatible version; fetch it again or restore it.",
    )


def _check_size(what: str, data: bytes) -> None:
    if len(data) > MAX_RECORD_BYTES:
        raise CodecError(f"{what} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} a record may have.")


def parse_record(kind: type[R], data: bytes) -> R:
    """Parse the bytes of a record of one known kind; CodecError if they are not one."""
    _check_size(kind.__name__, data)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _explain(kind.__name__, error) from None


def parse_decision(data: bytes) -> Decision:
    """Parse a decision of any kind; CodecError if the bytes are not one."""
    _check_size("decision", data)
    try:
        return _DECISION.validate_json(data)
    except ValidationError as error:
        raise _explain("decision", error) from None


def _mac(record: Record, key: bytes) -> str:
    unsigned = record.model_copy(update={"hmac": None})
    return hmac_module.new(key, record_bytes(unsigned), hashlib.sha256).hexdigest()


def sign(record: S, key: bytes | None) -> S:
    """The record with its HMAC-SHA-256 (RFC 2104) over the canonical bytes with `hmac` null; as it is without a key."""
    return record if key is None else record.model_copy(update={"hmac": _mac(record, key)})


def verify(record: Decision | AnchorRecord, key: bytes | None) -> None:
    """Raise CodecError unless the record is signed with `key`. Without a key nothing is required."""
    if key is None:
        return
    if record.hmac is None or not hmac_module.compare_digest(record.hmac, _mac(record, key)):
        raise CodecError(
            f"the signature of version {record.version} of run {record.run!r} is missing or wrong.",
            remedy="Give every daemon of the run the same signing key.",
        )
