"""What the ranks of one trainer have agreed on for the newest step, and that they never agree on it twice.

One invariant: a rank makes one collective call for each step, whatever happens to it there. What came of the call is
kept, so a rank that comes to the same step again, alone or with all others, finds the answer here and waits for nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from clients.trainer.group import Agree
from engine.errors import StateConflict

log = logging.getLogger(__name__)

T = TypeVar("T")

ACCUMULATE: Final = -1
"""No number for this step; all ranks are well."""
FAILED: Final = -2
"""No number for this step, as a rank has an error of its own."""


class Ready(NamedTuple):
    """A rank that can sync a step: the version number that its daemon would give it, ACCUMULATE if none, and whether
    the daemon can be asked at all."""

    number: int
    up: bool = True


@dataclass(frozen=True)
class Turn:
    """The verdict on a step: the smallest number of all ranks."""

    step: int
    number: int

    @property
    def version(self) -> int | None:
        """The number the step's weights try to become; None: they accumulate."""
        return self.number if self.number >= 0 else None

    @property
    def failed(self) -> bool:
        """Whether a rank had an error, so that no version comes of this step."""
        return self.number == FAILED


class Turns:
    """The newest turn. `agree` gives the smallest of all ranks' numbers, on all of them."""

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._newest: Turn | None = None

    def known(self, step: int) -> Turn | None:
        """The verdict on `step`, None for a step still to be agreed on. StateConflict for one before the newest."""
        newest = self._newest
        if newest is None or step > newest.step:
            return None
        if step < newest.step:
            raise StateConflict(
                f"step {step} comes after step {newest.step} was synced.",
                remedy="Step numbers only go up; after going back to an earlier state close this source and register "
                "a new one.",
            )
        return newest

    def take(self, step: int, ready: Callable[[], Ready]) -> tuple[Turn, Ready]:
        """Agree on `step` with the other ranks. A collective call.

        An error of `ready` is raised behind the call, in which the others wait: they learn that a rank has failed.
        """
        try:
            mine = ready()
        except Exception as problem:
            try:
                self._newest = Turn(step, self._agree(FAILED))
            except Exception as error:  # a group that is gone: nobody waits any more
                raise problem from error
            raise
        self._newest = turn = Turn(step, self._agree(mine.number))
        if turn.failed:
            log.warning("step %d becomes no version, as another rank has failed in it; the next one carries it", step)
        return turn, mine

    def forget(self) -> None:
        """Another registration: steps are counted anew."""
        self._newest = None
