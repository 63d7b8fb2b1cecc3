"""`dte inspect`: one stored object, read with the same checks as everywhere, shown to a person.

Invariant: what an object is, is told by its own bytes; a name only helps the message when they make no sense.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from app.cli.output import human_bytes, print_json, print_table
from engine.codec.chunk import ChunkHeader, ChunkItem, decode
from engine.errors import CodecError, InvalidInput
from engine.records import (
    AbortDecision,
    AnchorRecord,
    CommitDecision,
    EpochRecord,
    EpochStartDecision,
    LatestHint,
    LaunchRecord,
    PartRecord,
    Record,
    keys,
    parse_decision,
    parse_record,
    sha256_hex,
)
from transports.store.open import open_store

MAX_OBJECT_BYTES = 1 << 30
MAX_CHUNK_RAW_BYTES = 4 << 30
_LISTED = 40

# In this order: each kind's required fields rule out the ones after it.
_RECORDS: tuple[type[Record], ...] = (PartRecord, LaunchRecord, EpochRecord, AnchorRecord, LatestHint)


def show_object(what: str, store: str | None, token: str | None, *, as_json: bool) -> None:
    """Read and print. InvalidInput if there is no such object, CodecError if it is none of ours."""
    data = _read_file(Path(what)) if store is None else asyncio.run(_read_key(what, store, token))
    if data[:1] == b"{":
        record = _parse_any_record(what, data)
        _show_record(record, data, as_json=as_json)
    else:
        header, items = decode(data, max_raw_bytes=MAX_CHUNK_RAW_BYTES)
        _show_chunk(header, items, data, as_json=as_json)


def _read_file(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_OBJECT_BYTES:
            raise InvalidInput(f"{path} is larger than the {human_bytes(MAX_OBJECT_BYTES)} an object may have.")
        return path.read_bytes()
    except OSError as e:
        raise InvalidInput(
            f"cannot read {path}: {e.strerror}.", remedy="Give a file, or a key together with --store."
        ) from None


async def _read_key(key: str, url: str, token: str | None) -> bytes:
    keys.check_key(key)
    async with open_store(url, token) as store:
        return await store.get(key, max_bytes=MAX_OBJECT_BYTES)


def _parse_any_record(what: str, data: bytes) -> Record:
    try:
        fields = json.loads(data)
    except ValueError as e:
        raise CodecError(f"{what} looks like a record but is not valid JSON: {e}.") from None
    if isinstance(fields, dict) and "kind" in fields:
        return parse_decision(data)
    for kind in _RECORDS:
        if isinstance(fields, dict) and _required(kind) <= fields.keys():
            return parse_record(kind, data)
    raise CodecError(f"{what} is JSON, but no record of this system.")


def _required(kind: type[Record]) -> set[str]:
    return {name for name, field in kind.model_fields.items() if field.is_required()}


def _kind_name(record: Record) -> str:
    names: dict[type[Record], str] = {
        CommitDecision: "commit decision",
        AbortDecision: "abort decision",
        EpochStartDecision: "epoch-start decision",
        PartRecord: "part",
        LaunchRecord: "launch",
        EpochRecord: "epoch",
        AnchorRecord: "anchor",
        LatestHint: "latest hint",
    }
    return names[type(record)]


def _show_record(record: Record, data: bytes, *, as_json: bool) -> None:
    kind = _kind_name(record)
    if as_json:
        print_json({"object": kind, "sha256": sha256_hex(data), "record": record.model_dump(mode="json")})
        return
    fields = record.model_dump(mode="json")
    print(f"{kind}, {human_bytes(len(data))}, sha256 {sha256_hex(data)}")
    scalars = [(k, _scalar(v)) for k, v in fields.items() if not isinstance(v, list)]
    print_table(("field", "value"), scalars)
    for name, value in fields.items():
        if isinstance(value, list):
            print(f"\n{name}: {len(value)}")
            _show_list(value)


def _scalar(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "-"
    return "-" if value is None else str(value)


def _show_list(rows: list[Any]) -> None:
    if not rows:
        return
    if not isinstance(rows[0], dict):
        print("  " + ", ".join(str(r) for r in rows[:_LISTED]) + (" …" if len(rows) > _LISTED else ""))
        return
    columns = [c for c in rows[0] if c != "blocks"]
    print_table(columns, [[_scalar_or_shape(row[c]) for c in columns] for row in rows[:_LISTED]])
    if len(rows) > _LISTED:
        print(f"… and {len(rows) - _LISTED} more (--json shows all)")


def _scalar_or_shape(value: Any) -> str:
    return "×".join(str(n) for n in value) if isinstance(value, list) else _scalar(value)


def _show_chunk(header: ChunkHeader, items: list[ChunkItem], data: bytes, *, as_json: bool) -> None:
    entries = sum(int(i.ranks.size) for i in items)
    dense_lanes = sum(int(i.dense_bits.size) for i in items)
    rows = [
        {
            "tensor": i.tensor,
            "shape": list(i.shape),
            "dtype": i.dtype,
            "slice": i.slice,
            "lanes": i.lanes,
            "blocks": len(i.blocks),
            "entries": int(i.ranks.size),
            "dense_tiles": int(i.dense_tiles.size),
        }
        for i in items
    ]
    bits = 8 * len(data) / entries if entries and not dense_lanes else None
    if as_json:
        print_json(
            {
                "object": "chunk",
                "sha256": sha256_hex(data),
                "size_bytes": len(data),
                "run": header.run,
                "version": header.version,
                "epoch": header.epoch,
                "writer": header.writer,
                "seq": header.seq,
                "base": header.base,
                "entries": entries,
                "dense_lanes": dense_lanes,
                "bits_per_entry": bits,
                "items": rows,
            }
        )
        return
    base = "no base" if header.base is None else f"base {header.base}"
    print(f"chunk, {human_bytes(len(data))}, sha256 {sha256_hex(data)}")
    print(
        f"run {header.run}, version {header.version} on {base}, epoch {header.epoch}, writer {header.writer}, "
        f"number {header.seq}"
    )
    cost = f", {bits:.2f} bits an entry" if bits is not None else ""
    print(f"{entries} entries, {dense_lanes} dense lanes{cost}\n")
    _show_list(rows)
