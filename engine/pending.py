"""What a slice owes the receivers: the sparse difference between a version and the present, in two levels.

*In flight* is the difference of the version being published to its base, *pending* the difference of the present to the
version in flight. Whether that version commits or aborts, one of them (or their fold) is exactly what the next version
must carry. One invariant: in every tile that is not flagged dense, a level lists exactly the ranks whose bits differ,
with both bits; of a dense tile it says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidInput, ProofError, StateConflict
from engine.jit import njit
from engine.layout.blocks import TILE_LANES

U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@njit
def _fault(ranks: I64, base: U16, cur: U16, dense: Bool, tile_lanes: int) -> int:
    """Position of the first entry that may not stand in a level, or −1."""
    previous = np.int64(-1)
    end = dense.shape[0] * tile_lanes
    for k in range(ranks.shape[0]):
        r = ranks[k]
        if r <= previous or r >= end or dense[r // tile_lanes] or base[k] == cur[k]:
            return k
        previous = r
    return -1


@njit
def _merge(
    ra: I64,
    base: U16,
    cur: U16,
    rb: I64,
    old: U16,
    new: U16,
    dense: Bool,
    tile_lanes: int,
    out_ranks: I64,
    out_base: U16,
    out_cur: U16,
) -> int:
    """Merge two sorted lists; returns the count, or −1 − rank where `old` is not what the level holds."""
    i, j, n = 0, 0, 0
    while i < ra.shape[0] or j < rb.shape[0]:
        take_a = i < ra.shape[0] and (j >= rb.shape[0] or ra[i] <= rb[j])
        take_b = j < rb.shape[0] and (i >= ra.shape[0] or rb[j] <= ra[i])
        rank = ra[i] if take_a else rb[j]
        first = base[i] if take_a else old[j]
        last = new[j] if take_b else cur[i]
        known = not dense[rank // tile_lanes]
        if known and take_a and take_b and cur[i] != old[j]:
            return int(-1 - rank)
        if known and first != last:
            out_ranks[n], out_base[n], out_cur[n] = rank, first, last
            n += 1
        i += 1 if take_a else 0
        j += 1 if take_b else 0
    return n


@dataclass(frozen=True, slots=True)
class Level:
    """A sparse difference between two states of one slice of T tiles.

    `ranks` I64 strictly rising; `base`, `cur` U16: bits before and after, different everywhere; `dense` Bool [T]: tiles
    whose bits before are not all known, of which no entry is listed. Arrays are shared, so nobody may write to them.
    InvalidInput if the arrays break these rules.
    """

    ranks: I64
    base: U16
    cur: U16
    dense: Bool
    tile_lanes: int = TILE_LANES

    def __post_init__(self) -> None:
        dtypes = [a.dtype.name for a in (self.ranks, self.base, self.cur, self.dense)]
        if dtypes != ["int64", "uint16", "uint16", "bool"] or self.tile_lanes < 1:
            raise InvalidInput(f"a level holds int64 ranks, uint16 bits and bool flags, not {dtypes}.")
        if not self.ranks.size == self.base.size == self.cur.size:
            raise InvalidInput("ranks, base and cur of a level must be equally long.")
        at = _fault(self.ranks, self.base, self.cur, self.dense, self.tile_lanes)
        if at >= 0:
            raise InvalidInput(
                f"entry {at} of a level (rank {int(self.ranks[at])}) is out of order, out of range, in a dense tile or "
                "not a change."
            )

    @property
    def is_empty(self) -> bool:
        """True when the two states are known to be equal."""
        return self.ranks.size == 0 and not self.dense.any()

    @property
    def nbytes(self) -> int:
        """Memory the arrays take."""
        return self.ranks.nbytes + self.base.nbytes + self.cur.nbytes + self.dense.nbytes

    def tile_counts(self) -> I64:
        """Entries per tile, I64 [T]."""
        return np.bincount(self.ranks // self.tile_lanes, minlength=self.dense.size).astype(np.int64)

    def entries(self, tile_start: int, tile_stop: int) -> slice:
        """Positions of the entries of tiles [tile_start, tile_stop)."""
        lo, hi = np.searchsorted(self.ranks, [tile_start * self.tile_lanes, tile_stop * self.tile_lanes])
        return slice(int(lo), int(hi))


def empty(tiles: int, *, dense: bool = False, tile_lanes: int = TILE_LANES) -> Level:
    """No entries; every tile flagged dense, or none."""
    bits = np.empty(0, np.uint16)
    return Level(np.empty(0, np.int64), bits, bits, np.full(tiles, dense, np.bool_), tile_lanes)


def merge_step(level: Level, ranks: I64, old: U16, new: U16, dense: Bool) -> Level:
    """The level after one more step in which `ranks` (strictly rising) went from `old` to `new` bits.

    The earliest base is kept, what returned to it drops out. `dense` Bool [T]: tiles of the step whose old bits are not
    known; entries in tiles that either side flags are dropped. ProofError if a rank the level already lists did not
    start this step from the bits the level ends with: a step in between was lost.
    """
    step = Level(*_changes(ranks, old, new, dense, level.tile_lanes), dense, level.tile_lanes)
    if dense.size != level.dense.size:
        raise InvalidInput(f"the step speaks of {dense.size} tiles, the level of {level.dense.size}.")
    flags = level.dense | dense
    room = level.ranks.size + step.ranks.size
    out = np.empty(room, np.int64), np.empty(room, np.uint16), np.empty(room, np.uint16)
    n = _merge(level.ranks, level.base, level.cur, step.ranks, step.base, step.cur, flags, level.tile_lanes, *out)
    if n < 0:
        raise ProofError(
            f"rank {-1 - n} did not start the step from the bits that the last step left.",
            remedy="A step went unread: drop the list and send these tiles dense.",
        )
    merged_ranks, merged_base, merged_cur = out[0][:n], out[1][:n], out[2][:n]
    if n < room - room // 4:  # do not keep much more memory than what is listed
        merged_ranks, merged_base, merged_cur = merged_ranks.copy(), merged_base.copy(), merged_cur.copy()
    return Level(merged_ranks, merged_base, merged_cur, flags, level.tile_lanes)


def _changes(ranks: I64, old: U16, new: U16, dense: Bool, tile_lanes: int) -> tuple[I64, U16, U16]:
    """The step's entries without those in its own dense tiles and those that change nothing."""
    if ranks.size and (int(ranks.min()) < 0 or int(ranks.max()) >= dense.size * tile_lanes):
        raise InvalidInput(f"ranks of a step lie outside its {dense.size} tiles.")
    if not ranks.size == old.size == new.size:
        raise InvalidInput("ranks, old and new of a step must be equally long.")
    keep = old != new
    if dense.any():
        keep &= ~dense[ranks // tile_lanes]
    return (ranks, old, new) if keep.all() else (ranks[keep], old[keep], new[keep])


def fold(in_flight: Level, pending: Level) -> Level:
    """The difference of the present to the base of the version in flight: what is owed once that version aborts."""
    return merge_step(in_flight, pending.ranks, pending.base, pending.cur, pending.dense)


def with_dense(level: Level, dense: Bool) -> Level:
    """The level with more tiles flagged dense and their entries dropped."""
    nothing = np.empty(0, np.uint16)
    return merge_step(level, np.empty(0, np.int64), nothing, nothing, dense)


def cap(level: Level, fraction: float, lanes: int | None = None) -> Level:
    """Flag dense every tile that lists more than `fraction` of its lanes, and drop those entries.

    `lanes`: lanes of the slice, so that the last tile is measured by its own length; all tiles are full if None.
    """
    size = np.full(level.dense.size, level.tile_lanes, np.int64)
    if lanes is not None and size.size:
        size[-1] = lanes - (size.size - 1) * level.tile_lanes
    over: Bool = level.tile_counts() > fraction * size
    return with_dense(level, over) if over.any() else level


@dataclass(frozen=True, slots=True)
class TwoLevels:
    """Both levels of one slice and the moves between them. `in_flight` is None while no version is in flight."""

    pending: Level
    in_flight: Level | None = field(default=None)

    def step(self, ranks: I64, old: U16, new: U16, dense: Bool) -> TwoLevels:
        """After one more training step (see `merge_step`)."""
        return replace(self, pending=merge_step(self.pending, ranks, old, new, dense))

    def capped(self, fraction: float, lanes: int | None = None) -> TwoLevels:
        """With `cap` applied to what is pending; what is in flight was promised and stays."""
        return replace(self, pending=cap(self.pending, fraction, lanes))

    def publish(self) -> TwoLevels:
        """What was pending goes in flight. StateConflict if a version already is."""
        if self.in_flight is not None:
            raise StateConflict("a version is already in flight.", remedy="Wait for its decision.")
        return TwoLevels(empty(self.pending.dense.size, tile_lanes=self.pending.tile_lanes), self.pending)

    def commit(self) -> TwoLevels:
        """The version in flight became the base. StateConflict if there is none."""
        if self.in_flight is None:
            raise StateConflict("no version is in flight.")
        return TwoLevels(self.pending)

    def abort(self) -> TwoLevels:
        """The version in flight will never be; everything since its base is owed again. StateConflict if none is."""
        if self.in_flight is None:
            raise StateConflict("no version is in flight.")
        return TwoLevels(fold(self.in_flight, self.pending))
