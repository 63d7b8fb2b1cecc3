"""Small launches and parts for tests of the commit machine: each writer owns one contiguous slice per tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.commit import PartEntry
from engine.records import (
    LaunchRecord,
    PartRecord,
    PartRef,
    SliceDecl,
    SliceResult,
    TensorMeta,
    keys,
    record_bytes,
    sha256_hex,
)

RUN = "run"
LANES = 8


def digest_of(value: int) -> str:
    """A stand-in for a slice's digest: like the real one it is a function of the bits and adds up."""
    return f"{(value + 1) * 0x9E3779B97F4A7C15 % 2**64:016x}"


def launch_records(
    launch: str, values: Sequence[Mapping[str, int]], *, step: int = 0, shapes: Mapping[str, int] | None = None
) -> list[LaunchRecord]:
    """One record per rank; `values[rank][tensor]` stands for the bits of the rank's slice of the tensor."""
    world = len(values)
    names = sorted({name for v in values for name in v})
    width = {name: (shapes or {}).get(name, world * LANES) for name in names}
    return [
        LaunchRecord(
            run=RUN,
            launch=launch,
            rank=rank,
            world=world,
            step=step,
            tensors=[TensorMeta(name=name, shape=(width[name],)) for name in names],
            slices=[
                SliceDecl(
                    slice=i,
                    tensor=name,
                    lanes=width[name] // world,
                    blocks=[([width[name] // world], 0, [1], rank * (width[name] // world), [1])],
                    digest=digest_of(values[rank][name]),
                )
                for i, name in enumerate(names)
            ],
        )
        for rank in range(world)
    ]


def part(
    version: int,
    epoch: int,
    writer: int,
    *,
    launch: str,
    step: int,
    base: int | None,
    old: Mapping[str, int | None],
    new: Mapping[str, int],
    dense: bool = False,
    created_ms: int = 0,
) -> PartRecord:
    """A part; `old` None means the base's bits are not known. `dense` marks every tile dense."""
    return PartRecord(
        run=RUN,
        version=version,
        epoch=epoch,
        writer=writer,
        launch=launch,
        step=step,
        base=base,
        chunks=[],
        slices=[
            SliceResult(
                slice=i,
                tensor=name,
                digest_base=None if (was := old[name]) is None else digest_of(was),
                digest=digest_of(new[name]),
                changed=0 if dense or was == new[name] else 1,
                dense_tiles=int(dense),
                dense_lanes=LANES if dense else 0,
                tiles=1,
            )
            for i, name in enumerate(sorted(new))
        ],
        created_ms=created_ms,
    )


def entry(record: PartRecord) -> PartEntry:
    key = keys.part(record.run, record.version, record.epoch, record.writer)
    return PartEntry(PartRef(writer=record.writer, key=key, sha256=sha256_hex(record_bytes(record))), record)
