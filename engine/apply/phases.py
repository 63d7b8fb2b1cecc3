"""The phases of live weights and the only moves between them.

One invariant: weights in a phase other than `CLEAN` and `PREPARED` may differ from every version, so nothing may be
served from them.
"""

from __future__ import annotations

from enum import StrEnum

from engine.errors import StateConflict


class Phase(StrEnum):
    """`WRITING` is entered before the first write of a commit, `REWRITING` before the first of a resync."""

    CLEAN = "clean"
    PREPARED = "prepared"
    WRITING = "writing"
    WRITTEN = "written"
    REWRITING = "rewriting"
    REWRITTEN = "rewritten"

    @property
    def dirty(self) -> bool:
        """True while the weights may be between two versions."""
        return self not in (Phase.CLEAN, Phase.PREPARED)


class Move(StrEnum):
    PREPARE = "prepare"
    ABORT = "abort"
    COMMIT = "commit"
    WROTE = "wrote"
    FINALIZE = "finalize"
    ROLLBACK = "rollback"
    RESYNC = "resync"
    REWROTE = "rewrote"
    ADOPT = "adopt"


TRANSITIONS: dict[tuple[Phase, Move], Phase] = {
    (Phase.CLEAN, Move.ADOPT): Phase.CLEAN,
    (Phase.CLEAN, Move.PREPARE): Phase.PREPARED,
    (Phase.PREPARED, Move.ABORT): Phase.CLEAN,
    (Phase.PREPARED, Move.COMMIT): Phase.WRITING,
    (Phase.WRITING, Move.COMMIT): Phase.WRITING,
    (Phase.WRITING, Move.WROTE): Phase.WRITTEN,
    (Phase.WRITING, Move.ROLLBACK): Phase.CLEAN,
    (Phase.WRITTEN, Move.FINALIZE): Phase.CLEAN,
    (Phase.WRITTEN, Move.ROLLBACK): Phase.CLEAN,
    (Phase.CLEAN, Move.RESYNC): Phase.REWRITING,
    (Phase.WRITING, Move.RESYNC): Phase.REWRITING,
    (Phase.WRITTEN, Move.RESYNC): Phase.REWRITING,
    (Phase.REWRITING, Move.RESYNC): Phase.REWRITING,
    (Phase.REWRITTEN, Move.RESYNC): Phase.REWRITING,
    (Phase.REWRITING, Move.REWROTE): Phase.REWRITTEN,
    (Phase.REWRITTEN, Move.FINALIZE): Phase.CLEAN,
}


def after(phase: Phase, move: Move) -> Phase:
    """The phase after `move`; StateConflict if the move is not allowed in `phase`."""
    try:
        return TRANSITIONS[phase, move]
    except KeyError:
        allowed = ", ".join(sorted(m for p, m in TRANSITIONS if p == phase))
        raise StateConflict(
            f"'{move}' does not fit weights that are {phase}.", remedy=f"Possible now: {allowed}."
        ) from None
