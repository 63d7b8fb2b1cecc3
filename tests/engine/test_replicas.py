"""Replicas of a cell: they must agree with what is published, and cannot change it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from engine.commit import ChainState, decide, fold, summarize
from engine.errors import LayoutError, StateConflict
from engine.records import (
    MAX_DIVERGED,
    CommitDecision,
    Diverged,
    EpochRecord,
    LaunchRecord,
    PartRecord,
    ReplicaDecl,
    ReplicaDigest,
    parse_decision,
    parse_record,
    record_bytes,
    sign,
)
from tests.model.build import LANES, RUN, digest_of, entry, launch_records, part

CELL = "c" * 32
WORLD = 4
EPOCH = EpochRecord(run=RUN, epoch=1, launch="one", world=WORLD)
Held = Mapping[int, tuple[int, str]]
"""Rank of a replica → (first of its holders, digest)."""


def total(*digests: str) -> str:
    return f"{sum(int(d, 16) for d in digests) % 2**64:016x}"


def records(held: Held, lanes: int | None = None) -> list[LaunchRecord]:
    """Ranks 0 and 1 publish a half of "w" each, in one cell; the ranks of `held` have replicas."""
    made = launch_records("one", [{"w": 1}, {"w": 2}], shapes={"w": 2 * LANES})
    per_rank = {h: 2 * LANES // sum(1 for other, _ in held.values() if other == h) for h, _ in held.values()}
    out = []
    for rank in range(WORLD):
        own = made[rank] if rank < 2 else made[0].model_copy(update={"slices": [], "rank": rank})
        cells = [s.model_copy(update={"cell": CELL}) for s in own.slices]
        mine = [held[rank][0]] if rank in held else []
        replicas = [ReplicaDecl(cell=CELL, tensor="w", holders=h, lanes=lanes or per_rank[h]) for h in mine]
        out.append(own.model_copy(update={"world": WORLD, "slices": cells, "replicas": replicas}))
    return out


def version(held: Held, number: int = 0, values: tuple[int, int] = (1, 2), old: tuple[Any, Any] = (None, None)):
    parts = {}
    for rank in range(WORLD):
        new = {"w": values[rank]} if rank < 2 else {}
        was = {"w": old[rank]} if rank < 2 else {}
        base = None if number == 0 else number - 1
        made = part(number, 1, rank, launch="one", step=number, base=base, old=was, new=new, dense=number == 0)
        mine = [held[rank]] if rank in held else []
        reported = [ReplicaDigest(cell=CELL, tensor="w", holders=h, digest=d) for h, d in mine]
        parts[rank] = entry(made.model_copy(update={"replicas": reported}))
    return parts


RIGHT = total(digest_of(1), digest_of(2))


def found(held: Held) -> list[tuple[str, int, int]]:
    verdict = decide(ChainState(), EPOCH, summarize(records(held)), version(held))
    assert verdict is not None
    assert verdict.problem is None
    assert isinstance(verdict.decision, CommitDecision)
    assert verdict.decision.tensors[0].digest == RIGHT
    return [(d.tensor, d.writer, d.holders) for d in verdict.decision.diverged]


def test_a_replica_that_differs_is_named_and_changes_nothing_else():
    assert found({2: (2, RIGHT), 3: (3, RIGHT)}) == []
    assert found({2: (2, RIGHT), 3: (3, total(RIGHT, digest_of(0)))}) == [("w", 0, 3)]
    assert found({2: (2, digest_of(7)), 3: (3, digest_of(8))}) == [("w", 0, 2), ("w", 0, 3)]


def test_ranges_of_several_holders_are_added_up():
    assert found({2: (2, digest_of(2)), 3: (2, digest_of(1))}) == []
    assert found({2: (2, digest_of(2)), 3: (2, digest_of(2))}) == [("w", 0, 2)]


def test_a_later_version_heals():
    held = {2: (2, digest_of(7)), 3: (3, RIGHT)}
    launch = summarize(records(held))
    verdict = decide(ChainState(), EPOCH, launch, version(held))
    assert verdict is not None
    state = fold([verdict.decision])
    now = total(digest_of(5), digest_of(2))
    healed = version({2: (2, now), 3: (3, now)}, 1, (5, 2), (1, 2))
    verdict = decide(state, EPOCH, launch, healed)
    assert verdict is not None
    assert isinstance(verdict.decision, CommitDecision)
    assert verdict.decision.diverged == []
    stale = decide(state, EPOCH, launch, version({2: (2, RIGHT), 3: (3, now)}, 1, (5, 2), (1, 2)))
    assert stale is not None
    assert isinstance(stale.decision, CommitDecision)
    assert stale.decision.diverged == [Diverged(tensor="w", writer=0, holders=2)]


def test_whoever_decides_writes_the_same_bytes():
    held = {2: (2, digest_of(7)), 3: (3, digest_of(8))}
    parts = version(held)
    one = decide(ChainState(), EPOCH, summarize(records(held)), parts)
    other = decide(ChainState(), EPOCH, summarize(records(held)), dict(reversed(parts.items())))
    assert one is not None
    assert other is not None
    signed = [record_bytes(sign(v.decision, b"key")) for v in (one, other)]
    assert signed[0] == signed[1]
    assert parse_decision(signed[0]) == sign(one.decision, b"key")


def test_a_part_must_report_what_its_rank_declared():
    held = {2: (2, RIGHT), 3: (3, RIGHT)}
    launch = summarize(records(held))
    for wrong in ({2: (2, RIGHT)}, {2: (2, RIGHT), 3: (2, RIGHT)}, {**held, 1: (1, RIGHT)}):
        verdict = decide(ChainState(), EPOCH, launch, version(wrong))
        assert verdict is not None
        assert isinstance(verdict.problem, StateConflict)
        assert "replicas it registered" in verdict.problem.message


def test_holders_must_hold_the_whole_cell():
    with pytest.raises(LayoutError, match=r"ranks from 2 on hold 8 lanes of 'w'.*16 lanes are published"):
        summarize(records({2: (2, RIGHT)}, lanes=LANES))
    alone = records({2: (2, RIGHT)})
    alone[0:2] = launch_records("one", [{"w": 1}, {"w": 2}])
    alone[0:2] = [r.model_copy(update={"world": WORLD}) for r in alone[0:2]]
    with pytest.raises(LayoutError, match="0 lanes are published"):
        summarize(alone)
    twice = records({2: (2, RIGHT)})
    twice[2] = twice[2].model_copy(update={"replicas": twice[2].replicas * 2})
    with pytest.raises(LayoutError, match="rank 2 declares a replica twice"):
        summarize(twice)


def test_records_without_replicas_have_the_bytes_they_always_had():
    launch = launch_records("one", [{"w": 1}])[0]
    commit = decide(
        ChainState(),
        EpochRecord(run=RUN, epoch=1, launch="one", world=1),
        summarize([launch]),
        {0: entry(part(0, 1, 0, launch="one", step=0, base=None, old={"w": None}, new={"w": 1}, dense=True))},
    )
    assert commit is not None
    written = [launch, part(0, 1, 0, launch="one", step=0, base=None, old={}, new={}), commit.decision]
    for record in written:
        fields = json.loads(record_bytes(record))
        assert not {"replicas", "diverged"} & fields.keys()
        assert all("cell" not in s for s in fields.get("slices", []))
    assert parse_record(LaunchRecord, record_bytes(launch)) == launch
    full = records({2: (2, RIGHT)})
    assert [parse_record(LaunchRecord, record_bytes(r)) for r in full] == full
    assert json.loads(record_bytes(full[0]))["slices"][0]["cell"] == CELL
    reported = version({2: (2, RIGHT)})[2].part
    assert parse_record(PartRecord, record_bytes(reported)) == reported


def test_a_decision_names_a_bounded_number():
    from engine.commit.replicas import find_diverged

    replicas = [ReplicaDigest(cell=CELL, tensor=f"t{i}", holders=1, digest=digest_of(i)) for i in range(2000)]
    new = {f"t{i}": i + 1 for i in range(2000)}
    own = part(0, 1, 0, launch="one", step=0, base=None, old=dict.fromkeys(new), new=new, dense=True)
    other = part(0, 1, 1, launch="one", step=0, base=None, old={}, new={}).model_copy(update={"replicas": replicas})
    diverged = find_diverged([{s.slice: CELL for s in own.slices}, {}], [own, other])
    assert len(diverged) == MAX_DIVERGED
    assert [d.tensor for d in diverged] == sorted(f"t{i}" for i in range(2000))[:MAX_DIVERGED]
