"""`dte bench wire`: what a changed element costs on the wire, in this format, in PULSE's layout, and at least.

Invariant: `gap` is the size of real chunks, as the publisher would write them, decoded again and compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from app.bench.state import Workload, workload
from app.cli.output import human_bytes, print_table
from engine.codec.baselines import diff_entropy_bits, gap_entropy_bits, pulse_bits
from engine.codec.chunk import ChunkHeader, ChunkItem, decode, encode
from engine.detect.base import I64, U16
from engine.errors import ProofError
from engine.layout.algebra import to_json

CHUNK_ENTRIES = 4 << 20


def run_wire(record: Path | None, *, json_output: bool) -> None:
    """Measure and print."""
    work = workload(record)
    changes = _changes(work)
    count = sum(ranks.size for ranks, _, _ in changes)
    if count == 0:
        raise ProofError("the recorded step changed nothing.", remedy="Record another one: dte demo --record DIR.")
    gap_bytes = _gap_bytes(work, changes)
    # PULSE's layout counts indices through all weights at once, as one flat vector.
    flat = np.concatenate([ranks + t.start for (ranks, _, _), t in zip(changes, work.tensors, strict=True)])
    pulse = pulse_bits(flat, np.concatenate([new for _, _, new in changes]))
    gap_entropy = gap_entropy_bits(flat)
    diff_entropy = diff_entropy_bits(np.concatenate([new - old for _, old, new in changes]))
    bits = {
        "gap": 8 * gap_bytes / count,
        "pulse": pulse,
        "entropy": gap_entropy + diff_entropy,
        "entropy_gap": gap_entropy,
        "entropy_diff": diff_entropy,
    }
    note = {
        "gap": "rank gaps + ulp differences, zstd-1: the chunks this system sends",
        "pulse": "int32 index + BF16 value, zstd-1",
        "entropy": "order-0 entropy of gap and ulp difference",
        "entropy_gap": "  of the gap alone",
        "entropy_diff": "  of the ulp difference alone",
    }
    print_table(
        ("layout", "bits/entry", "bytes", "note"),
        [(k, f"{v:.2f}", human_bytes(v * count / 8), note[k]) for k, v in bits.items()],
        title=f"{work.numel:,} parameters, {count:,} changed ({count / work.numel:.3%})",
    )
    if json_output:
        print(
            json.dumps(
                {
                    "bench": "wire",
                    "parameters": work.numel,
                    "changed": count,
                    "changed_fraction": count / work.numel,
                    "bits_per_entry": bits,
                    "bytes": {k: v * count / 8 for k, v in bits.items()},
                    "pulse_over_gap": pulse / bits["gap"],
                }
            )
        )


def _changes(work: Workload) -> list[tuple[I64, U16, U16]]:
    """(ranks, old bits, new bits) of every tensor."""
    new_bits = work.new_bits()
    out = []
    for _, at in work.slices():
        before, after = work.prev_bits[at], new_bits[at]
        ranks = np.flatnonzero(before != after).astype(np.int64)
        out.append((ranks, before[ranks], after[ranks]))
    return out


def _gap_bytes(work: Workload, changes: list[tuple[I64, U16, U16]]) -> int:
    """Bytes of all chunks; ProofError if one does not decode to what was put in."""
    total = seq = waiting = 0
    items: list[ChunkItem] = []
    for (geometry, _), place, (ranks, old, new) in zip(work.slices(), work.tensors, changes, strict=True):
        items.append(
            ChunkItem(
                tensor=place.name,
                shape=place.shape,
                dtype="bfloat16",
                slice=seq,
                lanes=place.numel,
                blocks=to_json(geometry.layout),
                ranks=ranks,
                diffs=new - old,
                dense_tiles=np.zeros(0, np.int64),
                dense_bits=np.zeros(0, np.uint16),
            )
        )
        waiting += ranks.size
        if waiting >= CHUNK_ENTRIES:
            total += _chunk_bytes(seq, items)
            items, waiting, seq = [], 0, seq + 1
    return total + (_chunk_bytes(seq, items) if items else 0)


def _chunk_bytes(seq: int, items: list[ChunkItem]) -> int:
    chunk = encode(ChunkHeader(run="bench", version=1, epoch=1, writer=0, seq=seq, base=0), items)
    _, back = decode(chunk.data, max_raw_bytes=chunk.raw_bytes)
    for a, b in zip(items, back, strict=True):
        if not (np.array_equal(a.ranks, b.ranks) and np.array_equal(a.diffs, b.diffs)):
            raise ProofError(f"the chunk of {a.tensor} does not decode to what was encoded.")
    return len(chunk.data)
