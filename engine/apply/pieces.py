"""From chunk files to (tensor, canonical lanes, bits): everything a chunk claims is checked here, before any write.

One invariant: at most one chunk is in memory at a time, and what leaves this module lies inside its tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from engine.apply.errors import ChunkDamaged, TensorMismatch
from engine.apply.live import LiveTensor, lane_count
from engine.apply.target import ChunkFile, Target
from engine.codec.chunk import ChunkHeader, ChunkItem, decode
from engine.detect.base import I64, TILE, U16, tile_count
from engine.errors import CodecError
from engine.layout.algebra import from_json, map_indices, validate_slice
from engine.layout.blocks import Layout, contiguous_shift
from engine.records.models import TensorDigest

MAX_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Sparse:
    """Lanes whose bits move by `diffs` (mod 2^16) from the base's."""

    tensor: str
    canonical: I64
    diffs: U16


@dataclass(frozen=True, slots=True)
class Dense:
    """The bits of one whole tile of a writer's slice.

    `start`: its first canonical lane where the tile is one run of them, which spares the index; None where it is not.
    """

    tensor: str
    bits: U16
    start: int | None
    scattered: I64 | None = None

    @property
    def canonical(self) -> I64:
        """The canonical lane of each of `bits`."""
        if self.scattered is not None:
            return self.scattered
        return np.arange(self.bits.size, dtype=np.int64) + (self.start or 0)


def read_chunk(file: ChunkFile) -> bytes:
    """The bytes of a chunk file; ChunkDamaged unless size and SHA-256 are what its part declares."""
    if file.size_bytes > MAX_CHUNK_BYTES:
        raise ChunkDamaged(f"a chunk of {file.size_bytes} bytes is declared, more than the {MAX_CHUNK_BYTES} allowed.")
    try:
        with file.path.open("rb") as handle:
            data = handle.read(file.size_bytes + 1)
    except OSError as error:
        raise ChunkDamaged(
            f"chunk {file.path.name} cannot be read: {error.strerror or error}.", remedy="It is downloaded again."
        ) from None
    if len(data) != file.size_bytes:
        raise ChunkDamaged(
            f"chunk {file.path.name} does not have its {file.size_bytes} bytes.", remedy="It is downloaded again."
        )
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ChunkDamaged(f"chunk {file.path.name} has the wrong SHA-256.", remedy="It is downloaded again.")
    return data


class Reader:
    """Reads the chunks of one target for the tensors this rank holds."""

    def __init__(self, target: Target, selected: Mapping[str, LiveTensor]) -> None:
        self._target = target
        self._selected = selected
        self._metas: dict[str, TensorDigest] = {t.name: t for t in target.tensors}
        self._layouts: dict[tuple[int, str, int], Layout] = {}

    def pieces(self, file: ChunkFile) -> Iterator[Sparse | Dense]:
        """What the chunk says, item by item, dense tiles one by one. CodecError or TensorMismatch if it is nonsense."""
        header, items = decode(read_chunk(file), max_raw_bytes=file.raw_bytes)
        self._check_header(header, file)
        entries = sum(item.ranks.size for item in items)
        if entries > file.entries:
            raise CodecError(f"chunk {file.path.name} has {entries} entries, {file.entries} are declared.")
        for item in items:
            meta = self._check_item(item)
            if item.tensor not in self._selected:
                continue
            layout = self._layout(header.writer, item, meta)
            if item.ranks.size:
                yield Sparse(item.tensor, map_indices(layout, item.ranks), item.diffs)
            yield from self._tiles(item, layout)

    def _check_header(self, header: ChunkHeader, file: ChunkFile) -> None:
        target = self._target
        claimed = (header.run, header.version, header.base)
        if claimed != (target.run, target.version, target.base):
            raise CodecError(
                f"chunk {file.path.name} belongs to run {header.run!r}, version {header.version} on base "
                f"{header.base}, not to run {target.run!r}, version {target.version} on base {target.base}."
            )

    def _check_item(self, item: ChunkItem) -> TensorDigest:
        meta = self._metas.get(item.tensor)
        if meta is None:
            raise TensorMismatch(f"a chunk carries the tensor {item.tensor!r}, which the version does not have.")
        if (tuple(item.shape), item.dtype) != (tuple(meta.shape), meta.dtype):
            raise TensorMismatch(
                f"a chunk carries {item.tensor!r} as {item.dtype} {list(item.shape)}, the version has it as "
                f"{meta.dtype} {list(meta.shape)}."
            )
        if self._target.base is None and item.ranks.size:
            raise CodecError(f"a chunk of version {self._target.version}, which has no base, carries differences.")
        return meta

    def _layout(self, writer: int, item: ChunkItem, meta: TensorDigest) -> Layout:
        numel = lane_count(meta.shape, meta.dtype)
        layout = self._layouts.get((writer, item.tensor, item.slice))
        if layout is None:
            layout = from_json(item.blocks, item.lanes, numel)
            validate_slice(layout, item.lanes)
            self._layouts[writer, item.tensor, item.slice] = layout
        elif layout.src_numel != item.lanes or [b.to_json() for b in layout.blocks] != [list(b) for b in item.blocks]:
            raise CodecError(f"two chunks describe slice {item.slice} of {item.tensor!r} differently.")
        if item.ranks.size and (int(item.ranks[0]) < 0 or int(item.ranks[-1]) >= item.lanes):
            raise CodecError(f"an index of slice {item.slice} of {item.tensor!r} is out of range.")
        return layout

    @staticmethod
    def _tiles(item: ChunkItem, layout: Layout) -> Iterator[Dense]:
        shift = contiguous_shift(layout)
        tiles = tile_count(item.lanes)
        at = 0
        for tile in item.dense_tiles.tolist():
            if not 0 <= tile < tiles:
                raise CodecError(f"a dense tile of slice {item.slice} of {item.tensor!r} is out of range.")
            start, stop = tile * TILE, min((tile + 1) * TILE, item.lanes)
            bits = item.dense_bits[at : at + stop - start]
            at += stop - start
            if bits.size != stop - start:
                raise CodecError(f"a dense tile of slice {item.slice} of {item.tensor!r} is cut short.")
            if shift is not None:
                yield Dense(item.tensor, bits, start + shift)
            else:
                yield Dense(item.tensor, bits, None, map_indices(layout, np.arange(start, stop, dtype=np.int64)))
        if at != item.dense_bits.size:
            raise CodecError(f"slice {item.slice} of {item.tensor!r} carries more dense bits than its tiles hold.")
