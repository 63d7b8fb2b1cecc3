"""One rig for all Megatron-Core tests of a run: importing Megatron-Core takes longer than training a few steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.megatron.launch import Rig


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """`rig.run(world, job, "module:function", **args)` gives what the function returned in each rank."""
    rig = Rig(tmp_path_factory.mktemp("megatron"))
    yield rig
    rig.close()
