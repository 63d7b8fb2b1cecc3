"""The weights of a run, rebuilt from its chunks in a temporary file, to check what the decisions claim.

It shares the decoder and the digest with the product but not the code that installs versions: what it finds is a second
opinion. Invariant: `at` names the version whose bits the file holds, and is None while they are no version's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from engine.codec.chunk import ChunkItem
from engine.detect.base import I64, TILE, U16
from engine.digest import DigestKey, digest_array, to_hex
from engine.errors import CodecError
from engine.layout.algebra import from_json
from engine.layout.blocks import Layout
from engine.layout.mapping import map_indices
from engine.records import ITEMSIZE, TensorDigest, TensorMeta


def lanes_of(meta: TensorMeta) -> int:
    """16-bit lanes of a canonical tensor."""
    count = 1
    for n in meta.shape:
        count *= n
    return -(-count * ITEMSIZE[meta.dtype] // 2)


class RebuiltWeights:
    """All tensors' lanes in one mapped file. Close it, or use it as a context manager."""

    def __init__(self, workdir: Path | None) -> None:
        self.at: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="dte-verify-", dir=workdir)
        self._tensors: dict[str, TensorDigest] = {}
        self._start: dict[str, int] = {}
        self._lanes: npt.NDArray[np.uint16] = np.empty(0, np.uint16)

    def reset(self, tensors: Sequence[TensorDigest]) -> None:
        """Start anew for these tensors; their bits are then all zero and no version's."""
        self.at = None
        self._tensors = {t.name: t for t in tensors}
        self._start, total = {}, 0
        for t in tensors:
            self._start[t.name] = total
            total += lanes_of(t)
        path = Path(self._folder.name) / "lanes"
        path.unlink(missing_ok=True)
        self._lanes = np.memmap(path, np.uint16, "w+", shape=(max(1, total),))

    @property
    def total_lanes(self) -> int:
        return sum(lanes_of(t) for t in self._tensors.values())

    def tensor(self, name: str) -> U16:
        """The lanes of one tensor, writable."""
        start = self._start[name]
        return self._lanes[start : start + lanes_of(self._tensors[name])]

    def apply(self, items: Iterable[ChunkItem], *, dense_only: bool) -> int:
        """Write what a chunk says; returns the lanes it carried dense. CodecError if it does not fit the tensors."""
        dense = 0
        for item in items:
            layout = self._layout(item)
            lanes = self.tensor(item.tensor)
            if item.ranks.size:
                if dense_only:
                    raise CodecError(f"a chunk without base carries differences of {item.tensor!r}.")
                lanes[map_indices(layout, item.ranks)] += item.diffs
            for canonical, bits in _dense_tiles(item, layout):
                lanes[canonical] = bits
                dense += bits.size
        return dense

    def differs(self, items: Iterable[ChunkItem]) -> tuple[int, int]:
        """(lanes of a dense chunk that are not what is held here, lanes it carries)."""
        different = carried = 0
        for item in items:
            layout = self._layout(item)
            lanes = self.tensor(item.tensor)
            for canonical, bits in _dense_tiles(item, layout):
                different += int((lanes[canonical] != bits).sum())
                carried += bits.size
        return different, carried

    def wrong_digests(self, tensors: Sequence[TensorDigest]) -> list[str]:
        """Names of tensors whose digest is not the one given, or that are not held with that shape and dtype."""
        wrong = []
        for t in tensors:
            held = self._tensors.get(t.name)
            same_form = held is not None and (held.shape, held.dtype) == (t.shape, t.dtype)
            if not same_form or self._digest(t.name) != t.digest:
                wrong.append(t.name)
        return wrong + sorted(self._tensors.keys() - {t.name for t in tensors})

    def _digest(self, name: str) -> str:
        return to_hex(digest_array(DigestKey.for_tensor(name), np.asarray(self.tensor(name))))

    def _layout(self, item: ChunkItem) -> Layout:
        held = self._tensors.get(item.tensor)
        if held is None or (tuple(item.shape), item.dtype) != (tuple(held.shape), held.dtype):
            raise CodecError(f"a chunk carries {item.tensor!r} in a form that the decision does not have.")
        return from_json(item.blocks, item.lanes, lanes_of(held))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._lanes = np.empty(0, np.uint16)
        self._folder.cleanup()


def _dense_tiles(item: ChunkItem, layout: Layout) -> Iterable[tuple[I64, U16]]:
    at = 0
    for tile in item.dense_tiles.tolist():
        start, stop = tile * TILE, min((tile + 1) * TILE, item.lanes)
        yield map_indices(layout, np.arange(start, stop, dtype=np.int64)), item.dense_bits[at : at + stop - start]
        at += stop - start
