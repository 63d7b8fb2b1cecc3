"""The two-level pending list against a model that simply keeps all the bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine import pending
from engine.errors import InvalidInput, ProofError, StateConflict
from engine.pending import Level, TwoLevels

TILE = 8


def level(entries: list[tuple[int, int, int]], dense: list[bool], tile_lanes: int = TILE) -> Level:
    r, b, c = (np.array([e[k] for e in entries], t) for k, t in enumerate((np.int64, np.uint16, np.uint16)))
    return Level(r, b, c, np.array(dense, np.bool_), tile_lanes)


def listed(x: Level) -> list[tuple[int, int, int]]:
    return list(zip(x.ranks.tolist(), x.base.tolist(), x.cur.tolist(), strict=True))


class Model(RuleBasedStateMachine):
    """Random steps, publishes, commits, aborts, dense flags and caps on a slice of a few tiles.

    The model keeps the bits at the base, of the version in flight and now, and per level which tiles had to go dense.
    """

    @initialize(lanes=st.integers(1, 4 * TILE), seed=st.integers(0, 2**32 - 1))
    def start(self, lanes: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.lanes = lanes
        self.tiles = -(-lanes // TILE)
        self.now = self.rng.integers(0, 4, lanes, dtype=np.uint16)
        self.base = self.now.copy()
        self.sent: np.ndarray | None = None
        self.dense = {"pending": np.zeros(self.tiles, bool), "in_flight": np.zeros(self.tiles, bool)}
        self.real = TwoLevels(pending.empty(self.tiles, tile_lanes=TILE))

    @rule(density=st.sampled_from([0.0, 0.1, 0.5, 1.0]), dense=st.sampled_from([0.0, 0.0, 0.2]))
    def step(self, density: float, dense: float) -> None:
        new = self.now.copy()
        hit = self.rng.random(self.lanes) < density
        new[hit] = self.rng.integers(0, 4, int(hit.sum()), dtype=np.uint16)  # few values, so that bits return often
        flags = self.rng.random(self.tiles) < dense
        ranks = np.flatnonzero(new != self.now).astype(np.int64)
        self.real = self.real.step(ranks, self.now[ranks], new[ranks], flags)
        self.dense["pending"] |= flags
        self.now = new

    @rule(fraction=st.sampled_from([0.25, 0.6]))
    def cap(self, fraction: float) -> None:
        start = self.base if self.sent is None else self.sent
        for t in range(self.tiles):
            part = slice(t * TILE, (t + 1) * TILE)
            changed = int((start[part] != self.now[part]).sum())
            if not self.dense["pending"][t] and changed > fraction * self.now[part].size:
                self.dense["pending"][t] = True
        self.real = self.real.capped(fraction, self.lanes)

    @precondition(lambda self: self.sent is None)
    @rule()
    def publish(self) -> None:
        self.real = self.real.publish()
        self.sent = self.now.copy()
        self.dense = {"pending": np.zeros(self.tiles, bool), "in_flight": self.dense["pending"]}

    @precondition(lambda self: self.sent is not None)
    @rule()
    def commit(self) -> None:
        assert self.sent is not None
        self.real = self.real.commit()
        self.base, self.sent = self.sent, None
        self.dense["in_flight"] = np.zeros(self.tiles, bool)

    @precondition(lambda self: self.sent is not None)
    @rule()
    def abort(self) -> None:
        self.real = self.real.abort()
        self.sent = None
        self.dense["pending"] |= self.dense["in_flight"]
        self.dense["in_flight"] = np.zeros(self.tiles, bool)

    def expected(self, before: np.ndarray, after: np.ndarray, dense: np.ndarray) -> list[tuple[int, int, int]]:
        known = ~dense[np.arange(self.lanes) // TILE]
        ranks = np.flatnonzero((before != after) & known)
        return [(int(r), int(before[r]), int(after[r])) for r in ranks]

    @invariant()
    def levels_are_exact(self) -> None:
        if not hasattr(self, "real"):
            return
        p, f = self.real.pending, self.real.in_flight
        start = self.base if self.sent is None else self.sent
        assert p.dense.tolist() == self.dense["pending"].tolist()
        assert listed(p) == self.expected(start, self.now, p.dense)
        assert (f is None) == (self.sent is None)
        if f is not None and self.sent is not None:
            assert f.dense.tolist() == self.dense["in_flight"].tolist()
            assert listed(f) == self.expected(self.base, self.sent, f.dense)


Model.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestModel = Model.TestCase


def test_returned_to_base_drops_out_and_earliest_base_stays() -> None:
    a = level([(1, 5, 6), (9, 1, 2)], [False, False])
    b = pending.merge_step(a, *step([(1, 6, 5), (2, 0, 3), (9, 2, 7)]), np.zeros(2, bool))
    assert listed(b) == [(2, 0, 3), (9, 1, 7)]


def step(entries: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = np.array(entries, np.int64).reshape(-1, 3)
    return x[:, 0].copy(), x[:, 1].astype(np.uint16), x[:, 2].astype(np.uint16)


def test_a_lost_step_is_seen() -> None:
    a = level([(1, 5, 6)], [False])
    with pytest.raises(ProofError, match="rank 1 "):
        pending.merge_step(a, *step([(1, 7, 8)]), np.zeros(1, bool))
    dense = pending.merge_step(a, *step([(1, 7, 8)]), np.ones(1, bool))
    assert listed(dense) == []
    assert dense.dense.all()


def test_dense_outlives_abort_on_either_side() -> None:
    sent_dense = TwoLevels(level([], [True, False])).publish().step(*step([(0, 1, 2), (8, 1, 2)]), np.zeros(2, bool))
    assert listed(sent_dense.pending) == [(0, 1, 2), (8, 1, 2)]
    assert sent_dense.commit().pending.dense.tolist() == [False, False]
    aborted = sent_dense.abort().pending
    assert aborted.dense.tolist() == [True, False]
    assert listed(aborted) == [(8, 1, 2)]


def test_cap_measures_the_last_tile_by_its_own_length() -> None:
    a = level([(0, 1, 2), (8, 1, 2)], [False, False])
    assert not pending.cap(a, 0.25).dense.any()
    assert pending.cap(a, 0.25, lanes=10).dense.tolist() == [False, True]
    assert listed(pending.cap(a, 0.25, lanes=10)) == [(0, 1, 2)]
    assert pending.cap(a, 0.5, lanes=10) is a
    assert pending.cap(pending.empty(0), 0.1, lanes=0).is_empty


def test_levels_refuse_what_is_not_a_level() -> None:
    for bad in ([(3, 1, 2), (3, 1, 2)], [(4, 1, 2), (3, 1, 2)], [(-1, 1, 2)], [(16, 1, 2)], [(3, 1, 1)], [(8, 1, 2)]):
        with pytest.raises(InvalidInput):
            level(bad, [False, True])
    good = level([(3, 1, 2)], [False])
    with pytest.raises(InvalidInput):
        Level(good.ranks.astype(np.int32), good.base, good.cur, good.dense)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        Level(good.ranks, good.base[:0], good.cur, good.dense)
    with pytest.raises(InvalidInput):
        pending.merge_step(good, *step([]), np.zeros(2, bool))
    with pytest.raises(InvalidInput):
        pending.merge_step(good, *step([(9, 1, 2)]), np.zeros(1, bool))
    with pytest.raises(InvalidInput):
        pending.merge_step(good, *step([(2, 1, 2), (1, 1, 2)]), np.zeros(1, bool))


def test_moves_need_their_state() -> None:
    fresh = TwoLevels(pending.empty(1))
    with pytest.raises(StateConflict):
        fresh.commit()
    with pytest.raises(StateConflict):
        fresh.abort()
    with pytest.raises(StateConflict):
        fresh.publish().publish()


def test_views_of_a_level() -> None:
    a = level([(1, 1, 2), (7, 1, 2), (8, 1, 2), (25, 1, 2)], [False] * 4)
    assert a.tile_counts().tolist() == [2, 1, 0, 1]
    assert a.entries(1, 3) == slice(2, 3)
    assert a.nbytes == 4 * 12 + 4
    assert not a.is_empty
    assert not pending.empty(2, dense=True).is_empty


def test_input_arrays_are_not_written_to() -> None:
    a = level([(1, 5, 6), (9, 1, 2)], [False, False])
    s = step([(1, 6, 5), (2, 0, 3)])
    kept = [x.copy() for x in (a.ranks, a.base, a.cur, a.dense, *s)]
    pending.merge_step(a, *s, np.array([False, True]))
    assert all(np.array_equal(x, y) for x, y in zip((a.ranks, a.base, a.cur, a.dense, *s), kept, strict=True))
