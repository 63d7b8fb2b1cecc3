"""What a state of the model is made of, and the rules and bounds of one exploration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.commit import ChainState, Verdict, advance, decide, next_open_step
from engine.records import Decision
from tests.model.records import Change, Launch

IDLE = ("idle",)
DONE = ("done",)
CLOSED, OPEN, RETIRED = "closed", "open", "retired"
ABSENT, ALIVE, CRASHED = "absent", "alive", "crashed"

Level = tuple[tuple[int, Change], ...]
"""A level of the pending list: (cell, (bits below this level, bits above it)), sorted."""


class InFlight(NamedTuple):
    version: int
    part: int
    sparse: Level
    dense: tuple[int, ...]
    put: bool


class Rank(NamedTuple):
    """A writer: how much of the chain it has read, and its two-level pending list."""

    status: str = CLOSED
    seen: int = 0
    flight: InFlight | None = None
    pending: Level = ()
    dense: tuple[int, ...] = ()
    aborting: int = -1
    lost: bool = False


class Life(NamedTuple):
    """A launch as it goes: its steps done (-1 before the first sync), whoever opens its epoch, its ranks."""

    status: str
    steps: int
    openers: tuple[tuple[object, ...], ...]
    ranks: tuple[Rank, ...]


class State(NamedTuple):
    decisions: tuple[int, ...] = ()
    epochs: tuple[str, ...] = ()
    parts: frozenset[int] = frozenset()
    committers: tuple[int, ...] = ()
    lives: tuple[Life, ...] = ()
    budget: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rules:
    """What the processes do at the points where a mutation may do something else."""

    advance: Callable[[ChainState, Decision], tuple[ChainState, bool]] = advance
    decide: Callable[..., Verdict | None] = decide
    open_step: Callable[..., object] = next_open_step
    put_if_absent: bool = True
    claim_if_absent: bool = True
    fold_on_abort: bool = True
    stop_when_superseded: bool = True
    agree_on_cut: bool = True
    wait_for_decision: bool = True


@dataclass(frozen=True)
class Scenario:
    """Bounds of one exploration. Budgets: crashes, revoked reads, lost ledgers."""

    launches: tuple[Launch, ...]
    committers: int = 2
    openers: int = 1
    crashes: int = 1
    revokes: int = 0
    losses: int = 0
    rules: Rules = field(default_factory=Rules)
    max_states: int = 400_000


CRASH, REVOKE, LOSE = range(3)
