"""What goes wrong between a daemon and a server of one rank: only versions are served, and it recovers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from app.subscriber.sglang import SglangEngine
from app.subscriber.targets import Targets
from app.subscriber.units import UnitFiles
from clients.protocol import ReceiverRegistration
from clients.rollout.protocol import ReceiverError, TargetBody
from engine.apply import Target
from tests.support.sglang.checkpoints import make, read, trained
from tests.support.sglang.server import Server
from tests.support.sglang.world import World
from tests.support.versions import local_target

Worlds = Callable[..., World]


@pytest.fixture
def world(worlds: Worlds, server: Server, qwen3: Path) -> World:
    """A run that the server follows, at version 0."""
    found = worlds(qwen3)
    assert found.register(server).status_code == 200
    found.wait_version(0)
    return found


def test_a_server_with_other_weights_is_brought_up_from_version_0(
    worlds: Worlds, server: Server, tmp_path: Path
) -> None:
    world = worlds(make("qwen3", tmp_path, seed=7))
    world.step()
    assert world.register(server).status_code == 200
    found = world.wait_version(1)
    assert found["resyncs"] == 1
    world.expect_newest(server)


def test_without_a_starting_point_the_server_stays_unready_and_keeps_its_weights(
    worlds: Worlds, server: Server, tmp_path: Path
) -> None:
    sums = server.checksums()
    world = worlds(make("qwen3", tmp_path, seed=8), without_chunks=True)
    assert world.register(server).status_code == 200
    found = world.wait(state="failed")
    assert "nothing intact leads to version 0" in found["last_error"]
    assert (found["ready"], found["installed"]) == (False, None)
    assert server.checksums() == sums
    assert server.generate()["output_ids"]


def test_a_corrupt_chunk_leaves_the_server_where_it_is_until_it_is_whole_again(world: World, server: Server) -> None:
    before = server.checksums()
    world.daemon.kill()
    known = set((world.folder / "store").rglob("*.dtc"))
    version = world.step().version
    (chunk,) = set((world.folder / "store").rglob("*.dtc")) - known
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    # Without version 0's chunks there is no other way to the version.
    others = {path: path.read_bytes() for path in known}
    for path in known:
        path.unlink()
    world.daemon = world.start_daemon()
    found = world.wait(installed=0, ready=False)
    assert found["last_error"]
    assert server.checksums() == before
    assert server.generate()["meta_info"]["weight_version"] == "0"
    chunk.write_bytes(whole)
    for path, data in others.items():
        path.write_bytes(data)
    world.wait_version(version)
    world.expect_newest(server)


@pytest.mark.parametrize("fault", ["refuse-0", "tear"])
def test_a_failed_commit_is_undone_in_the_same_call_and_tried_again(world: World, server: Server, fault: str) -> None:
    (server.faults / fault).touch()
    version = world.step().version
    found = world.wait_version(version)
    assert found["resyncs"] == 0
    assert not (server.faults / fault).exists()
    assert "asked to" in world.log()
    world.expect_newest(server)


def test_weights_written_by_others_are_noticed_and_replaced(world: World, server: Server, tmp_path: Path) -> None:
    version = world.step().version
    world.wait_version(version)
    sums = server.checksums()
    other = make("qwen3", tmp_path, seed=9)
    assert server.post("/update_weights_from_disk", model_path=str(other)).status_code == 200
    assert server.checksums() != sums
    found = world.wait(resyncs=1, installed=version, ready=True)
    assert found["proof"] == "proven"
    assert server.checksums() == sums
    assert server.weight_version == str(version)


def test_a_server_that_dies_in_a_commit_is_proven_again_after_its_restart(world: World, server: Server) -> None:
    before = world.receiver()["resyncs"]  # what other tests left in the server may have been replaced
    (server.faults / "die-0").touch()
    version = world.step().version
    found = world.wait(state="lost")
    assert (found["ready"], found["installed"]) == (False, None)
    server.restart()
    server.wait_ready()
    found = world.wait_version(version)
    assert found["resyncs"] == before
    world.expect_newest(server)


class Driver:
    """The daemon's side of the engine, without the daemon: one step at a time."""

    def __init__(self, server: Server, folder: Path, pause: str = "retract") -> None:
        self.metas, self.state = read(server.model)
        self.folder = folder
        self.fence = time.time_ns() // 1_000_000
        self.registration = ReceiverRegistration(
            name="driver", kind="sglang", run="driven", url=server.url, options={"pause": pause}
        )

    async def reach(self) -> SglangEngine:
        self.fence = max(self.fence + 1, time.time_ns() // 1_000_000)
        nothing = UnitFiles(cast(Targets, None), self.folder, max_bytes=0)  # this server converts no tensors
        engine = await SglangEngine.reach(self.registration, owner="driver", fence=self.fence, files=nothing)
        assert isinstance(engine, SglangEngine)
        return engine

    def target(self, version: int, base: bool, seed: int = 0) -> TargetBody:
        new = trained(self.state, np.random.default_rng(seed)) if base else self.state
        target = local_target(
            self.folder,
            self.metas,
            new,
            self.state if base else None,
            version=version,
            run="driven",
            dense=() if base else new,
        )
        return _body(target)


def _body(target: Target) -> TargetBody:
    return TargetBody(
        run=target.run,
        version=target.version,
        step=target.step,
        base=target.base,
        tensors=list(target.tensors),
        base_digests=target.base_digests,
        chunks=[
            {"path": str(c.path), "sha256": c.sha256, "size_bytes": c.size_bytes, "raw_bytes": c.raw_bytes,
             "entries": c.entries}
            for c in target.chunks
        ],
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture
def driver(server: Server, tmp_path: Path) -> Driver:
    return Driver(server, tmp_path)


async def at_version_0(driver: Driver) -> SglangEngine:
    engine = await driver.reach()
    await engine.resync([driver.target(0, base=False)])
    return engine


def test_an_update_by_others_makes_a_prepared_version_stale(server: Server, driver: Driver) -> None:
    async def main() -> None:
        engine = await at_version_0(driver)
        target = driver.target(1, base=True)
        assert not (await engine._links[0].prepare(target)).already
        sums = server.checksums()
        # The same weights again: no bit differs, and still nobody can know that from outside.
        reload = await asyncio.to_thread(server.post, "/update_weights_from_disk", model_path=str(server.model))
        assert reload.status_code == 200
        with pytest.raises(ReceiverError) as refused:
            await engine._write(1, engine._links)
        assert refused.value.code == "live-changed"
        assert server.checksums() == sums
        assert (await engine.refresh())[0].version is None
        await engine.aclose()

    asyncio.run(main())
    assert server.generate()["output_ids"]


def test_a_wrong_base_is_refused_before_anything_is_paused(server: Server, driver: Driver) -> None:
    async def main() -> None:
        engine = await at_version_0(driver)
        target = driver.target(2, base=True)
        wrong = dict(target.base_digests or {})
        name = next(iter(wrong))
        wrong[name] = "0" * 16
        with pytest.raises(ReceiverError) as refused:
            await engine.install(target.model_copy(update={"base_digests": wrong}))
        assert refused.value.code == "wrong-base"
        await engine.aclose()

    asyncio.run(main())


def test_only_the_owner_may_commit(server: Server, driver: Driver) -> None:
    async def main() -> None:
        first = await at_version_0(driver)
        await first._links[0].prepare(driver.target(1, base=True))
        second = await driver.reach()
        with pytest.raises(ReceiverError):
            await first._call("commit", 1)
        assert (await second.refresh())[0].version == 0
        await first.aclose()
        await second.aclose()

    asyncio.run(main())


def test_an_engine_whose_daemon_died_while_it_was_paused_goes_on_by_itself(server: Server, driver: Driver) -> None:
    async def main() -> None:
        engine = await at_version_0(driver)
        paused = engine._paused("retract")
        await paused.__aenter__()
        await engine.aclose()  # and never comes back

    asyncio.run(main())
    assert server.generate()["output_ids"]


def _in_flight(server: Server, tokens: int) -> tuple[threading.Thread, list[Any]]:
    """A request that is being answered, and where its answer will be."""
    found: list[Any] = []
    started = len(server.log.read_text(errors="replace"))

    def ask() -> None:
        found.append(server.generate("once upon a time", tokens))

    thread = threading.Thread(target=ask)
    thread.start()
    while "Prefill batch" not in server.log.read_text(errors="replace")[started:]:
        assert thread.is_alive()
        time.sleep(0.01)
    return thread, found


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_requests_in_flight_end_and_their_tokens_tell_the_version(
    worlds: Worlds, server: Server, qwen3: Path, pause: str
) -> None:
    world = worlds(qwen3)
    assert world.register(server, options={"pause": pause}).status_code == 200
    world.wait_version(0)
    thread, found = _in_flight(server, 400)
    version = world.step().version
    world.wait_version(version)
    assert thread.is_alive() or pause == "abort", "the request ended before the version came; make it longer"
    if pause == "in_place":
        # It keeps its cache of the old weights, which nobody else may share.
        told = server.generate("once upon a time", 4)["meta_info"]
        assert (told["weight_version"], told["cached_tokens"]) == (str(version), 0)
    thread.join()
    meta = found[0]["meta_info"]
    if pause == "abort":
        assert meta["finish_reason"]["type"] == "abort"
    else:
        assert meta["completion_tokens"] == 400
        assert [span["version"] for span in meta["weight_versions"]] == ["0", str(version)]
    world.expect_newest(server)


@pytest.fixture(autouse=True)
def _no_faults_left(server: Server) -> Iterator[None]:
    yield
    for path in server.faults.iterdir():
        path.unlink()
