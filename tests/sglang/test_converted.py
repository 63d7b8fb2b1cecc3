"""Servers that keep the weights in another dtype than the trainer publishes: converted by their own loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.sglang.checkpoints import make
from tests.support.sglang.server import ROOT, Server
from tests.support.sglang.world import World

Worlds = Callable[..., World]
Start = Callable[..., Server]
# The faults of this checkout, also where the environment's copy is older.
VARIABLES = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support/sglang/cpu_platform'}"}


def begin(start: Start, model: Path, dtype: str, tp: int = 1, mode: str = "") -> Server:
    """`mode`: probe the loader although there is a table, or spread the experts over the ranks."""
    variables = VARIABLES | ({"DTE_SGLANG_PROBE": "1"} if "probe" in mode else {})
    extra = ("--dtype", dtype, *(("--ep-size", str(tp)) if "experts" in mode else ()))
    return start(model, tp=tp, extra=extra, **variables).wait_ready()


@pytest.mark.parametrize(
    ("family", "dtype", "tp", "mode"),
    [
        ("qwen3-tied", "float32", 1, "probe"),
        ("qwen3", "float16", 2, ""),
        ("qwen3-moe", "float16", 2, "probe experts"),
    ],
)
def test_versions_arrive_as_a_server_loads_them(
    tmp_path: Path, start: Start, worlds: Worlds, family: str, dtype: str, tp: int, mode: str
) -> None:
    base = make(family, tmp_path)
    follower = begin(start, base, dtype, tp, mode)
    loaded = follower.checksums()
    world = worlds(base)
    assert world.register(follower).status_code == 200
    # What was loaded cannot be recognised: it is converted anew, to the same bits.
    found = world.wait_version(0)
    assert (found["proof"], found["resyncs"], found["ranks"]) == ("converted", 1, tp)
    assert found["converted"] == len(world.publisher.metas)
    assert httpx.get(f"{world.daemon.url}/versions", timeout=60.0).json()["degraded"]["converted"] == 1
    assert follower.checksums() == loaded
    answers = "experts" not in mode  # see test_follow
    before = follower.generate() if answers else {}
    for _ in range(3):
        version = world.step().version
    found = world.wait_version(version)
    assert (found["resyncs"], found["proof"]) == (1, "converted")
    assert not answers or follower.generate()["output_ids"] != before["output_ids"]
    assert list((world.folder / "daemon" / "units" / "actor").iterdir()) == []
    world.expect_newest(follower, answers=answers)
    follower.end()


@pytest.fixture(scope="module")
def server(start: Start, qwen3: Path) -> Server:
    return begin(start, qwen3, "float16")


@pytest.fixture
def world(worlds: Worlds, server: Server, qwen3: Path) -> World:
    found = worlds(qwen3)
    assert found.register(server).status_code == 200
    found.wait_version(0)
    return found


@pytest.mark.parametrize("fault", ["load", "refuse-0"])
def test_a_unit_whose_loader_fails_is_undone_and_tried_again(world: World, server: Server, fault: str) -> None:
    (server.faults / fault).touch()
    version = world.step().version
    found = world.wait_version(version)
    assert not (server.faults / fault).exists()
    assert "asked to" in world.log()
    assert found["resyncs"] == 1, "nothing but the registration wrote everything"
    world.expect_newest(server)


def test_weights_written_by_others_are_noticed_and_converted_anew(world: World, server: Server, tmp_path: Path) -> None:
    version = world.step().version
    world.wait_version(version)
    sums = server.checksums()
    other = make("qwen3", tmp_path, seed=9)
    assert server.post("/update_weights_from_disk", model_path=str(other)).status_code == 200
    assert server.checksums() != sums
    found = world.wait(resyncs=2, installed=version, ready=True)
    assert found["proof"] == "converted"
    assert server.checksums() == sums
    assert server.weight_version == str(version)


def test_a_daemon_that_comes_back_converts_nothing_that_is_there(world: World, server: Server) -> None:
    world.wait_version(world.step().version)
    world.daemon.kill()
    version = world.step().version
    world.daemon = world.start_daemon()
    world.wait_version(version)
    world.expect_newest(server)
