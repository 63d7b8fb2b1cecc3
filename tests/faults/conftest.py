"""One cluster serves many faults, one after the other; one that a test left broken is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster


class Shared:
    """The cluster in use."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.cluster: Cluster | None = None

    def get(self) -> Cluster:
        if self.cluster is not None and not self.cluster.healthy:
            self.end()
        if self.cluster is None:
            self.cluster = Cluster(self._factory.mktemp("cluster"))
            self.cluster.healthy = False
            self.cluster.start_all()
            self.cluster.settle()
        return self.cluster

    def end(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
            self.cluster = None


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    found = Shared(tmp_path_factory)
    yield found
    found.end()


@pytest.fixture
def cluster(shared: Shared) -> Iterator[Cluster]:
    """A running cluster with an open epoch. It counts as broken until the test has checked it."""
    found = shared.get()
    found.healthy = False
    yield found
    found.clear_holds()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of its own, nothing started yet."""
    found = Cluster(tmp_path)
    yield found
    found.close()
