"""What must hold in every state of the model, checked without the functions under test.

`Audit` reads the store as a receiver would, by the words of the protocol (a decision whose epoch is lower than an
earlier one's does not count), and compares with the ghosts: what the trainers' bits really were.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.records import CommitDecision, EpochStartDecision
from tests.model.records import TENSOR, digest
from tests.model.state import ALIVE, OPEN, Life, State
from tests.model.world import World


class Violation(AssertionError):
    """An invariant does not hold; the message ends with the way there."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


@dataclass(frozen=True)
class Held:
    """What a receiver that followed the chain up to a number holds."""

    epoch: int = 0
    version: int | None = None
    cells: tuple[tuple[int, int], ...] = ()
    commit: CommitDecision | None = None
    start: EpochStartDecision | None = None


class Audit:
    """The invariants of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held: dict[tuple[int, ...], Held] = {(): Held()}
        self._sound: set[tuple[object, ...]] = set()

    def held(self, decisions: tuple[int, ...]) -> Held:
        found = self._held.get(decisions)
        if found is None:
            found = self._held[decisions] = self._step(self.held(decisions[:-1]), decisions)
        return found

    def _step(self, before: Held, decisions: tuple[int, ...]) -> Held:
        decision = self._world.tables.decisions[decisions[-1]]
        require(decision.version == len(decisions) - 1, "a decision stands at its own number")
        require(decision.epoch >= before.epoch, f"nothing of epoch {decision.epoch} follows epoch {before.epoch}")
        if isinstance(decision, EpochStartDecision):
            require(decision.epoch > before.epoch, "an epoch starts once")
            require(decision.base == before.version, "an epoch's base is the newest commit below its start")
            view = self._world.views[self._world.index[decision.launch]]
            same = before.commit is not None and digest(dict(before.cells)) == f"{view.digests[TENSOR]:016x}"
            require(decision.differs == ([] if same else [TENSOR]), "the start names the tensors that differ")
            return Held(decision.epoch, before.version, before.cells, before.commit, decision)
        if not isinstance(decision, CommitDecision):
            return Held(decision.epoch, before.version, before.cells, before.commit, before.start)
        return self._commit(before, decision)

    def _commit(self, before: Held, commit: CommitDecision) -> Held:
        require(commit.base == before.version, f"version {commit.version} extends the newest commit")
        ghosts = [self._world.tables.part_of(ref) for ref in commit.parts]
        launch = self._world.scenario.launches[self._world.index[commit.launch]]
        require(len(ghosts) == len(launch.owns), "every writer's part is in the version")
        cells = dict(before.cells)
        for rank, ghost in enumerate(ghosts):
            part = ghost.entry.part
            require(
                (part.writer, part.epoch, part.launch, part.step, part.base, part.version)
                == (rank, commit.epoch, commit.launch, commit.step, commit.base, commit.version),
                "parts are of one epoch, step, base and version",
            )
            for cell, (old, new) in ghost.changes.items():
                require(old is None or cells.get(cell) == old, "a delta meets the base bits it was made from")
                cells[cell] = new
        truth = dict(enumerate(launch.script[commit.step - launch.step]))
        require(cells == truth, f"a receiver at version {commit.version} holds the trainer's bits at that step")
        require(commit.tensors[0].digest == digest(truth), "the decision's digest is that of the trainer's bits")
        first = before.commit is not None and before.commit.epoch < commit.epoch
        rewound = first and before.start is not None and bool(before.start.differs)
        require(commit.rewound == rewound, "rewound is said when, and only when, an epoch leaves its base")
        return Held(commit.epoch, commit.version, tuple(sorted(cells.items())), commit, before.start)

    def transition(self, old: State, new: State) -> None:
        require(new.decisions[: len(old.decisions)] == old.decisions, "a decision is never replaced")
        require(new.epochs[: len(old.epochs)] == old.epochs, "an epoch is never replaced")

    def state(self, state: State, *, ledgers: bool = True) -> None:
        self.held(state.decisions)
        require(len(set(state.epochs)) == len(state.epochs), "a launch has one epoch")
        if not ledgers:
            return
        for i, life in enumerate(state.lives):
            if life.status == ALIVE and life.steps >= 0:
                for r, rank in enumerate(life.ranks):
                    if rank.status == OPEN:
                        key = (i, r, rank, life.steps, state.decisions[: rank.seen], state.epochs)
                        if key not in self._sound:
                            self._nothing_lost(state, i, life, r)
                            self._sound.add(key)

    def _nothing_lost(self, state: State, i: int, life: Life, r: int) -> None:
        """The committed bits, then what is in flight, then what is pending, are the trainer's bits."""
        rank = life.ranks[r]
        held = self.held(state.decisions[: rank.seen])
        if held.epoch > (self._world.epoch_of(state, i) or 0):
            return
        base = dict(held.cells)
        flight, pending = dict(rank.flight.sparse if rank.flight else ()), dict(rank.pending)
        dense = {*rank.dense, *(rank.flight.dense if rank.flight else ())}
        for cell, now in self._world.scenario.launches[i].values(life.steps, r).items():
            if cell in dense:
                continue
            bits = base.get(cell)
            for level in (flight, pending):
                if cell in level:
                    require(level[cell][0] == bits, f"the list of rank {i}.{r} starts from the bits below it")
                    bits = level[cell][1]
            require(bits == now, f"committed + in flight + pending of rank {i}.{r} are its true bits")

    def quiet(self, state: State) -> None:
        """In a state where nothing is left to do, no live writer of the open epoch waits for a decision."""
        for i, life in enumerate(state.lives):
            if life.status == ALIVE and all(rank.status == OPEN for rank in life.ranks):
                for r, rank in enumerate(life.ranks):
                    require(rank.flight is None, f"the version in flight of rank {i}.{r} gets decided")


def explore(world: World, *, ledgers: bool = True, quiet: bool = True) -> int:
    """Visit every reachable state, checking all invariants; returns how many there are.

    Raises Violation with the actions that lead to it, and AssertionError when the scenario exceeds its bound (then it
    would not be exhaustive).
    """
    audit = Audit(world)
    start = world.initial()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    stack = [start]
    while stack:
        state = stack.pop()
        moved = False
        for label, successor in world.successors(state):
            moved = moved or not label.startswith(("crash", "start"))
            if successor in came_from:
                continue
            came_from[successor] = (state, label)
            try:
                audit.transition(state, successor)
                audit.state(successor, ledgers=ledgers)
            except Violation as violation:
                raise Violation(f"{violation}, after:\n  " + "\n  ".join(_way(came_from, successor))) from None
            stack.append(successor)
        if not moved and quiet:
            try:
                audit.quiet(state)
            except Violation as violation:
                raise Violation(f"{violation}, after:\n  " + "\n  ".join(_way(came_from, state))) from None
        assert len(came_from) <= world.scenario.max_states, "the scenario is larger than its bound"
    return len(came_from)


def _way(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    steps = []
    at: State | None = state
    while at is not None:
        previous = came_from[at]
        if previous is None:
            break
        at, label = previous
        steps.append(label)
    return steps[::-1]
