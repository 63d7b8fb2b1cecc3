"""The item table of a chunk: which slices it speaks of, how many entries each has, and where they lie.

One invariant: an `ItemHead` or `ChunkItem` that left this module's checks describes a slice that exists: its blocks
cover [0, lanes) once and lie inside the canonical tensor, its ranks and tiles rise strictly and lie inside the slice.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.codec.streams import MAX_SHIFT
from engine.errors import CodecError, DteError, InvalidInput
from engine.layout.algebra import MAX_INDEX, from_json, validate_slice
from engine.layout.blocks import TILE_LANES
from engine.records.models import ITEMSIZE

U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]

MAX_TABLE_BYTES = 1 << 24
MAX_ITEMS = 1 << 17
MAX_ITEM_BLOCKS = 1 << 12
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:\[\]-]{0,511}")
_FIELDS = (
    "blocks", "count", "dense", "dtype", "exceptions", "exceptions_shift", "lanes", "shape", "shift", "slice", "tensor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChunkItem:
    """What a chunk says of one writer's slice.

    `tensor`, `shape`, `dtype`: the canonical tensor; `slice`, `lanes`, `blocks`: the writer's slice as it registered
    it (block JSON, rank → canonical lane). `ranks` I64 strictly rising, absolute in the slice; `diffs` U16: new − old
    bits mod 2^16, never 0. `dense_tiles` I64 strictly rising tile numbers, in which no rank lies; `dense_bits` U16: all
    lanes of these tiles, one after the other.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    slice: int
    lanes: int
    blocks: list[Any]
    ranks: I64 = field(repr=False)
    diffs: U16 = field(repr=False)
    dense_tiles: I64 = field(repr=False)
    dense_bits: U16 = field(repr=False)


def canonical_lanes(shape: tuple[int, ...], dtype: str) -> int:
    """16-bit lanes of a canonical tensor (a last odd byte is padded)."""
    return (prod(shape) * ITEMSIZE[dtype] + 1) // 2


def _tile_runs(tiles: I64) -> list[list[int]]:
    """[first, count] of each maximal run of consecutive tiles."""
    if not tiles.size:
        return []
    cuts = np.flatnonzero(np.diff(tiles) != 1) + 1
    first = np.concatenate(([0], cuts))
    count = np.diff(np.concatenate((first, [tiles.size])))
    return [[int(tiles[f]), int(n)] for f, n in zip(first, count, strict=True)]


@dataclass(frozen=True, slots=True)
class ItemHead:
    """The table's row of one item: everything but the numbers that the streams hold. `dense`: runs of tiles."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    slice: int
    lanes: int
    blocks: list[Any]
    count: int
    shift: int
    exceptions: int
    exceptions_shift: int
    dense: list[list[int]]

    @staticmethod
    def of(item: ChunkItem, shift: int, exceptions: int, exceptions_shift: int) -> ItemHead:
        """The row of an item that passed `check_item`."""
        return ItemHead(
            item.tensor, item.shape, item.dtype, item.slice, item.lanes, plain_blocks(item.blocks), item.ranks.size,
            shift, exceptions, exceptions_shift, _tile_runs(item.dense_tiles),
        )  # fmt: skip

    @property
    def dense_lanes(self) -> int:
        """Lanes of all dense tiles."""
        return sum(min((a + n) * TILE_LANES, self.lanes) - a * TILE_LANES for a, n in self.dense)

    def tiles(self) -> I64:
        """The dense tile numbers."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(a, a + n, dtype=np.int64) for a, n in self.dense)])


def plain_blocks(blocks: list[Any]) -> list[list[Any]]:
    """Block JSON made of lists and ints only, whatever sequences it came in."""
    return [[[int(n) for n in x] if isinstance(x, list | tuple) else int(x) for x in block] for block in blocks]


def parse_json(data: bytes) -> Any:
    """Parse JSON without duplicate keys or non-finite numbers; CodecError if it is not that."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a key is repeated")
        return out

    def constant(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"a chunk holds malformed JSON: {str(error)[:200]}.") from None


def to_bytes(heads: list[ItemHead]) -> bytes:
    """The table as compact JSON with sorted keys."""
    rows = [{name: getattr(h, name) for name in _FIELDS} for h in heads]
    return json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()


def _int(row: dict[str, Any], name: str, limit: int) -> int:
    value = row[name]
    if type(value) is not int or not 0 <= value <= limit:
        raise CodecError(f"{name} of a chunk's item must be an integer in [0, {limit}], not {str(value)[:40]}.")
    return value


def _head(row: Any) -> ItemHead:
    if not isinstance(row, dict) or set(row) != set(_FIELDS):
        raise CodecError("an item of a chunk has other fields than it must.")
    shape = row["shape"]
    if not isinstance(shape, list) or len(shape) > 16 or any(type(n) is not int for n in shape):
        raise CodecError("the shape of a chunk's item must be a list of at most 16 integers.")
    lanes = _int(row, "lanes", MAX_INDEX - 1)
    count = _int(row, "count", lanes)
    tiles = -(-lanes // TILE_LANES)
    dense, end = row["dense"], -1
    if not isinstance(dense, list):
        raise CodecError("the dense tiles of a chunk's item must be a list of runs.")
    for run in dense:
        if not isinstance(run, list) or len(run) != 2 or any(type(n) is not int for n in run):
            raise CodecError("a run of dense tiles must be [first, count].")
        if run[0] <= end or run[1] < 1 or run[0] + run[1] > tiles:
            raise CodecError(f"a run of dense tiles {run} is out of order or beyond the {tiles} tiles of its slice.")
        end = run[0] + run[1]
    head = ItemHead(
        row["tensor"], tuple(shape), row["dtype"], _int(row, "slice", (1 << 63) - 1), lanes, row["blocks"], count,
        _int(row, "shift", MAX_SHIFT), _int(row, "exceptions", count), _int(row, "exceptions_shift", MAX_SHIFT), dense,
    )  # fmt: skip
    try:
        _check_slice(head)
    except DteError as error:
        raise CodecError(f"an item of a chunk is malformed: {error.message}") from None
    return head


def from_bytes(data: bytes) -> list[ItemHead]:
    """Parse and check a table; CodecError if it is not one."""
    rows = parse_json(data)
    if not isinstance(rows, list) or len(rows) > MAX_ITEMS:
        raise CodecError(f"the table of a chunk must be a list of at most {MAX_ITEMS} items.")
    return [_head(row) for row in rows]


def _check_slice(item: ItemHead | ChunkItem) -> None:
    """InvalidInput unless tensor, shape, dtype and blocks describe a slice."""
    if not isinstance(item.tensor, str) or not _NAME.fullmatch(item.tensor):
        raise InvalidInput(f"not a tensor name: {str(item.tensor)[:80]!r}.")
    if not isinstance(item.dtype, str) or item.dtype not in ITEMSIZE:
        raise InvalidInput(f"unknown dtype {str(item.dtype)[:40]!r}.")
    if any(not 0 <= n < MAX_INDEX for n in item.shape) or canonical_lanes(item.shape, item.dtype) >= MAX_INDEX:
        raise InvalidInput(f"shape {str(item.shape)[:80]} is not one of a tensor.")
    if not isinstance(item.blocks, list | tuple) or len(item.blocks) > MAX_ITEM_BLOCKS:
        raise InvalidInput(f"a slice must have a list of at most {MAX_ITEM_BLOCKS} blocks.")
    layout = from_json(item.blocks, item.lanes, canonical_lanes(item.shape, item.dtype))
    validate_slice(layout, item.lanes, tensor=item.tensor)


def distinct(heads: list[ItemHead]) -> bool:
    """Whether no two items speak of the same slice of the same tensor."""
    return len({(h.tensor, h.slice) for h in heads}) == len(heads)


def check_entries(item: ChunkItem) -> None:
    """CodecError if an entry lies in a dense tile (range and order are checked where they are decoded)."""
    if item.ranks.size and item.dense_tiles.size:
        tiles = item.ranks // TILE_LANES
        at = np.minimum(np.searchsorted(item.dense_tiles, tiles), item.dense_tiles.size - 1)
        if bool(np.any(item.dense_tiles[at] == tiles)):
            raise CodecError(f"slice {item.slice} of {item.tensor!r} lists an entry inside a dense tile.")


def _rising(values: I64, end: int) -> bool:
    return not values.size or (int(values[0]) >= 0 and int(values[-1]) < end and bool(np.all(np.diff(values) > 0)))


def check_item(item: ChunkItem) -> None:
    """InvalidInput unless an item about to be encoded keeps every rule of `ChunkItem`."""
    where = f"slice {item.slice} of {item.tensor!r}"
    if [a.dtype.name for a in (item.ranks, item.diffs, item.dense_tiles, item.dense_bits)] != [
        "int64", "uint16", "int64", "uint16",
    ]:  # fmt: skip
        raise InvalidInput(f"{where}: ranks and tiles must be int64, diffs and bits uint16.")
    if not 0 <= item.slice < 1 << 63 or not 0 <= item.lanes < MAX_INDEX:
        raise InvalidInput(f"{where}: slice number or {item.lanes} lanes out of range.")
    _check_slice(item)
    if item.ranks.size != item.diffs.size or not _rising(item.ranks, item.lanes) or not bool(np.all(item.diffs)):
        raise InvalidInput(f"{where}: ranks must rise inside the slice, each with a difference that is not 0.")
    tiles = -(-item.lanes // TILE_LANES)
    if not _rising(item.dense_tiles, tiles):
        raise InvalidInput(f"{where}: dense tiles must rise inside its {tiles} tiles.")
    if item.dense_bits.size != int(np.sum(np.minimum((item.dense_tiles + 1) * TILE_LANES, item.lanes)
                                          - item.dense_tiles * TILE_LANES)):  # fmt: skip
        raise InvalidInput(f"{where}: {item.dense_bits.size} dense lanes are not what its dense tiles hold.")
    try:
        check_entries(item)
    except CodecError as error:
        raise InvalidInput(error.message) from None
