"""The commit machine: what may stand at the next number, computed from what stands before it."""

from __future__ import annotations

import dataclasses
from itertools import permutations

import pytest

from engine.commit import (
    ChainState,
    ClaimEpoch,
    Opened,
    OpenStep,
    Superseded,
    advance,
    claim,
    decide,
    fold,
    may_abort,
    next_open_step,
    summarize,
)
from engine.commit.coverage import prove_cover
from engine.errors import InvalidInput, LayoutError, StateConflict
from engine.records import (
    AbortDecision,
    CommitDecision,
    EpochRecord,
    EpochStartDecision,
    LaunchRecord,
    record_bytes,
)
from tests.model.build import RUN, digest_of, entry, launch_records, part

A, B = {"w": 1, "x": 2}, {"w": 3, "x": 4}
RECORDS = launch_records("one", [A, B])
LAUNCH = summarize(RECORDS)
EPOCH = EpochRecord(run=RUN, epoch=1, launch="one", world=2)
NONE = {"w": None, "x": None}


def first_parts(version: int = 0, epoch: int = 1, launch: str = "one", step: int = 0):
    return {
        w: entry(
            part(version, epoch, w, launch=launch, step=step, base=None, old=NONE, new=v, dense=True, created_ms=w)
        )
        for w, v in enumerate((A, B))
    }


def committed(state: ChainState | None = None) -> ChainState:
    verdict = decide(state or ChainState(), EPOCH, LAUNCH, first_parts())
    assert verdict is not None
    return fold([verdict.decision])


def delta_parts(state: ChainState, new0, new1, **changes):
    return {
        w: entry(
            part(
                state.next_version,
                changes.get("epoch", 1),
                w,
                launch=changes.get("launch", "one"),
                step=changes.get("steps", (1, 1))[w],
                base=changes.get("bases", (0, 0))[w],
                old=old,
                new=new,
                dense=changes.get("dense", False),
            )
        )
        for w, (old, new) in enumerate(changes.get("olds_news", ((A, new0), (B, new1))))
    }


def test_a_version_waits_for_every_writer():
    parts = first_parts()
    del parts[1]
    assert decide(ChainState(), EPOCH, LAUNCH, parts) is None


def test_version_0_sums_slices_per_tensor_and_is_deterministic():
    parts = first_parts()
    commit = decide(ChainState(), EPOCH, LAUNCH, parts).decision
    assert isinstance(commit, CommitDecision)
    assert (commit.version, commit.base, commit.step, commit.rewound, commit.created_ms) == (0, None, 0, False, 1)
    want = (int(digest_of(1), 16) + int(digest_of(3), 16)) % 2**64
    assert [t.name for t in commit.tensors] == ["w", "x"]
    assert commit.tensors[0].digest == f"{want:016x}"
    assert commit.totals.elements == 32
    assert commit.totals.dense_lanes == 32
    for order in permutations(parts):
        again = decide(ChainState(), EPOCH, LAUNCH, {w: parts[w] for w in order}).decision
        assert record_bytes(again) == record_bytes(commit)


def test_a_delta_extends_the_head():
    state = committed()
    verdict = decide(state, EPOCH, LAUNCH, delta_parts(state, {"w": 7, "x": 2}, B))
    assert isinstance(verdict.decision, CommitDecision)
    assert (verdict.decision.version, verdict.decision.base, verdict.decision.totals.changed) == (1, 0, 1)


def test_no_change_anywhere_is_an_abort():
    state = committed()
    verdict = decide(state, EPOCH, LAUNCH, delta_parts(state, A, B))
    assert verdict.decision == AbortDecision(run=RUN, version=1, epoch=1, reason="unchanged")
    assert verdict.problem is None


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": (1, 2)},
        {"bases": (0, None)},
        {"launch": "other"},
        {"olds_news": (({"w": 9, "x": 2}, {"w": 7, "x": 2}), (B, B))},
        {"olds_news": (({"w": None, "x": 2}, {"w": 7, "x": 2}), (B, B))},
        {"olds_news": ((A, {"w": 7}), (B, B))},
    ],
    ids=["mixed-steps", "mixed-bases", "other-launch", "wrong-base-digest", "unknown-base-digest", "missing-slice"],
)
def test_parts_that_can_never_commit_are_rejected_not_waited_for(changes):
    state = committed()
    verdict = decide(state, EPOCH, LAUNCH, delta_parts(state, {"w": 7, "x": 2}, B, **changes))
    assert verdict.decision == AbortDecision(run=RUN, version=1, epoch=1, reason="rejected")
    assert verdict.problem is not None


def test_a_part_that_hides_a_change_is_rejected():
    state = committed()
    parts = delta_parts(state, {"w": 7, "x": 2}, B)
    record = parts[0].part
    silent = record.model_copy(update={"slices": [s.model_copy(update={"changed": 0}) for s in record.slices]})
    verdict = decide(state, EPOCH, LAUNCH, parts | {0: entry(silent)})
    assert verdict.decision.reason == "rejected"


def test_a_dense_tensor_needs_no_base_digest():
    state = committed()
    parts = delta_parts(state, A, B, dense=True, olds_news=((NONE, {"w": 7, "x": 2}), (B, B)))
    assert isinstance(decide(state, EPOCH, LAUNCH, parts).decision, CommitDecision)


def test_version_0_must_be_dense():
    parts = first_parts()
    record = parts[0].part
    sparse = record.model_copy(
        update={"slices": [s.model_copy(update={"dense_tiles": 0, "changed": 3}) for s in record.slices]}
    )
    assert decide(ChainState(), EPOCH, LAUNCH, parts | {0: entry(sparse)}).decision.reason == "rejected"


def test_only_the_open_epoch_decides():
    state = ChainState()
    two = EpochRecord(run=RUN, epoch=2, launch="one", world=2)
    assert decide(state, two, LAUNCH, first_parts(epoch=2)) is None
    started = fold([EpochStartDecision(run=RUN, version=0, epoch=2, launch="two", base=None, differs=[])])
    assert decide(started, EPOCH, LAUNCH, first_parts(version=1)) is None
    assert may_abort(started, 1, 2)
    assert not may_abort(started, 1, 1)
    assert not may_abort(started, 0, 2)
    assert not may_abort(started, 2, 2)


def test_readers_ignore_what_an_old_or_unopened_epoch_writes():
    start = EpochStartDecision(run=RUN, version=0, epoch=2, launch="two", base=None, differs=[])
    state = fold([start])
    zombie = decide(ChainState(), EPOCH, LAUNCH, first_parts()).decision.model_copy(update={"version": 1})
    after, effective = advance(state, zombie)
    assert not effective
    assert (after.next_version, after.epoch, after.head) == (2, 2, None)
    after, effective = advance(state, AbortDecision(run=RUN, version=1, epoch=3, reason="revoked"))
    assert not effective
    after, effective = advance(state, start.model_copy(update={"version": 1}))
    assert not effective


def test_decisions_are_read_without_gaps():
    with pytest.raises(ValueError, match="decision 1 read at number 0"):
        advance(ChainState(), AbortDecision(run=RUN, version=1, epoch=1, reason="revoked"))


# --- opening ---

TWO = EpochRecord(run=RUN, epoch=2, launch="two", world=2)


def test_a_launch_gets_one_epoch_and_numbers_have_no_gaps():
    assert claim(RUN, "one", 2, []) == ClaimEpoch(EPOCH)
    assert claim(RUN, "one", 2, [EPOCH]) == EPOCH
    assert claim(RUN, "two", 2, [EPOCH]) == ClaimEpoch(TWO)
    assert claim(RUN, "one", 2, [EPOCH, TWO]) == EPOCH


def test_the_first_epoch_is_open_without_a_record():
    assert next_open_step(ChainState(), EPOCH, LAUNCH, EPOCH, LAUNCH, {}) == Opened(None)


def test_opening_adopts_a_complete_version_under_its_own_epoch_then_starts():
    launch2 = summarize(launch_records("two", [A, B]))
    step = next_open_step(ChainState(), TWO, launch2, EPOCH, LAUNCH, first_parts())
    assert isinstance(step, OpenStep)
    assert isinstance(step.decision, CommitDecision)
    assert step.decision.epoch == 1
    state = fold([step.decision])
    step = next_open_step(state, TWO, launch2, EPOCH, LAUNCH, {})
    assert step == OpenStep(EpochStartDecision(run=RUN, version=1, epoch=2, launch="two", base=0, differs=[]))
    state, effective = advance(state, step.decision)
    assert effective
    assert next_open_step(state, TWO, launch2, TWO, launch2, {}) == Opened(step.decision)


def test_opening_takes_the_number_of_an_incomplete_or_impossible_version():
    launch2 = summarize(launch_records("two", [A, B]))
    parts = first_parts()
    bad = first_parts(step=5)
    for found in ({0: parts[0]}, {0: parts[0], 1: bad[1]}):
        step = next_open_step(ChainState(), TWO, launch2, EPOCH, LAUNCH, found)
        assert isinstance(step.decision, EpochStartDecision)
        assert step.decision.version == 0


def test_an_older_epoch_is_superseded():
    state = fold([EpochStartDecision(run=RUN, version=0, epoch=3, launch="three", base=None, differs=[])])
    assert next_open_step(state, TWO, LAUNCH, EPOCH, LAUNCH, {}) == Superseded(3)


def test_a_rewound_launch_names_what_differs_and_its_first_version_says_rewound():
    launch2 = summarize(launch_records("two", [{"w": 1, "x": 9}, B]))
    state = committed()
    start = next_open_step(state, TWO, launch2, EPOCH, LAUNCH, {}).decision
    assert start.differs == ["x"]
    state, _ = advance(state, start)
    sparse = delta_parts(
        state,
        None,
        None,
        epoch=2,
        launch="two",
        olds_news=(({"w": 1, "x": 9}, {"w": 1, "x": 9}), (B, {"w": 8, "x": 4})),
    )
    assert decide(state, TWO, launch2, sparse).decision.reason == "rejected"
    state, _ = advance(state, decide(state, TWO, launch2, sparse).decision)
    dense = delta_parts(
        state, None, None, epoch=2, launch="two", dense=True, olds_news=((A, {"w": 1, "x": 9}), (B, {"w": 8, "x": 4}))
    )
    commit = decide(state, TWO, launch2, dense).decision
    assert isinstance(commit, CommitDecision)
    assert (commit.rewound, commit.base, commit.version) == (True, 0, 3)
    state, _ = advance(state, commit)
    after = {
        w: entry(part(4, 2, w, launch="two", step=2, base=3, old=old, new=new))
        for w, (old, new) in enumerate((({"w": 1, "x": 9}, A), ({"w": 8, "x": 4}, B)))
    }
    assert decide(state, TWO, launch2, after).decision.rewound is False


def test_another_model_is_refused():
    state = committed()
    other = summarize(launch_records("two", [A, B], shapes={"w": 32}))
    with pytest.raises(StateConflict, match="tensor 'w' is \\[32\\] bfloat16 now and \\[16\\]"):
        next_open_step(state, TWO, other, EPOCH, LAUNCH, {})
    more = summarize(launch_records("two", [A | {"y": 1}, B | {"y": 1}]))
    with pytest.raises(StateConflict, match="absent in version 0"):
        next_open_step(state, TWO, more, EPOCH, LAUNCH, {})


# --- launches ---


def test_ranks_of_a_launch_must_agree():
    changed = RECORDS[1].model_copy(update={"world": 3})
    with pytest.raises(StateConflict):
        summarize([RECORDS[0], changed])
    with pytest.raises(StateConflict, match="starts at step 4"):
        summarize([RECORDS[0], RECORDS[1].model_copy(update={"step": 4})])
    with pytest.raises(LayoutError, match="ranks disagree about tensor 'w'"):
        summarize([RECORDS[0], launch_records("one", [A, B], shapes={"w": 32})[1]])
    with pytest.raises(InvalidInput):
        summarize([LaunchRecord(run=RUN, launch="one", rank=0, world=1, step=0, tensors=[], slices=[])])


def test_slices_must_cover_each_tensor_exactly_once():
    prove_cover(RECORDS)
    gap = RECORDS[1].model_copy(update={"slices": RECORDS[1].slices[1:]})
    with pytest.raises(LayoutError, match=r"w.*\[8, 16\).*rank 0"):
        prove_cover([RECORDS[0], gap])
    twice = RECORDS[1].model_copy(update={"slices": RECORDS[0].slices})
    with pytest.raises(LayoutError, match=r"w.*\[0, 8\).*rank 0 and rank 1"):
        prove_cover([RECORDS[0], twice])


def test_dense_lanes_are_counted_exactly_and_all_of_them_make_a_version_complete():
    parts = first_parts()
    commit = decide(ChainState(), EPOCH, LAUNCH, parts).decision
    assert commit.totals.complete
    short = {
        w: dataclasses.replace(e, part=e.part.model_copy(update={"slices": [
            s.model_copy(update={"dense_lanes": 3, "dense_tiles": 1, "tiles": 1}) for s in e.part.slices
        ]}))
        for w, e in parts.items()
    }  # fmt: skip
    totals = decide(ChainState(), EPOCH, LAUNCH, short).decision.totals
    assert totals.dense_lanes == 3 * sum(len(e.part.slices) for e in parts.values())
    assert not totals.complete
