"""Processes that are slow to start and serve many tests, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import pytest


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)


class Kept(Generic[T]):
    """What `make` starts. A test that fails, or leaves it other than `well`, is the last one to use it."""

    def __init__(self, make: Callable[[], T], *, well: Callable[[T], bool] = lambda _: True) -> None:
        self._make = make
        self._well = well
        self._now: T | None = None

    @contextmanager
    def lend(self, request: pytest.FixtureRequest) -> Iterator[T]:
        """For one test: around the yield of its fixture."""
        if self._now is None:
            self._now = self._make()
        failed = request.session.testsfailed
        yield self._now
        if request.session.testsfailed != failed or not self._well(self._now):
            self.end()

    def end(self) -> None:
        if self._now is not None:
            self._now.close()
            self._now = None
