"""A small publisher for tests: writes decisions, parts, chunks and anchors into a store, without any training.

Tensors are u16 lanes; each writer owns a contiguous share of every tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.apply import ChunkFile, Target
from engine.codec.chunk import ChunkHeader, ChunkItem, encode
from engine.detect.base import tile_count
from engine.digest import DigestKey, digest_array, to_hex
from engine.layout.algebra import contiguous, to_json
from engine.layout.blocks import Layout
from engine.records import (
    AbortDecision,
    AnchorRecord,
    ChunkRef,
    CommitDecision,
    Decision,
    EpochStartDecision,
    PartRecord,
    PartRef,
    SliceResult,
    TensorDigest,
    TensorMeta,
    Totals,
    keys,
    record_bytes,
    sha256_hex,
    sign,
)
from transports.store.base import ChunkStore

U16 = npt.NDArray[np.uint16]
State = dict[str, U16]

EMPTY_I64: npt.NDArray[np.int64] = np.empty(0, np.int64)
EMPTY_U16: U16 = np.empty(0, np.uint16)


def metas_of(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> list[TensorMeta]:
    return [TensorMeta(name=n, shape=s, dtype=d) for n, (s, d) in shapes.items()]  # type: ignore[arg-type]


def digest_of(name: str, lanes: U16) -> str:
    return to_hex(digest_array(DigestKey.for_tensor(name), lanes))


def changed(state: State, rng: np.random.Generator, fraction: float = 0.05) -> State:
    """A new state in which about `fraction` of the lanes moved, mostly by one."""
    out = {}
    for name, lanes in state.items():
        new = lanes.copy()
        hit = np.flatnonzero(rng.random(lanes.size) < fraction)
        new[hit] += rng.choice(np.array([1, 65535, 3, 0x8000], np.uint16), hit.size)
        out[name] = new
    return out


def item(
    meta: TensorMeta,
    layout: Layout,
    slice_number: int,
    base: U16 | None,
    lanes: U16,
    *,
    dense: bool = False,
) -> ChunkItem:
    """What a writer that owns `layout` sends for a tensor: everything dense, or the difference from `base`."""
    block = layout.blocks[0]
    start, stop = block.dst_offset, block.dst_offset + layout.src_numel
    mine = lanes[start:stop]
    if dense or base is None:
        tiles = np.arange(tile_count(mine.size), dtype=np.int64)
        return make_item(meta, slice_number, layout, EMPTY_I64, EMPTY_U16, tiles, mine)
    before = base[start:stop]
    ranks = np.flatnonzero(mine != before).astype(np.int64)
    return make_item(meta, slice_number, layout, ranks, mine[ranks] - before[ranks], EMPTY_I64, EMPTY_U16)


def make_item(
    meta: TensorMeta,
    slice_number: int,
    layout: Layout,
    ranks: npt.NDArray[np.int64],
    diffs: U16,
    dense_tiles: npt.NDArray[np.int64] = EMPTY_I64,
    dense_bits: U16 = EMPTY_U16,
) -> ChunkItem:
    return ChunkItem(
        tensor=meta.name,
        shape=tuple(meta.shape),
        dtype=meta.dtype,
        slice=slice_number,
        lanes=layout.src_numel,
        blocks=to_json(layout),
        ranks=ranks,
        diffs=diffs,
        dense_tiles=dense_tiles,
        dense_bits=dense_bits,
    )


def shares(lanes: int, writers: int) -> list[Layout]:
    """Contiguous layouts of `writers` equal shares."""
    cuts = [lanes * w // writers for w in range(writers + 1)]
    return [contiguous(a, b - a, lanes) for a, b in itertools.pairwise(cuts) if b > a]


class Publisher:
    """Writes the versions of one run. All records are real; only the training is missing."""

    def __init__(
        self,
        store: ChunkStore,
        metas: list[TensorMeta],
        *,
        run: str = "r",
        writers: int = 1,
        signing_key: bytes | None = None,
    ) -> None:
        self.store, self.metas, self.run, self.writers, self.key = store, metas, run, writers, signing_key
        self.next = 0
        self.epoch = 1
        self.head: CommitDecision | None = None
        self.states: dict[int, State] = {}

    def digests(self, state: State) -> list[TensorDigest]:
        return [
            TensorDigest(name=m.name, shape=m.shape, dtype=m.dtype, digest=digest_of(m.name, state[m.name]))
            for m in self.metas
        ]

    async def publish(
        self, state: State, *, dense: Iterable[str] = (), step: int | None = None, without_chunks: bool = False
    ) -> CommitDecision:
        """Commit `state`; the tensors in `dense` (all, for the first version) are sent whole."""
        base = None if self.head is None else self.states[self.head.version]
        parts, changed_lanes, dense_tiles, dense_lanes, sizes = [], 0, 0, 0, []
        step = self.next if step is None else step
        for writer in range(self.writers):
            items, results = [], []
            for number, meta in enumerate(self.metas):
                layouts = shares(state[meta.name].size, self.writers)
                if writer >= len(layouts):
                    continue
                before = None if base is None else base[meta.name]
                it = item(meta, layouts[writer], number, before, state[meta.name], dense=meta.name in set(dense))
                items.append(it)
                start = layouts[writer].blocks[0].dst_offset
                key = DigestKey.for_tensor(meta.name)
                mine = slice(start, start + it.lanes)
                results.append(
                    SliceResult(
                        slice=number,
                        tensor=meta.name,
                        digest_base=None if before is None else to_hex(digest_array(key, before[mine], start)),
                        digest=to_hex(digest_array(key, state[meta.name][mine], start)),
                        changed=it.ranks.size,
                        dense_tiles=it.dense_tiles.size,
                        dense_lanes=it.dense_bits.size,
                        tiles=tile_count(it.lanes),
                    )
                )
                changed_lanes += it.ranks.size
                dense_tiles += it.dense_tiles.size
                dense_lanes += it.dense_bits.size
            items = [it for it in items if it.ranks.size or it.dense_tiles.size]
            refs = [] if without_chunks or not items else [await self._put_chunk(self.next, writer, items)]
            sizes += [r.size_bytes for r in refs]
            part = PartRecord(
                run=self.run, version=self.next, epoch=self.epoch, writer=writer, launch="l", step=step,
                base=None if self.head is None else self.head.version, chunks=refs, slices=results,
            )  # fmt: skip
            data = record_bytes(part)
            at = keys.part(self.run, self.next, self.epoch, writer)
            await self.store.put(at, data)
            parts.append(PartRef(writer=writer, key=at, sha256=sha256_hex(data)))
        total = sum(v.size for v in state.values())
        decision = CommitDecision(
            run=self.run, version=self.next, epoch=self.epoch, launch="l", step=step,
            base=None if self.head is None else self.head.version, rewound=bool(set(dense)), parts=parts,
            tensors=self.digests(state), created_ms=0,
            totals=Totals(elements=total, changed=changed_lanes, dense_tiles=dense_tiles,
                          dense_lanes=dense_lanes, chunks=len(sizes), bytes=sum(sizes)),
        )  # fmt: skip
        self.states[self.next] = {n: v.copy() for n, v in state.items()}
        self.head = decision
        await self._decide(decision)
        return decision

    async def abort(self) -> None:
        await self._decide(AbortDecision(run=self.run, version=self.next, epoch=self.epoch, reason="unchanged"))

    async def start_epoch(self) -> None:
        self.epoch += 1
        base = None if self.head is None else self.head.version
        await self._decide(
            EpochStartDecision(
                run=self.run, version=self.next, epoch=self.epoch, launch=f"l{self.epoch}", base=base, differs=[]
            )
        )

    async def anchor(self, version: int) -> AnchorRecord:
        """A dense copy of a committed version."""
        state = self.states[version]
        items = [
            item(m, contiguous(0, state[m.name].size, state[m.name].size), i, None, state[m.name])
            for i, m in enumerate(self.metas)
            if state[m.name].size
        ]
        header = ChunkHeader(run=self.run, version=version, epoch=1, writer=0, seq=0, base=None)
        coded = encode(header, items)
        sha = sha256_hex(coded.data)
        key = keys.anchor_chunk(self.run, version, 0, sha)
        await self.store.put(key, coded.data)
        record = AnchorRecord(
            run=self.run, version=version, tensors=self.digests(state),
            chunks=[ChunkRef(key=key, sha256=sha, size_bytes=len(coded.data), raw_bytes=coded.raw_bytes,
                             entries=coded.entries)],
        )  # fmt: skip
        record = sign(record, self.key)
        await self.store.put(keys.anchor_manifest(self.run, version), record_bytes(record))
        return record

    async def _put_chunk(self, version: int, writer: int, items: list[ChunkItem]) -> ChunkRef:
        base = None if self.head is None else self.head.version
        coded = encode(
            ChunkHeader(run=self.run, version=version, epoch=self.epoch, writer=writer, seq=0, base=base), items
        )
        sha = sha256_hex(coded.data)
        key = keys.chunk(self.run, version, self.epoch, writer, 0, sha)
        await self.store.put(key, coded.data)
        return ChunkRef(
            key=key, sha256=sha, size_bytes=len(coded.data), raw_bytes=coded.raw_bytes, entries=coded.entries
        )

    async def _decide(self, decision: Decision) -> None:
        created = await self.store.put_if_absent(
            keys.decision(self.run, self.next), record_bytes(sign(decision, self.key))
        )
        assert created
        self.next += 1


def chunk_file(folder: Path, header: ChunkHeader, items: list[ChunkItem], name: str = "c") -> ChunkFile:
    """Encode a chunk into a local file."""
    coded = encode(header, items)
    path = folder / f"{name}-{sha256_hex(coded.data)[:12]}.dtc"
    path.write_bytes(coded.data)
    return ChunkFile(path, sha256_hex(coded.data), len(coded.data), coded.raw_bytes, coded.entries)


def local_target(
    folder: Path,
    metas: list[TensorMeta],
    state: State,
    base: State | None,
    *,
    version: int = 1,
    writers: int = 1,
    dense: Iterable[str] = (),
    run: str = "r",
    **changes: Any,
) -> Target:
    """A target with its chunks in `folder`, as a daemon would hand it to a receiver."""
    files = []
    number = None if base is None else version - 1
    for writer in range(writers):
        items = []
        for i, meta in enumerate(metas):
            layouts = shares(state[meta.name].size, writers)
            if writer < len(layouts):
                before = None if base is None else base[meta.name]
                items.append(item(meta, layouts[writer], i, before, state[meta.name], dense=meta.name in set(dense)))
        items = [it for it in items if it.ranks.size or it.dense_tiles.size]
        if items:
            header = ChunkHeader(run=run, version=version, epoch=1, writer=writer, seq=0, base=number)
            files.append(chunk_file(folder, header, items, f"v{version}w{writer}"))
    values: dict[str, Any] = {
        "run": run, "version": version, "step": version * 10, "base": number,
        "tensors": tuple(
            TensorDigest(name=m.name, shape=m.shape, dtype=m.dtype, digest=digest_of(m.name, state[m.name]))
            for m in metas
        ),
        "base_digests": None if base is None else {m.name: digest_of(m.name, base[m.name]) for m in metas},
        "chunks": tuple(files),
    }  # fmt: skip
    return Target(**(values | changes))
