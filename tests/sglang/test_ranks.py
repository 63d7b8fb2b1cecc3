"""A server of two ranks: they are at one version, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sglang.checkpoints import write
from tests.support.sglang.server import Server
from tests.support.sglang.world import World

Worlds = Callable[..., World]


@pytest.fixture(scope="module")
def pair(start: Callable[..., Server], qwen3: Path) -> Server:
    return start(qwen3, tp=2, extra=("--served-model-name", "policy")).wait_ready()


@pytest.fixture
def world(worlds: Worlds, pair: Server, qwen3: Path) -> World:
    found = worlds(qwen3)
    assert found.register(pair).status_code == 200
    found.wait_version(0)
    return found


def test_the_server_keeps_the_name_it_serves_under(world: World, pair: Server) -> None:
    """The first test of the module: the engine's own loading from disk, which others use, replaces the name."""
    world.wait_version(world.step().version)
    assert [m["id"] for m in pair.get("/v1/models")["data"]] == ["policy"]
    world.expect_newest(pair)


@pytest.mark.parametrize("fault", ["refuse-0", "refuse-1", "tear"])
def test_one_rank_that_fails_takes_the_others_back_with_it(world: World, pair: Server, fault: str) -> None:
    (pair.faults / fault).touch()
    version = world.step().version
    found = world.wait_version(version)
    assert found["resyncs"] == 0
    assert not (pair.faults / fault).exists()
    assert "asked to" in world.log()
    assert pair.generate()["meta_info"]["weight_version"] == str(version)
    world.expect_newest(pair)


def test_a_rank_that_cannot_be_brought_back_keeps_the_engine_paused_until_it_is_overwritten(
    world: World, pair: Server
) -> None:
    (pair.faults / "tear").touch()
    (pair.faults / "no-undo").touch()
    version = world.step().version
    world.wait(resyncs=1, installed=version, ready=True)
    said = world.log(200)
    assert "asked not to undo" in said
    assert "it stays paused until they are resynced" in said
    assert not list(pair.faults.iterdir())
    world.expect_newest(pair)


def test_the_newer_of_two_daemons_has_the_server(world: World, worlds: Worlds, pair: Server, qwen3: Path) -> None:
    other = worlds(qwen3)
    assert other.register(pair).status_code == 200
    other.wait_version(0)
    world.wait(ready=False)
    version = other.step().version
    other.wait_version(version)
    other.expect_newest(pair)


def test_another_server_started_from_a_later_version_is_the_same_and_goes_on_from_it(
    start: Callable[..., Server], worlds: Worlds, pair: Server, qwen3: Path, tmp_path: Path
) -> None:
    """The last test of the module: it ends the server."""
    world = worlds(qwen3)
    answer = world.follow(pair)
    sums = pair.checksums()
    pair.end()
    fresh = start(write(qwen3, world.state, tmp_path / "trained"), tp=2).wait_ready()
    assert fresh.checksums() == sums
    assert fresh.generate()["output_ids"] == answer["output_ids"]
    world.step()
    version = world.step().version
    assert world.register(fresh, "fresh").status_code == 200
    found = world.wait_version(version, "fresh")
    assert found["resyncs"] == 0
    assert world.receiver()["state"] == "lost"
    world.expect_newest(fresh)
    fresh.end()
