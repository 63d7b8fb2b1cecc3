"""`ChainState`: all that the decisions below one number say about what may stand at that number.

One invariant: a state is a function of a gapless run of decisions from number 0, so whoever has read the same numbers
has the same state, and a decision for number n can be computed only by somebody who has read all before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.records import AbortDecision, CommitDecision, Decision, EpochStartDecision

FIRST_EPOCH = 1
"""The first epoch of an empty run is open without an epoch-start: there is nothing to fence."""


@dataclass(frozen=True, slots=True)
class ChainState:
    """The chain as seen after reading decisions 0 … `next_version` - 1.

    `epoch` is the one epoch that may commit or abort at `next_version`. `head` is the newest effective commit, `start`
    the record that opened `epoch` (None for the first epoch of a run). `first` is true until `epoch` has committed.
    """

    next_version: int = 0
    epoch: int = FIRST_EPOCH
    head: CommitDecision | None = None
    start: EpochStartDecision | None = None

    @property
    def first(self) -> bool:
        """True when the next commit would be the first one of its epoch."""
        return self.head is None or self.head.epoch < self.epoch


def is_effective(state: ChainState, decision: Decision) -> bool:
    """Whether the decision read at `state.next_version` counts. An older epoch's does not: its number is spent.

    An epoch that never started cannot commit either; only a writer that breaks the protocol could have written that.
    """
    if isinstance(decision, EpochStartDecision):
        return decision.epoch > state.epoch
    return decision.epoch == state.epoch


def advance(state: ChainState, decision: Decision) -> tuple[ChainState, bool]:
    """The state after `decision`, which stands at `state.next_version`, and whether the decision is effective."""
    if decision.version != state.next_version:
        raise ValueError(f"decision {decision.version} read at number {state.next_version}")
    after = replace(state, next_version=state.next_version + 1)
    if not is_effective(state, decision):
        return after, False
    if isinstance(decision, EpochStartDecision):
        return replace(after, epoch=decision.epoch, start=decision), True
    if isinstance(decision, CommitDecision):
        return replace(after, head=decision), True
    assert isinstance(decision, AbortDecision)
    return after, True


def fold(decisions: Iterable[Decision], state: ChainState | None = None) -> ChainState:
    """The state after all of `decisions`, in number order."""
    state = state or ChainState()
    for decision in decisions:
        state, _ = advance(state, decision)
    return state
