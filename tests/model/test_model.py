"""The protocol, explored exhaustively within bounds; and proof that the exploration can fail.

Each scenario visits every interleaving of its processes. Each mutant breaks one rule and must be caught; where the
rule guards against a writer that breaks the protocol, the same faulty writer is first shown to be harmless.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from engine.commit import ChainState, OpenStep, Verdict, decide, next_open_step
from engine.commit.chain import advance
from engine.records import AbortDecision, CommitDecision, Decision, EpochStartDecision
from tests.model.audit import Violation, explore
from tests.model.records import Launch
from tests.model.state import Rules, Scenario
from tests.model.world import World

ONE, TWO, THREE = ((0, 1),), ((0,), (1,)), ((0,), (1,), (2,))


def launch(name: str, owns, *script: tuple[int, ...], step: int = 0, syncs: int = 9) -> Launch:
    return Launch(name, owns, script, step, syncs)


CHANGES = launch("one", TWO, (0, 0), (1, 0), (1, 0), (0, 0))
"""Cell 0 changes, then nothing, then it returns to the bits of version 0."""
SHORT = launch("one", TWO, (0, 0), (1, 0))

SCENARIOS = {
    # A whole life: changes, an unchanged version, a return to the base's bits, a revoked read, a crash anywhere.
    "one-launch": Scenario((CHANGES,), crashes=1, revokes=1),
    "three-writers": Scenario((launch("one", THREE, (0, 0, 0), (1, 0, 0)),), crashes=1, revokes=1),
    # One writer loses its spool while another's read is revoked: two aborts race each other and the committer.
    "lost-spool": Scenario(
        (replace(CHANGES, script=CHANGES.script[:3]),), committers=1, crashes=0, revokes=1, losses=1
    ),
    # A second start while the first one lives (or stalls): same weights, then other ones, with another world size.
    "resumed": Scenario((launch("one", TWO, (0, 0)), launch("two", ONE, (0, 0), (1, 1))), committers=2, crashes=0),
    "rewound-or-adopted": Scenario((SHORT, launch("two", ONE, (1, 0), (1, 1), step=1)), committers=1, crashes=0),
    # Two daemons of one launch open its epoch at once.
    "opened-twice": Scenario(
        (launch("one", TWO, (0, 0)), launch("two", ONE, (0, 0))), openers=2, committers=1, crashes=0
    ),
    # Three starts fight for the run; the middle one is overtaken at any point.
    "three-epochs": Scenario(
        (
            launch("one", ONE, (0, 0), syncs=1),
            launch("two", ONE, (1, 0), step=1, syncs=0),
            launch("three", ONE, (0, 0), syncs=0),
        ),
        committers=1,
        crashes=0,
    ),
}


@cache
def explored(name: str) -> tuple[int, World]:
    world = World(SCENARIOS[name])
    return explore(world), world


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving_keeps_every_promise(name):
    """One decision a number, whole versions, one chain, fencing, exact ledgers, and no version left undecided."""
    states, _ = explored(name)
    assert states > 1000


# --- what makes it fail ---


def commits_without_all_parts(state, epoch, view, parts):
    return decide(state, epoch.model_copy(update={"world": 1}), view, parts)


def ignores_epochs(state, epoch, view, parts):
    return decide(replace(state, epoch=epoch.epoch), epoch, view, parts)


def ignores_bases(state: ChainState, epoch, view, parts):
    """Takes the parts' word for what the head is."""
    if epoch.epoch != state.epoch or len(parts) < epoch.world or any(e.part.base is None for e in parts.values()):
        return decide(state, epoch, view, parts)
    digests = [int(s.digest_base or "0", 16) for e in parts.values() for s in e.part.slices]
    assert state.head is None or state.head.tensors
    if state.head is None:
        return None
    tensor = state.head.tensors[0].model_copy(update={"digest": f"{sum(digests) % 2**64:016x}"})
    believed = state.head.model_copy(update={"version": parts[0].part.base, "tensors": [tensor]})
    return decide(replace(state, head=believed), epoch, view, parts)


def ignores_steps(state, epoch, view, parts):
    """Commits parts of different steps as if they were of the first one's."""
    if not parts or 0 not in parts:
        return decide(state, epoch, view, parts)
    step = parts[0].part.step
    same = {w: replace(e, part=e.part.model_copy(update={"step": step})) for w, e in parts.items()}
    return decide(state, epoch, view, same)


def commits_unchanged(state, epoch, view, parts):
    verdict = decide(state, epoch, view, parts)
    if verdict is None or not isinstance(verdict.decision, AbortDecision) or state.head is None:
        return verdict
    base = state.head
    decision = base.model_copy(
        update={"version": state.next_version, "base": base.version, "parts": [parts[w].ref for w in sorted(parts)]}
    )
    return Verdict(decision)


def names_no_differences(*args):
    step = next_open_step(*args)
    if isinstance(step, OpenStep) and isinstance(step.decision, EpochStartDecision):
        return OpenStep(step.decision.model_copy(update={"differs": []}))
    return step


def does_not_fence(state: ChainState, decision: Decision) -> tuple[ChainState, bool]:
    after, effective = advance(state, decision)
    return (replace(after, epoch=state.epoch) if isinstance(decision, EpochStartDecision) else after), effective


TWO_LAUNCHES = (SHORT, launch("two", ONE, (1, 0), (1, 1), step=1))
OVERTAKEN = (launch("one", TWO, (0, 0), (1, 0)), launch("two", ONE, (0, 0), syncs=0))
MUTANTS: dict[str, tuple[tuple[Launch, ...], Rules, str]] = {
    "decisions-by-plain-put": (TWO_LAUNCHES, Rules(put_if_absent=False), "a decision is never replaced"),
    "epochs-by-plain-put": (OVERTAKEN[::-1], Rules(claim_if_absent=False), "an epoch is never replaced"),
    "commits-without-all-parts": ((SHORT,), Rules(decide=commits_without_all_parts), "every writer's part"),
    "forgets-on-abort": ((CHANGES,), Rules(fold_on_abort=False), "committed .* are its true bits"),
    "names-no-differences": (TWO_LAUNCHES, Rules(open_step=names_no_differences), "names the tensors that differ"),
    "does-not-fence": (TWO_LAUNCHES, Rules(advance=does_not_fence), "an epoch starts once|follows epoch"),
    "commits-unchanged": ((CHANGES,), Rules(decide=commits_unchanged), "holds the trainer's bits|of one epoch, step"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_caught(name):
    launches, rules, promise = MUTANTS[name]
    with pytest.raises(Violation, match=promise):
        explore(World(Scenario(launches, committers=1 + (not rules.put_if_absent), crashes=0, revokes=1, rules=rules)))


FAULTY_WRITERS: dict[str, tuple[tuple[Launch, ...], Rules, Rules, str]] = {
    # A writer of an old epoch that reads the chain and goes on all the same.
    "goes-on-when-superseded": (
        OVERTAKEN,
        Rules(stop_when_superseded=False),
        Rules(stop_when_superseded=False, decide=ignores_epochs),
        "nothing of epoch 1 follows epoch 2",
    ),
    # Ranks that publish whatever step they happen to read, without agreeing on the cut.
    "does-not-agree-on-the-cut": (
        (CHANGES,),
        Rules(agree_on_cut=False),
        Rules(agree_on_cut=False, decide=ignores_steps),
        "parts are of one epoch, step|extends",
    ),
    # A writer that builds on a version in flight as if it were sure to commit.
    "does-not-wait-for-the-decision": (
        (CHANGES,),
        Rules(wait_for_decision=False),
        Rules(wait_for_decision=False, decide=ignores_bases),
        "extends the newest commit",
    ),
}


@pytest.mark.parametrize("name", FAULTY_WRITERS)
def test_a_faulty_writer_cannot_break_the_chain_but_would_without_the_check(name):
    launches, faulty, unchecked, promise = FAULTY_WRITERS[name]
    scenario = Scenario(launches, committers=1, crashes=0, revokes=1, rules=faulty)
    explore(World(scenario), ledgers=False, quiet=False)
    with pytest.raises(Violation, match=promise):
        explore(World(replace(scenario, rules=unchecked)), ledgers=False, quiet=False)


def test_the_exploration_reaches_what_it_is_about():
    """Adoption, rewinding, an unchanged and a revoked version do occur in the scenarios."""
    seen: set[str] = set()
    for name in ("one-launch", "rewound-or-adopted"):
        _, world = explored(name)
        for decision in world.tables.decisions.items:
            seen.add(decision.kind if not isinstance(decision, AbortDecision) else decision.reason)
            if isinstance(decision, CommitDecision) and decision.rewound:
                seen.add("rewound")
            if isinstance(decision, EpochStartDecision) and decision.base is not None and not decision.differs:
                seen.add("resumed")
    assert seen >= {"commit", "epoch-start", "unchanged", "revoked", "rewound", "resumed"}
