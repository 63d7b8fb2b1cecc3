"""One cluster serves many faults, one after the other; one that a test left broken is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.support.kept import Kept


@pytest.fixture(scope="package")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept[Cluster]]:
    def start() -> Cluster:
        made = Cluster(tmp_path_factory.mktemp("cluster"))
        try:
            made.start_all()
            made.settle()
        except BaseException:
            made.close()
            raise
        return made

    found = Kept(start, well=lambda cluster: cluster.healthy)
    yield found
    found.end()


@pytest.fixture
def cluster(kept: Kept[Cluster], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A running cluster with an open epoch. It counts as broken until the test has checked it."""
    with kept.lend(request) as found:
        found.healthy = False
        yield found
        found.clear_holds()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of its own, nothing started yet."""
    found = Cluster(tmp_path)
    yield found
    found.close()
