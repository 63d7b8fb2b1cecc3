"""One read of one slice: what changed since the last read, and what a version must say of it.

One invariant: nothing here changes what is remembered. A read returns a new `SliceLedger`; the caller keeps it only if
the trainer's generation did not move meanwhile, and otherwise goes on with the old one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from app.worker.lanes import LanesWriter
from app.worker.protocol import HoldTimeout
from app.worker.source import SliceSource
from engine.detect.assemble import without_entries
from engine.detect.base import TILE, U16, U64, Bool, DetectBackend, Detection, SliceGeometry
from engine.detect.geometry import tile_digests
from engine.digest import DigestKey, delta_digest_tiles
from engine.errors import ProofError
from engine.layout.algebra import map_indices
from engine.ledger import SliceLedger
from engine.optimizers.base import Formula, StepContext
from engine.pending import Level, cap, empty, merge_step, with_dense
from engine.proof import Resolved, resolve


class TornRead(Exception):
    """Memory changed while it was read, although the generation word did not: the read is thrown away."""


@dataclass(frozen=True, slots=True)
class SliceRead:
    """Result of reading a slice: its ledger, and for the snapshot detector what to remember of its bits (all lanes, or
    the ranks that changed with their new bits)."""

    ledger: SliceLedger
    snapshot_full: U16 | None = None
    snapshot_change: tuple[np.ndarray, U16] | None = None


def groups(tiles: int, group_tiles: int) -> Iterator[tuple[int, int]]:
    """Tile ranges of at most `group_tiles` that cover [0, tiles)."""
    for start in range(0, tiles, group_tiles):
        yield start, min(start + group_tiles, tiles)


@dataclass(frozen=True, slots=True)
class _Merged:
    """The resolved groups of one slice, joined."""

    ranks: np.ndarray
    old: U16
    new: U16
    dense: Bool
    digest: U64

    @staticmethod
    def join(parts: list[tuple[Detection, Resolved]]) -> _Merged:
        return _Merged(
            np.concatenate([r.ranks for _, r in parts]),
            np.concatenate([r.old for _, r in parts]),
            np.concatenate([r.new for _, r in parts]),
            np.concatenate([r.dense for _, r in parts]),
            np.concatenate([d.digest_new for d, _ in parts]),
        )


class SliceReader:
    """Reads slices of one rank with one backend, `group_tiles` tiles at a time."""

    def __init__(
        self,
        backend: DetectBackend,
        *,
        group_tiles: int,
        dense_fraction: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._group_tiles = group_tiles
        self._dense_fraction = dense_fraction
        self._clock = clock
        self.until_s: float | None = None
        """When, by the clock, a read has held the trainer for too long: then it ends with HoldTimeout."""

    def _groups(self, tiles: int) -> Iterator[tuple[int, int]]:
        for group in groups(tiles, self._group_tiles):
            self._in_time()
            yield group

    def _in_time(self) -> None:
        if self.until_s is not None and self._clock() >= self.until_s:
            raise HoldTimeout(
                "the read held the trainer for longer than hold_timeout_s and was given up.",
                remedy="The next version carries what changed dense. Give the worker cores (detect_threads), or raise "
                "hold_timeout_s (DTE_HOLD_TIMEOUT_S).",
            )

    def digests(self, source: SliceSource) -> U64:
        """Digest of every tile of the bits as they are now, U64[T]."""
        shape = source.shape
        parts = [tile_digests(shape.geometry, source.read_lanes(a, b), a) for a, b in self._groups(shape.tiles)]
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def compare(self, source: SliceSource, ledger: SliceLedger, step: int, counts: Counter[str]) -> SliceRead:
        """Tiles whose digest moved go dense. For slices that nothing better can be said of."""
        digest = self.digests(source)
        known = ledger.digest_last
        dense = np.ones(digest.size, np.bool_) if known is None else digest != known
        counts["tiles_compared_dense"] += int(dense.sum())
        pending = with_dense(ledger.pending, dense)
        return SliceRead(replace(ledger, step=step, digest_last=digest, pending=pending))

    def certified(
        self,
        source: SliceSource,
        ledger: SliceLedger,
        formula: Formula,
        ctx: StepContext,
        counts: Counter[str],
        *,
        exact_replay: bool,
    ) -> SliceRead:
        """One optimizer step since the last read: certified detection, then the proof, tile by tile."""
        assert ledger.digest_last is not None
        geometry = source.shape.geometry
        parts: list[tuple[Detection, Resolved]] = []
        for a, b in self._groups(source.shape.tiles):
            theta, m, v, first = source.state(a, b)
            detection = self._backend.detect(
                formula, ctx, theta, m, v, geometry, a, b,
                exact_replay=exact_replay, first_tile=first, rounding=source.rounding,
            )  # fmt: skip
            resolved = resolve(detection, ledger.digest_last[a:b], geometry)
            counts["ambiguous"] += resolved.ambiguous
            counts["resolved"] += resolved.resolved
            counts["failed_tiles"] += resolved.failed_tiles
            counts["mismatched_tiles"] += int(detection.mismatched.sum())
            parts.append((detection, resolved))
        return self._merged(ledger, ctx.step, parts, counts)

    def snapshot(
        self, source: SliceSource, ledger: SliceLedger, previous: U16 | None, step: int, counts: Counter[str]
    ) -> SliceRead:
        """Compare with the bits kept from the last read; without them, by digest."""
        shape = source.shape
        if previous is None or ledger.digest_last is None:
            read = self.compare(source, ledger, step, counts)
            lanes = [source.read_lanes(a, b) for a, b in self._groups(shape.tiles)]
            full = np.concatenate(lanes) if lanes else np.empty(0, np.uint16)
            return replace(read, snapshot_full=full)
        parts: list[tuple[Detection, Resolved]] = []
        for a, b in self._groups(shape.tiles):
            before = previous[a * TILE : b * TILE]
            detection = _difference(before, source.read_lanes(a, b), shape.geometry, a)
            resolved = resolve(detection, ledger.digest_last[a:b], shape.geometry)
            counts["failed_tiles"] += resolved.failed_tiles
            parts.append((detection, resolved))
        read = self._merged(ledger, step, parts, counts)
        ranks = np.concatenate([d.ranks for d, _ in parts]) if parts else np.empty(0, np.int64)
        new = np.concatenate([d.new for d, _ in parts]) if parts else np.empty(0, np.uint16)
        return replace(read, snapshot_change=(ranks, new))

    def _merged(
        self, ledger: SliceLedger, step: int, parts: list[tuple[Detection, Resolved]], counts: Counter[str]
    ) -> SliceRead:
        if not parts:
            return SliceRead(replace(ledger, step=step))
        joined = _Merged.join(parts)
        counts["entries_found"] += int(joined.ranks.size)
        try:
            pending = merge_step(ledger.pending, joined.ranks, joined.old, joined.new, joined.dense)
        except ProofError:
            # The proof of this read and the list of the earlier ones contradict each other: believe neither.
            counts["failed_tiles"] += ledger.pending.dense.size
            pending = empty(ledger.pending.dense.size, dense=True)
        pending = cap(pending, self._dense_fraction, ledger.lanes)
        return SliceRead(replace(ledger, step=step, digest_last=joined.digest, pending=pending))

    def publish(
        self,
        source: SliceSource,
        ledger: SliceLedger,
        writer: LanesWriter,
        counts: Counter[str],
        *,
        dense: bool = False,
    ) -> SliceLedger:
        """Move what is pending in flight, and spool the lanes of its dense tiles from memory as it is now.

        The delta of every other tile must explain the whole way from the base's digest to the present one; a tile where
        it does not goes dense. `dense`: every tile goes dense, changed or not. TornRead if memory is not what the read
        just saw.
        """
        assert ledger.digest_last is not None
        level = empty(source.shape.tiles, dense=True) if dense else self._proven(source, ledger, counts)
        geometry = source.shape.geometry
        tiles = np.flatnonzero(level.dense)
        for a, b in _tile_runs(tiles, self._group_tiles):
            self._in_time()
            lanes = source.read_lanes(a, b)
            seen = tile_digests(geometry, lanes, a)
            if not np.array_equal(seen, ledger.digest_last[a:b]):
                raise TornRead(f"slice {ledger.slice}, tiles {a} to {b}")
            writer.put(lanes)
        counts["entries"] += int(level.ranks.size)
        counts["dense_tiles"] += int(tiles.size)
        return replace(ledger, in_flight=level, digest_sent=ledger.digest_last, pending=empty(source.shape.tiles))

    def _proven(self, source: SliceSource, ledger: SliceLedger, counts: Counter[str]) -> Level:
        level, tiles = ledger.pending, source.shape.tiles
        assert ledger.digest_last is not None
        if ledger.digest_base is None:
            if ledger.digest_base_total is None or not bool(level.dense.all()):
                return empty(tiles, dense=True)
            return level
        back = level.dense & (ledger.digest_base == ledger.digest_last)
        if back.any():  # whatever happened to these tiles, they hold the base's bits again
            level = replace(level, dense=level.dense & ~back)
        geometry = source.shape.geometry
        key = DigestKey.for_tensor(geometry.tensor)
        canonical = map_indices(geometry.layout, level.ranks)
        delta = delta_digest_tiles(key, level.ranks, canonical, level.base, level.cur, tiles)
        wrong = (ledger.digest_base + delta != ledger.digest_last) & ~level.dense
        if not wrong.any():
            return level
        counts["failed_tiles"] += int(wrong.sum())
        return with_dense(level, wrong)


def _difference(before: U16, now: U16, geometry: SliceGeometry, tile_start: int) -> Detection:
    """`detect_snapshot` of a range of tiles, given only that range's lanes: the slice is never held twice."""
    differs = np.flatnonzero(before != now)
    digest = tile_digests(geometry, now, tile_start)
    blank = without_entries(tile_start, digest, np.zeros(digest.size, np.bool_))
    return replace(blank, ranks=differs + tile_start * TILE, old=before[differs], new=now[differs])


def _tile_runs(tiles: np.ndarray, longest: int) -> Iterator[tuple[int, int]]:
    """Consecutive tile numbers as ranges of at most `longest`."""
    if tiles.size == 0:
        return
    cuts = np.flatnonzero(np.diff(tiles) != 1) + 1
    for run in np.split(tiles, cuts):
        first, stop = int(run[0]), int(run[-1]) + 1
        for start in range(first, stop, longest):
            yield start, min(start + longest, stop)
