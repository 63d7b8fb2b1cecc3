"""From deliveries to (tensor, local lanes, bits): everything that a delivery claims is checked here, before any write.

One invariant: what leaves this module lies in canonical lanes that this rank holds and that the operation can reach,
and no lane of one delivery is carried both as an entry and dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.apply.errors import TensorMismatch
from engine.apply.live import LiveCopy, LiveTensor
from engine.apply.target import Target
from engine.detect.base import I64, TILE, U16, tile_count
from engine.errors import CodecError
from engine.layout.algebra import invert
from engine.layout.mapping import map_partial
from engine.plan.operations import Delivery, Operation
from engine.plan.selection import arrived_tiles, dense_counts


@dataclass(frozen=True, slots=True)
class Arrived:
    """New bits of lanes of the first copy: those of entries, by local lane, or with `dense` those of one tile."""

    tensor: str
    canonical: I64
    local: I64
    bits: U16
    dense: bool


def arrived(target: Target, received: Sequence[Delivery], selected: Mapping[str, LiveTensor]) -> Iterator[Arrived]:
    """What the deliveries say, one by one, dense tiles one by one.

    CodecError or TensorMismatch for one that does not fit the version, this rank or its own operation.
    """
    known = {t.name for t in target.tensors}
    seen: set[tuple[int, str]] = set()
    receivers = {d.operation.receiver for d in received}
    if len(receivers) > 1:
        raise CodecError(f"deliveries for the receivers {sorted(receivers)} arrived at one.")
    for delivery in received:
        o = delivery.operation
        if o.tensor not in known:
            raise TensorMismatch(f"{o.tensor!r} arrived, which version {target.version} does not have.")
        if o.tensor not in selected:
            raise TensorMismatch(f"{o.tensor!r} arrived, which this rank does not hold.")
        if (o.sender, o.tensor) in seen:
            raise CodecError(f"what sender {o.sender} has of {o.tensor!r} arrived twice.")
        seen.add((o.sender, o.tensor))
        if target.base is None and delivery.local.size:
            raise CodecError(f"entries of {o.tensor!r} arrived for version {target.version}, which has no base.")
        yield from _checked(delivery, selected[o.tensor].copies[0])


def _checked(delivery: Delivery, copy: LiveCopy) -> Iterator[Arrived]:
    """The pieces of one delivery."""
    o = delivery.operation
    if copy.lanes.lanes != o.span:
        raise TensorMismatch(
            f"{o.tensor!r} has {copy.lanes.lanes} local lanes and was planned with {o.span}.",
            remedy="The receiver's memory was replaced by one of another size; it joins the group again.",
        )
    _check_form(delivery)
    _check_tiles(delivery)
    if delivery.local.size:
        yield _entries(delivery, copy)
    for tile in arrived_tiles(delivery):
        canonical = copy.canonical(tile.local)
        _check_held(o, tile.local, canonical)
        yield Arrived(o.tensor, canonical, tile.local, tile.bits, True)


def _where(o: Operation) -> str:
    return f"what sender {o.sender} has of {o.tensor!r}"


def _check_form(delivery: Delivery) -> None:
    """CodecError unless the arrays have the dtypes and shapes of a delivery."""
    o = delivery.operation
    arrays = (delivery.local, delivery.bits, delivery.tiles, delivery.dense)
    dtypes = [a.dtype.name for a in arrays]
    if dtypes != [np.dtype(o.index_dtype).name, "uint16", "int64", "uint16"]:
        raise CodecError(f"{_where(o)} arrived as {dtypes}.")
    if [a.ndim for a in arrays] != [1, 1, 2, 1] or delivery.tiles.shape[1] != 2:
        raise CodecError(f"{_where(o)} arrived in arrays of shapes {[a.shape for a in arrays]}.")
    if delivery.local.size != delivery.bits.size:
        raise CodecError(f"{_where(o)} arrived as {delivery.local.size} lanes with {delivery.bits.size} bits.")


def _check_tiles(delivery: Delivery) -> None:
    """CodecError unless the tiles exist, rise, are reached, and hold just the dense lanes that arrived."""
    o, (places, tiles) = delivery.operation, delivery.tiles.T
    if places.size and (int(places.min()) < 0 or int(places.max()) >= len(o.parts)):
        raise CodecError(f"{_where(o)} arrived with tiles of slices that are not in the operation.")
    steps = np.diff(places)
    if bool(np.any((steps < 0) | ((steps == 0) & (np.diff(tiles) <= 0)))):
        raise CodecError(f"{_where(o)} arrived with tiles out of order or twice.")
    lanes = 0
    for place in np.unique(places).tolist():
        part, mine = o.parts[place], tiles[places == place]
        if int(mine[0]) < 0 or int(mine[-1]) >= tile_count(part.layout.src_numel):
            raise CodecError(f"{_where(o)} arrived with a tile out of range of slice {part.slice}.")
        reached = dense_counts(part, mine)
        if not reached.all():
            raise CodecError(f"{_where(o)} arrived with a tile of slice {part.slice} that nothing of is held here.")
        lanes += int(reached.sum())
    if lanes != delivery.dense.size:
        raise CodecError(f"{_where(o)} arrived with {delivery.dense.size} dense lanes, its tiles hold {lanes}.")


def _entries(delivery: Delivery, copy: LiveCopy) -> Arrived:
    """The entries by local lane. CodecError if one is out of range or reach, twice, or in a dense tile."""
    o = delivery.operation
    local: I64 = delivery.local.astype(np.int64)
    if int(local.min()) < 0 or int(local.max()) >= o.span:
        raise CodecError(f"{_where(o)} arrived with a local lane that is not below {o.span}.")
    bits = delivery.bits
    if bool(np.any(local[1:] < local[:-1])):
        order = np.argsort(local, kind="stable")
        local, bits = local[order], bits[order]
    canonical = copy.canonical(local)
    _check_held(o, local, canonical)
    reached = np.zeros(local.size, np.bool_)
    for place, part in enumerate(o.parts):
        ranks = map_partial(invert(part.layout), local)
        mine = ranks >= 0
        reached |= mine
        dense = delivery.tiles[delivery.tiles[:, 0] == place, 1]
        if dense.size and bool(np.isin(ranks[mine] // TILE, dense).any()):
            raise CodecError(f"{_where(o)} arrived with an entry in a dense tile of slice {part.slice}.")
    if not reached.all():
        lane = int(local[np.argmin(reached)])
        raise CodecError(f"{_where(o)} arrived with local lane {lane}, which is not that sender's to send.")
    return Arrived(o.tensor, canonical, local, bits, False)


def _check_held(o: Operation, local: I64, canonical: I64) -> None:
    if canonical.size and int(canonical.min()) < 0:
        lane = int(local[np.argmin(canonical)])
        raise CodecError(f"{_where(o)} arrived with local lane {lane}, which holds nothing of the tensor.")
