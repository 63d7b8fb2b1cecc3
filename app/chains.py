"""The chains of all runs this daemon has to do with: one `Chain` object per run, made on demand and shared by roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from engine.errors import InvalidInput, StateConflict
from engine.records.models import RunId

if TYPE_CHECKING:
    from app.chain import Chain
    from transports.store.base import ChunkStore

MAX_RUNS = 1024
_RUN: TypeAdapter[str] = TypeAdapter(RunId)


class Chains:
    """Runs by name. Used on the event loop only."""

    def __init__(self, make: Callable[[str], Chain], default: str | None = None) -> None:
        self._make = make
        self._default = default
        self._chains: dict[str, Chain] = {}

    def get(self, run: str) -> Chain:
        """The run's chain. InvalidInput if `run` is no run name, StateConflict above MAX_RUNS runs."""
        chain = self._chains.get(run)
        if chain is None:
            try:
                _RUN.validate_python(run, strict=True)
            except ValidationError:
                raise InvalidInput(
                    f"not a valid run name: {run[:80]!r}.",
                    remedy="Use up to 128 letters, digits, '.', '_' and '-', starting with a letter or digit.",
                ) from None
            if len(self._chains) >= MAX_RUNS:
                raise StateConflict(
                    f"this daemon already follows {MAX_RUNS} runs.", remedy="Restart it, or use another daemon."
                )
            chain = self._chains[run] = self._make(run)
        return chain

    def runs(self) -> list[str]:
        """Names of the runs in use, sorted."""
        return sorted(self._chains)

    def default_run(self) -> str | None:
        """The configured run, else the only one in use, else None."""
        if self._default is not None:
            return self._default
        return next(iter(self._chains)) if len(self._chains) == 1 else None

    def resolve(self, run: str | None) -> str:
        """`run`, or the default when None. InvalidInput when there is none or the choice is open."""
        chosen = run if run is not None else self.default_run()
        if chosen is None:
            known = ", ".join(self.runs()[:10])
            raise InvalidInput(
                "the request names no run and this daemon has no default.",
                remedy="Pass `run`, or set DTE_RUN." + (f" Runs in use: {known}." if known else ""),
            )
        return chosen


async def only_run(store: ChunkStore) -> str:
    """The run of a store that holds one; InvalidInput if it holds none or several."""
    runs: set[str] = set()
    async for key in store.list("runs/"):
        runs.add(key.split("/")[1])
    if len(runs) == 1:
        return runs.pop()
    found = f"several runs: {', '.join(sorted(runs)[:10])}" if runs else "no run"
    raise InvalidInput(f"the store holds {found}.", remedy="Name one with --run." if runs else "Check the address.")
