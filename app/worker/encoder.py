"""Encode the version in flight from the spool into chunk files.

One invariant: the bytes depend on the ledger and the spooled lanes only, so encoding again after a crash gives the same
chunks under the same names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from app.worker.lanes import LanesReader
from app.worker.protocol import EncodedChunkFile, SpoolLost
from app.worker.source import SliceShape
from app.worker.spool import RankSpool, full_as_error
from engine.codec.chunk import ChunkHeader, ChunkItem, encode
from engine.detect.base import TILE
from engine.detect.geometry import tile_digests
from engine.digest import add_all, to_hex
from engine.ledger import InFlight, Ledger, SliceLedger
from engine.pending import Level
from engine.records import sha256_hex
from engine.records.models import SliceResult

_ENTRY_BYTES = 4
_ITEM_BYTES = 256
_BLOCK_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tiles [first, stop) of a slice that go into one chunk."""

    index: int
    first: int
    stop: int


def _tile_costs(level: Level, lanes: int) -> np.ndarray:
    """Upper estimate of the chunk bytes of every tile, I64[T]."""
    tiles = level.dense.size
    edges = np.arange(tiles + 1, dtype=np.int64) * TILE
    per_tile = np.diff(np.searchsorted(level.ranks, edges))
    sizes = np.diff(np.minimum(edges, lanes))
    return per_tile * _ENTRY_BYTES + np.where(level.dense, 2 * sizes, 0)


def plan(levels: list[Level], lanes: list[int], overhead: list[int], chunk_bytes: int) -> Iterator[list[_Piece]]:
    """Cut the changed tiles of all slices, in order, into chunks of at most about `chunk_bytes` (one tile at least)."""
    chunk: list[_Piece] = []
    used = 0
    for index, level in enumerate(levels):
        costs = _tile_costs(level, lanes[index])
        open_at: int | None = None
        for tile in np.flatnonzero(costs).tolist():
            cost = int(costs[tile]) + (overhead[index] if open_at is None else 0)
            if used + cost > chunk_bytes and (chunk or open_at is not None):
                if open_at is not None:
                    chunk.append(_Piece(index, open_at, tile))
                yield chunk
                chunk, used, open_at = [], 0, None
                cost = int(costs[tile]) + overhead[index]
            used += cost
            open_at = tile if open_at is None else open_at
        if open_at is not None:
            chunk.append(_Piece(index, open_at, level.dense.size))
    if chunk:
        yield chunk


class VersionEncoder:
    """Encodes one version of one rank."""

    def __init__(self, spool: RankSpool, shapes: list[SliceShape], ledger: Ledger, chunk_bytes: int) -> None:
        self._spool = spool
        self._shapes = shapes
        self._ledger = ledger
        self._chunk_bytes = chunk_bytes
        if ledger.in_flight is None or any(s.in_flight is None or s.digest_sent is None for s in ledger.slices):
            raise SpoolLost("no version is in flight in the spool.")
        self._flight: InFlight = ledger.in_flight

    def run(self, on_chunk: Callable[[EncodedChunkFile], None]) -> int:
        """Write all chunks, calling `on_chunk` for each when it is complete on disk; returns how many there are.

        SpoolLost if the spooled lanes are gone or are not the bits that were read, SpoolFull if there is no room.
        """
        assert self._ledger.epoch is not None
        directory = self._spool.chunk_dir(self._flight.version)
        shutil.rmtree(directory, ignore_errors=True)
        with full_as_error("chunks"):
            directory.mkdir(mode=0o700)
        levels = [s.in_flight for s in self._ledger.slices if s.in_flight is not None]
        lanes = [s.lanes for s in self._ledger.slices]
        overhead = [_ITEM_BYTES + _BLOCK_BYTES * len(s.blocks) for s in self._shapes]
        total = sum(_dense_lanes(level.dense, n) for level, n in zip(levels, lanes, strict=True))
        reader = LanesReader(self._spool.lanes_file(self._flight.version), total)
        seq = 0
        try:
            for pieces in plan(levels, lanes, overhead, self._chunk_bytes):
                items = [self._item(p, reader) for p in pieces]
                header = ChunkHeader(
                    run=self._ledger.run,
                    version=self._flight.version,
                    epoch=self._ledger.epoch,
                    writer=self._ledger.rank,
                    seq=seq,
                    base=self._flight.base,
                )
                encoded = encode(header, items)
                path = directory / f"{seq}.dtc"
                part = path.with_suffix(".part")
                with full_as_error("a chunk"):
                    part.write_bytes(encoded.data)
                os.replace(part, path)
                on_chunk(
                    EncodedChunkFile(
                        seq=seq,
                        path=str(path),
                        sha256=sha256_hex(encoded.data),
                        size_bytes=len(encoded.data),
                        raw_bytes=encoded.raw_bytes,
                        entries=encoded.entries,
                    )
                )
                seq += 1
        finally:
            reader.close()
        return seq

    def _item(self, piece: _Piece, reader: LanesReader) -> ChunkItem:
        shape, ledger = self._shapes[piece.index], self._ledger.slices[piece.index]
        level, sent = ledger.in_flight, ledger.digest_sent
        assert level is not None
        assert sent is not None
        lo, hi = np.searchsorted(level.ranks, (piece.first * TILE, piece.stop * TILE))
        dense = piece.first + np.flatnonzero(level.dense[piece.first : piece.stop])
        bits = []
        for tile in dense.tolist():
            lanes = reader.take(min((tile + 1) * TILE, ledger.lanes) - tile * TILE)
            if int(tile_digests(shape.geometry, lanes, tile)[0]) != int(sent[tile]):
                raise SpoolLost(f"the spooled bits of slice {ledger.slice}, tile {tile}, are damaged.")
            bits.append(lanes)
        return ChunkItem(
            tensor=shape.meta.name,
            shape=tuple(shape.meta.shape),
            dtype=shape.meta.dtype,
            slice=ledger.slice,
            lanes=ledger.lanes,
            blocks=shape.blocks,
            ranks=level.ranks[lo:hi],
            diffs=level.cur[lo:hi] - level.base[lo:hi],
            dense_tiles=dense.astype(np.int64),
            dense_bits=np.concatenate(bits) if bits else np.empty(0, np.uint16),
        )


def _dense_lanes(dense: np.ndarray, lanes: int) -> int:
    tiles = np.flatnonzero(dense)
    return int((np.minimum((tiles + 1) * TILE, lanes) - tiles * TILE).sum())


def slice_result(shape: SliceShape, ledger: SliceLedger) -> SliceResult:
    """What the part says of a slice of the version in flight."""
    level, sent = ledger.in_flight, ledger.digest_sent
    assert level is not None
    assert sent is not None
    base = ledger.digest_base_total
    return SliceResult(
        slice=ledger.slice,
        tensor=shape.meta.name,
        digest_base=None if base is None else to_hex(base),
        digest=to_hex(add_all(sent)),
        changed=int(level.ranks.size),
        dense_tiles=int(level.dense.sum()),
        dense_lanes=_dense_lanes(level.dense, ledger.lanes),
        tiles=int(level.dense.size),
    )
