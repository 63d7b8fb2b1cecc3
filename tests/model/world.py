"""The model: every process of the protocol as a set of atomic actions over an in-memory store.

It runs the functions of `engine.commit` that the daemon runs. A process reads the store in one action and writes in a
later one, so anything may happen in between: a stalled process is one whose write comes late, a dead one that had a
request on the wire is one whose write comes last. Reading is one action: objects are immutable and only ever added,
so a slow read sees what a read at its end would see, or loses its put-if-absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from engine.commit import (
    ChainState,
    ClaimEpoch,
    LaunchView,
    OpenStep,
    PartEntry,
    Superseded,
    claim,
    may_abort,
)
from engine.records import AbortDecision, CommitDecision, EpochRecord
from tests.model.records import RUN, Launch, Tables, view_of
from tests.model.state import (
    ABSENT,
    ALIVE,
    CLOSED,
    CRASH,
    CRASHED,
    DONE,
    IDLE,
    LOSE,
    OPEN,
    RETIRED,
    REVOKE,
    InFlight,
    Life,
    Rank,
    Scenario,
    State,
)

T = TypeVar("T")


class World:
    """The transition relation of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rules = scenario.rules
        self.tables = Tables()
        self.views: list[LaunchView] = [view_of(launch) for launch in scenario.launches]
        self.index = {launch.name: i for i, launch in enumerate(scenario.launches)}
        self._folds: dict[tuple[int, ...], tuple[ChainState, tuple[bool, ...]]] = {(): (ChainState(), ())}
        self._verdicts: dict[tuple[object, ...], int] = {}
        self._memo: dict[tuple[object, ...], Any] = {}

    def initial(self) -> State:
        s = self.scenario
        lives = tuple(Life(ABSENT, -1, (IDLE,) * s.openers, (Rank(),) * len(launch.owns)) for launch in s.launches)
        return State((), (), frozenset(), (-1,) * s.committers, lives, (s.crashes, s.revokes, s.losses))

    # --- what a reader of the store knows ---------------------------------------------------------------------------

    def fold(self, decisions: tuple[int, ...]) -> tuple[ChainState, tuple[bool, ...]]:
        found = self._folds.get(decisions)
        if found is None:
            state, flags = self.fold(decisions[:-1])
            state, effective = self.rules.advance(state, self.tables.decisions[decisions[-1]])
            found = self._folds[decisions] = (state, (*flags, effective))
        return found

    def memo(self, key: tuple[object, ...], work: Callable[[], T]) -> T:
        """`work()`, once per key: most actions depend on a small piece of the state only."""
        if key not in self._memo:
            self._memo[key] = work()
        found: T = self._memo[key]
        return found

    def record(self, epochs: tuple[str, ...], number: int) -> EpochRecord:
        name = epochs[number - 1]
        world = self.views[self.index[name]].world
        return self.memo((name, number), lambda: EpochRecord(run=RUN, epoch=number, launch=name, world=world))

    def parts_at(self, state: State, version: int, epoch: int) -> dict[int, PartEntry]:
        found = (self.tables.parts[p] for p in state.parts)
        return {g.writer: g.entry for g in found if g.version == version and g.epoch == epoch}

    def verdict(self, state: State, epoch: int) -> int:
        """What a committer that looks at `epoch`'s parts would write now, or -1."""
        key = (state.decisions, state.epochs[epoch - 1], epoch, self._parts_next(state))
        found = self._verdicts.get(key)
        if found is None:
            chain, _ = self.fold(state.decisions)
            record = self.record(state.epochs, epoch)
            entries = self.parts_at(state, chain.next_version, epoch)
            verdict = self.rules.decide(chain, record, self.views[self.index[record.launch]], entries)
            found = self._verdicts[key] = -1 if verdict is None else self.tables.decision(verdict.decision)
        return found

    def _parts_next(self, state: State) -> frozenset[int]:
        number = len(state.decisions)
        return frozenset(p for p in state.parts if self.tables.parts[p].version == number)

    # --- actions ------------------------------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        yield from self._committers(state)
        for i, life in enumerate(state.lives):
            if life.status == ABSENT:
                if i == 0 or state.lives[i - 1].status != ABSENT:
                    yield f"start {i}", self._with_life(state, i, life._replace(status=ALIVE))
                continue
            if life.status == ALIVE and state.budget[CRASH]:
                yield f"crash {i}", self._with_life(self._spend(state, CRASH), i, life._replace(status=CRASHED))
            yield from self._openers(state, i, life)
            yield from self._sync(state, i, life)
            for r, rank in enumerate(life.ranks):
                yield from self._rank(state, i, life, r, rank)

    def write(self, state: State, decision: int) -> State:
        number = self.tables.decisions[decision].version
        decisions = state.decisions
        if number == len(decisions):
            return state._replace(decisions=(*decisions, decision))
        assert number < len(decisions), "nobody writes beyond what it has read"
        if self.rules.put_if_absent:
            return state
        return state._replace(decisions=(*decisions[:number], decision, *decisions[number + 1 :]))

    def _committers(self, state: State) -> Iterator[tuple[str, State]]:
        for i, held in enumerate(state.committers):
            if i and held == state.committers[i - 1]:
                continue
            others = state.committers[:i] + state.committers[i + 1 :]
            if held >= 0:
                done = tuple(sorted((*others, -1)))
                yield f"committer writes {held}", self.write(state, held)._replace(committers=done)
                continue
            for epoch in range(1, len(state.epochs) + 1):
                verdict = self.verdict(state, epoch)
                if verdict >= 0:
                    yield (
                        f"committer decides {verdict}",
                        state._replace(committers=tuple(sorted((*others, verdict)))),
                    )

    def _openers(self, state: State, i: int, life: Life) -> Iterator[tuple[str, State]]:
        for o, held in enumerate(life.openers):
            if held == DONE or (o and held == life.openers[o - 1]):
                continue
            others = life.openers[:o] + life.openers[o + 1 :]

            def at(next_: tuple[object, ...], rest: tuple[tuple[object, ...], ...] = others) -> Life:
                return life._replace(openers=tuple(sorted((*rest, next_), key=repr)))

            if held == IDLE:
                if life.status == ALIVE:
                    yield f"opener of {i} reads", self._with_life(state, i, at(self._opener_reads(state, i)))
            elif held[0] == "claim":
                number, name = int(held[1]), self.scenario.launches[i].name  # type: ignore[call-overload]
                epochs = state.epochs
                if number == len(epochs) + 1:
                    epochs = (*epochs, name)
                elif not self.rules.claim_if_absent:
                    epochs = (*epochs[: number - 1], name, *epochs[number:])
                yield f"opener of {i} claims {number}", self._with_life(state._replace(epochs=epochs), i, at(IDLE))
            else:
                written = self.write(state, int(held[1]))  # type: ignore[call-overload]
                yield f"opener of {i} writes {held[1]}", self._with_life(written, i, at(IDLE))

    def _opener_reads(self, state: State, i: int) -> tuple[object, ...]:
        key = ("open", i, state.decisions, state.epochs, self._parts_next(state))
        return self.memo(key, lambda: self._open_read(state, i))

    def _open_read(self, state: State, i: int) -> tuple[object, ...]:
        launch = self.scenario.launches[i]
        known = [self.record(state.epochs, n) for n in range(1, len(state.epochs) + 1)]
        record = claim(RUN, launch.name, len(launch.owns), known)
        if isinstance(record, ClaimEpoch):
            return ("claim", record.record.epoch)
        if known[-1].epoch > record.epoch:
            return DONE
        chain, _ = self.fold(state.decisions)
        current = known[chain.epoch - 1] if chain.epoch <= len(known) else None
        view = None if current is None else self.views[self.index[current.launch]]
        parts = {} if current is None else self.parts_at(state, chain.next_version, current.epoch)
        step = self.rules.open_step(chain, record, self.views[i], current, view, parts)
        if isinstance(step, OpenStep):
            return ("write", self.tables.decision(step.decision))
        assert not isinstance(step, Superseded) or step.by > record.epoch
        return DONE

    def epoch_of(self, state: State, i: int) -> int | None:
        name = self.scenario.launches[i].name
        return state.epochs.index(name) + 1 if name in state.epochs else None

    def _sync(self, state: State, i: int, life: Life) -> Iterator[tuple[str, State]]:
        """One optimizer step (none before the first sync), read by every rank; a version if the ranks agree on one."""
        launch = self.scenario.launches[i]
        if life.status != ALIVE or life.steps + 1 >= min(len(launch.script), launch.syncs):
            return
        if any(rank.status != OPEN for rank in life.ranks):
            return
        steps = life.steps + 1
        ranks = [self._read(launch, r, rank, steps) for r, rank in enumerate(life.ranks)]
        free = [rank.flight is None for rank in ranks]
        cut = min(rank.seen for rank in ranks) if all(free) or not self.rules.agree_on_cut else None
        epoch = self.epoch_of(state, i)
        assert epoch is not None
        for r, rank in enumerate(ranks):
            number = cut if self.rules.agree_on_cut else rank.seen
            if number == rank.seen and rank.flight is None:
                prefix = state.decisions[: rank.seen]
                key = ("capture", i, r, rank, steps, epoch, prefix)
                ranks[r] = self.memo(
                    key, lambda r=r, rank=rank, p=prefix: self._capture(p, launch, r, rank, steps, epoch)
                )
            elif not self.rules.wait_for_decision and rank.flight is not None and rank.flight.put:
                state = state._replace(parts=state.parts | {self._eager_part(launch, r, rank, steps, epoch)})
        yield f"sync {i}", self._with_life(state, i, life._replace(steps=steps, ranks=tuple(ranks)))

    def _read(self, launch: Launch, r: int, rank: Rank, steps: int) -> Rank:
        """Merge what this step changed: the earliest base bits stay, what returned to them drops out."""
        if steps == 0:
            return rank
        old, new = launch.values(steps - 1, r), launch.values(steps, r)
        level = dict(rank.pending)
        for cell in new:
            if cell in rank.dense:
                continue
            base = level.pop(cell, (old[cell], 0))[0]
            if base != new[cell]:
                level[cell] = (base, new[cell])
        return rank._replace(pending=tuple(sorted(level.items())))

    def _capture(self, prefix: tuple[int, ...], launch: Launch, r: int, rank: Rank, steps: int, epoch: int) -> Rank:
        chain, _ = self.fold(prefix)
        base = chain.head
        known: dict[int, int] | None = launch.values(steps, r)
        assert known is not None
        known.update((c, change[0]) for c, change in rank.pending if change[0] is not None)
        if rank.dense:
            known = self._own_base(launch, r, base, epoch)
        part = self.tables.part(
            launch,
            r,
            version=rank.seen,
            epoch=epoch,
            steps=steps,
            base=None if base is None else base.version,
            sparse=dict(rank.pending),
            dense=rank.dense,
            base_values=known,
        )
        flight = InFlight(rank.seen, part, rank.pending, rank.dense, False)
        return rank._replace(flight=flight, pending=(), dense=())

    def _own_base(self, launch: Launch, r: int, base: CommitDecision | None, epoch: int) -> dict[int, int] | None:
        """What a rank that no longer has its list reads from its own part of the base, if it wrote one."""
        if base is None or base.epoch != epoch:
            return None
        ghost = self.tables.part_of(base.parts[r])
        return launch.values(ghost.entry.part.step - launch.step, r)

    def _eager_part(self, launch: Launch, r: int, rank: Rank, steps: int, epoch: int) -> int:
        """A protocol-breaking writer: the next version on top of one in flight, as if that were sure to commit."""
        assert rank.flight is not None
        sent = launch.values(self.tables.parts[rank.flight.part].entry.part.step - launch.step, r)
        now = launch.values(steps, r)
        return self.tables.part(
            launch,
            r,
            version=rank.flight.version + 1,
            epoch=epoch,
            steps=steps,
            base=rank.flight.version,
            sparse={c: (sent[c], v) for c, v in now.items() if v != sent[c]},
            dense=(),
            base_values=sent,
        )

    def _rank(self, state: State, i: int, life: Life, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        flight = rank.flight

        def became(new: Rank, base: State = state) -> State:
            ranks = (*life.ranks[:r], new, *life.ranks[r + 1 :])
            return self._with_life(base, i, life._replace(ranks=ranks))

        if flight is not None and not flight.put and not self._gives_up(rank, flight):
            # Also after a crash: the request may have been on the wire.
            parts = state.parts if self._taken(state, flight.part) else state.parts | {flight.part}
            yield (
                f"rank {i}.{r} puts part",
                became(rank._replace(flight=flight._replace(put=True)), state._replace(parts=parts)),
            )
        if rank.aborting >= 0:
            yield f"rank {i}.{r} writes abort", became(rank._replace(aborting=-1), self.write(state, rank.aborting))
        if life.status != ALIVE:
            return
        if rank.status == CLOSED or (rank.status == OPEN and rank.seen < len(state.decisions)):
            key = ("refresh", i, r, rank, state.decisions, state.epochs)
            new = self.memo(key, lambda: self._refresh(state, i, r, rank))
            if new != rank:
                yield f"rank {i}.{r} reads the chain", became(new)
        if flight is not None and not flight.put and rank.aborting < 0 and rank.status == OPEN:
            for kind, reason in ((REVOKE, "revoked"), (LOSE, "spool-lost")):
                if state.budget[kind]:
                    new = self._give_up(state, i, r, rank, reason)
                    if new is not None:
                        yield f"rank {i}.{r} gives up: {reason}", became(new, self._spend(state, kind))

    def _gives_up(self, rank: Rank, flight: InFlight) -> bool:
        """Whether the abort the rank is about to write is of the version in flight, not of one long decided."""
        return rank.aborting >= 0 and self.tables.decisions[rank.aborting].version == flight.version

    def _taken(self, state: State, part: int) -> bool:
        """Whether an object already has this part's key."""
        mine = self.tables.parts[part]
        key = (mine.version, mine.epoch, mine.writer)
        return any((g.version, g.epoch, g.writer) == key for g in map(self.tables.parts.__getitem__, state.parts))

    def _give_up(self, state: State, i: int, r: int, rank: Rank, reason: str) -> Rank | None:
        assert rank.flight is not None
        chain, _ = self.fold(state.decisions)
        epoch = self.epoch_of(state, i)
        assert epoch is not None
        if not may_abort(chain, rank.flight.version, epoch):
            return None
        record = AbortDecision(run=RUN, version=rank.flight.version, epoch=epoch, reason=reason)  # type: ignore[arg-type]
        new = rank._replace(aborting=self.tables.decision(record))
        if reason == "spool-lost":
            own = self.scenario.launches[i].owns[r]
            # The list is gone: nothing is known of what is below the bits, so everything is flagged dense.
            flight = rank.flight._replace(sparse=(), dense=own)
            new = new._replace(flight=flight, pending=(), dense=own, lost=True)
        return new

    def _refresh(self, state: State, i: int, r: int, rank: Rank) -> Rank:
        epoch = self.epoch_of(state, i)
        chain, flags = self.fold(state.decisions)
        if epoch is None:
            return rank
        if chain.epoch > epoch and self.rules.stop_when_superseded:
            return rank._replace(status=RETIRED, seen=len(state.decisions))
        if rank.status == CLOSED:
            if chain.epoch != epoch:
                return rank
            own = self.scenario.launches[i].owns[r]
            based = chain.start is not None and chain.start.base is not None
            dense = () if based and chain.start is not None and not chain.start.differs else own
            return rank._replace(status=OPEN, seen=len(state.decisions), dense=dense)
        flight = rank.flight
        new = rank._replace(seen=len(state.decisions))
        if flight is None or flight.version >= len(state.decisions):
            return new
        standing = self.tables.decisions[state.decisions[flight.version]]
        ref = self.tables.parts[flight.part].entry.ref
        committed = isinstance(standing, CommitDecision) and flags[flight.version] and ref in standing.parts
        new = new._replace(flight=None)
        return new if committed or not self.rules.fold_on_abort else _fold_back(new, flight)

    def _with_life(self, state: State, i: int, life: Life) -> State:
        return state._replace(lives=(*state.lives[:i], life, *state.lives[i + 1 :]))

    def _spend(self, state: State, kind: int) -> State:
        budget = tuple(n - (k == kind) for k, n in enumerate(state.budget))
        return state._replace(budget=budget)


def _fold_back(rank: Rank, flight: InFlight) -> Rank:
    """In flight below pending becomes pending; dense flags are OR-ed."""
    dense = tuple(sorted({*rank.dense, *flight.dense}))
    level = dict(flight.sparse)
    for cell, (below, above) in rank.pending:
        level[cell] = (level[cell][0] if cell in level else below, above)
    kept = {c: change for c, change in level.items() if c not in dense and change[0] != change[1]}
    return rank._replace(pending=tuple(sorted(kept.items())), dense=dense)
