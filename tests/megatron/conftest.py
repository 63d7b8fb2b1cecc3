"""Importing Megatron-Core takes longer than training a few steps: what has imported it lives as long as the folder's
tests, and forks the ranks of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.follower import Follower
from tests.support.daemon_process import Daemon
from tests.support.megatron.launch import Host, Rig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.megatron)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("megatron"), ["tests.megatron.scenarios", "tests.megatron.steered"])
    yield made
    made.close()


@pytest.fixture
def rig(host: Host, tmp_path: Path) -> Iterator[Rig]:
    """`rig.run(world, job, "module:function", **args)` gives what the function returned in each rank."""
    made = Rig(tmp_path / "ranks", host)
    yield made
    made.close()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[str]]:
    """URLs of two node daemons; the first one has the store, and the receivers."""
    folder = tmp_path / "daemons"
    common = {"host": "127.0.0.1", "port": 0, "poll_interval_s": 0.02, "detect_threads": 1, "p2p": True}
    sparse = {"dense_fraction": 1.0}  # whatever can be, so that the proofs have something to prove
    made: list[Daemon] = []
    try:
        for number, roles in enumerate(("publisher,coordinator,store,subscriber", "publisher")):
            own = folder / str(number)
            own.mkdir(parents=True)
            first = made[0].url if made else ""
            store = {} if number == 0 else {"store": f"{first}/store", "p2p_coordinator": first}
            made.append(Daemon(own, roles=roles, data_dir=str(own / "data"), **common, **sparse, **store))
        yield [d.url for d in made]
    finally:
        for daemon in made:
            daemon.end()


@pytest.fixture
def follower(rig: Rig, daemons: list[str]) -> Iterator[Follower]:
    """A run, with whatever receives it."""
    made = Follower(rig, daemons, "megatron")
    yield made
    made.close()
