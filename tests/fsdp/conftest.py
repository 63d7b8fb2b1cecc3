"""The processes are started once for the folder. A test that fails in the middle of a job leaves them unusable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fsdp.rig import Rig
from tests.support.kept import Kept


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.fsdp)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="package")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept[Rig]]:
    found = Kept(lambda: Rig(tmp_path_factory.mktemp("fsdp")))
    yield found
    found.end()


@pytest.fixture
def rig(kept: Kept[Rig], request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The running processes; new ones after a test that did not come to its end."""
    with kept.lend(request) as found:
        yield found
