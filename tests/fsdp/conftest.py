"""The processes are started once for the folder. A test that fails in the middle of a job leaves them unusable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fsdp.rig import Rig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.fsdp)
            item.add_marker(pytest.mark.timeout(600))


class Shared:
    """The rig in use."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.rig: Rig | None = None

    def get(self) -> Rig:
        if self.rig is None:
            self.rig = Rig(self._factory.mktemp("fsdp"))
        return self.rig

    def end(self) -> None:
        if self.rig is not None:
            self.rig.close()
            self.rig = None


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    found = Shared(tmp_path_factory)
    yield found
    found.end()


@pytest.fixture
def rig(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The running processes; new ones after a test that did not come to its end."""
    found = shared.get()
    failed = request.session.testsfailed
    yield found
    if request.session.testsfailed != failed:
        shared.end()
