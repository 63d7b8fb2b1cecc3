"""The subscriber role against real receiver processes and a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.main import build_node
from app.roles.subscriber import SubscriberRole
from app.settings import Settings
from clients.protocol import ReceiverInfo, ReceiverRegistration, ReceiverState
from engine.errors import InvalidInput, StateConflict
from engine.records import keys
from tests.support.proxy import Proxy
from tests.support.receiver_process import Process, tiny_metas, tiny_state
from tests.support.versions import Publisher, State, changed
from transports.store.local import LocalStore

pytestmark = pytest.mark.anyio

PATIENCE_S = 120.0


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def next_state(state: State, seed: int) -> State:
    new = changed(state, np.random.default_rng(seed), 0.1)
    new["counter"] = state["counter"].copy()
    new["counter"][1] ^= seed & 0xFF
    return new


class World:
    """A store with a publisher, and a subscriber role in this process."""

    def __init__(self, folder: Path, pool: list[Process]) -> None:
        self.folder = folder
        self.pool = pool
        self.store_dir = folder / "store"
        self.store = LocalStore(self.store_dir)
        self.publisher = Publisher(self.store, tiny_metas(), writers=2)
        self.state = tiny_state(0)
        self.pool_folder = folder
        self.processes: list[Process] = []
        self.role: SubscriberRole = None  # type: ignore[assignment]

    def settings(self, **changes: Any) -> Settings:
        values: dict[str, Any] = {
            "data_dir": self.folder / "data",
            "store": str(self.store_dir),
            "roles": "subscriber",
            "run": "r",
            "poll_interval_s": 0.05,
        }
        return Settings(**(values | changes))

    @asynccontextmanager
    async def daemon(self, **changes: Any) -> AsyncIterator[SubscriberRole]:
        self.role = SubscriberRole(build_node(self.settings(**changes)))
        await self.role.start()
        try:
            yield self.role
        finally:
            await self.role.stop()
            self.role.node.events.close()

    def receiver(self, name: str = "a", seed: int = 0) -> Process:
        """A process shared by the tests of this file, at the weights of `seed`."""
        process = next((p for p in self.pool if p.name == name), None)
        if process is None:
            process = Process(self.pool_folder, name)
            self.pool.append(process)
        process.ask("reset", seed=seed)
        return process

    def mortal(self, name: str = "a", **config: Any) -> Process:
        """A process of this test's own."""
        process = Process(self.folder, name, **config)
        self.processes.append(process)
        return process

    async def register(self, process: Process, socket: Path | None = None) -> None:
        await self.role.register(
            ReceiverRegistration(name=process.name, run="r", sockets=[str(socket or process.socket)])
        )

    async def step(self, **options: Any) -> State:
        """Commit the next version, or the first one."""
        if self.publisher.head is not None:
            self.state = next_state(self.state, self.publisher.next + 1)
        await self.publisher.publish(self.state, **options)
        return self.state

    async def until(self, what: Callable[[ReceiverInfo], bool], name: str = "a") -> ReceiverInfo:
        """Wait, event by event, until the receiver's info satisfies `what`."""
        events = self.role.node.events
        cursor = events.last_id
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not what(self.role.get(name)):
                    found = await events.after(cursor, 1.0)
                    cursor = found[-1].id if found else cursor
        except TimeoutError:
            raise AssertionError(f"never came about: {self.role.get(name)}") from None
        return self.role.get(name)

    async def in_sync(self, name: str = "a") -> ReceiverInfo:
        head = self.publisher.head
        assert head is not None
        return await self.until(
            lambda i: i.state is ReceiverState.IN_SYNC and i.installed == head.version and i.ready, name
        )


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.end()


@pytest.fixture
def world(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, pool: list[Process]) -> Iterator[World]:
    world = World(tmp_path, pool)
    world.pool_folder = pool[0].folder if pool else tmp_path_factory.mktemp("pool")
    yield world
    for process in world.processes:
        process.end()


async def test_follows_the_chain_over_aborts_epochs_and_rewinds(world: World) -> None:
    process = world.receiver()
    async with world.daemon() as role:
        await world.register(process)
        assert role.unready() is not None
        await world.step()
        info = await world.in_sync()
        assert (info.proof, info.resyncs, info.lag) == ("proven", 0, 0)
        assert role.unready() is None
        assert not list((world.folder / "data" / "cache" / "chunks").iterdir()), "recognised without any download"
        await world.step()
        await world.in_sync()
        await world.publisher.abort()
        await world.publisher.start_epoch()
        await world.step(dense=["embed.weight", "counter", "router_bias"])
        info = await world.in_sync()
        assert (info.installed, info.installed_step, info.resyncs) == (4, 4, 0)
        assert same(process.weights(), world.state)
        assert process.ask("status")["version"] == 4
        kinds = [e.kind for e in await role.node.events.after(role.node.events.last_id - 40, 0)]
        assert "receiver-installed" in kinds
        assert "receiver-state" in kinds
        await role.remove("a")
        assert role.list() == []


async def test_two_receivers_late_start_and_catch_up(world: World) -> None:
    first, second = world.receiver("a"), world.receiver("b")
    await world.step()
    async with world.daemon():
        await world.register(first)
        await world.in_sync("a")
        for _ in range(3):
            await world.step()
        await world.in_sync("a")
        await world.register(second)
        info = await world.in_sync("b")
        assert info.resyncs == 0, "it was recognised as version 0 and walked the chain"
        assert same(first.weights(), world.state)
        assert same(second.weights(), world.state)


async def test_unknown_weights_are_resynced_from_the_newest_anchor(world: World) -> None:
    for _ in range(4):
        await world.step()
    await world.publisher.anchor(2)
    process = world.receiver(seed=123)
    async with world.daemon():
        await world.register(process)
        info = await world.in_sync()
        assert info.resyncs == 1
        assert same(process.weights(), world.state)
    # The chunks of versions 0 to 2 were not needed.
    names = {p.name for p in (world.folder / "data" / "cache" / "chunks").iterdir()}
    part = [await world.role.node.chains.get("r").parts(v, 1) for v in (0, 1, 2)]
    assert not names & {f"{c.sha256}.dtc" for parts in part for p in parts.values() for c in p.chunks}


async def test_weights_touched_by_somebody_else_are_proven_again(world: World) -> None:
    process = world.receiver()
    await world.step()
    async with world.daemon():
        await world.register(process)
        await world.in_sync()
        await world.step()
        await world.in_sync()
        process.ask("poke")
        await world.until(lambda i: i.resyncs == 1 and i.state is ReceiverState.IN_SYNC)
        assert same(process.weights(), world.state)


async def damage(world: World, version: int, what: str) -> None:
    for path in sorted((world.store_dir / keys.version_prefix("r", version) / "chunks").iterdir()):
        if what == "missing":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(bytes(data) if what == "flipped" else bytes(data[:-1]))


@pytest.mark.parametrize("what", ["missing", "flipped", "truncated"])
async def test_a_damaged_delta_is_gone_round_by_an_anchor(world: World, what: str) -> None:
    process = world.receiver()
    await world.step()
    async with world.daemon() as role:
        await world.register(process)
        await world.in_sync()
        await role.remove("a")
        base = process.weights()
        await world.step()
        await damage(world, 1, what)
        await world.register(process)
        info = await world.until(lambda i: i.installed == 0 and not i.ready and bool(i.last_error))
        assert info.state is ReceiverState.BEHIND
        assert "nothing intact" in info.last_error
        assert same(process.weights(), base), "nothing may be written"
        assert role.unready() is not None
        await world.publisher.anchor(1)
        await world.register(process)
        info = await world.in_sync()
        assert info.resyncs == 1
        assert same(process.weights(), world.state)


async def test_a_version_whose_chunks_lie_is_not_installed(world: World) -> None:
    process = world.receiver()
    await world.step()
    async with world.daemon():
        await world.register(process)
        await world.in_sync()
        honest = world.publisher.digests
        world.publisher.digests = lambda state: honest(next_state(state, 99))  # type: ignore[method-assign]
        await world.publisher.publish(next_state(world.state, 5))
        info = await world.until(lambda i: bool(i.last_error))
        assert (info.ready, info.state, info.installed, info.resyncs) == (False, ReceiverState.BEHIND, 0, 0)
        assert same(process.weights(), world.state), "it stays at its last proven version, untouched"
        assert process.ask("status")["version"] == 0


async def test_a_model_that_does_not_fit_is_refused_with_a_reason(world: World) -> None:
    world.publisher.metas = world.publisher.metas[:-1]
    await world.step()
    process = world.receiver()
    async with world.daemon():
        await world.register(process)
        info = await world.until(lambda i: i.state is ReceiverState.FAILED)
        assert "counter" in info.last_error
        assert same(process.weights(), tiny_state(0))


@pytest.mark.faults
@pytest.mark.parametrize("operation", ["commit", "finalize"])
async def test_the_receiver_dies_in_the_middle_and_comes_back(world: World, operation: str) -> None:
    await world.step()
    process = world.mortal()
    async with world.daemon(), Proxy(world.folder / "p.sock", process.socket) as proxy:
        await world.register(process, proxy.listen)
        await world.in_sync()
        proxy.hold = {operation}
        await world.step()
        await asyncio.wait_for(proxy.holding.wait(), PATIENCE_S)
        process.kill()
        await world.until(lambda i: i.state is ReceiverState.LOST and i.installed is None and not i.ready)
        proxy.hold = set()
        proxy.release.set()
        again = world.mortal()
        await world.register(again, proxy.listen)
        await world.in_sync()
        assert same(again.weights(), world.state)


async def test_registration_is_checked(world: World) -> None:
    await world.step()
    process = world.receiver()
    async with world.daemon() as role:
        for bad in (
            {"kind": "sglang", "sockets": ["/x"]},
            {"sockets": []},
            {"sockets": ["relative"]},
        ):
            with pytest.raises(InvalidInput):
                await role.register(ReceiverRegistration.model_validate({"name": "x", "run": "r"} | bad))
        await world.register(process)
        await world.in_sync()
        with pytest.raises(StateConflict):
            await world.register(process, world.folder / "other.sock")
        assert (await role.register(ReceiverRegistration(name="a", run="r", sockets=[str(process.socket)]))).ready
        with pytest.raises(KeyError):
            await role.remove("nobody")


async def test_a_daemon_whose_receiver_another_one_took_over_says_so(world: World) -> None:
    await world.step()
    process = world.receiver()
    async with world.daemon(data_dir=world.folder / "first") as first:
        await world.register(process)
        await world.in_sync()
        async with world.daemon(data_dir=world.folder / "second"):
            await world.register(process)
            await world.in_sync()
            world.role = first
            info = await world.until(lambda i: i.state is ReceiverState.FAILED)
            assert not info.ready
            assert "owner" in info.last_error


async def test_decisions_signed_with_another_key_are_not_followed(world: World) -> None:
    world.publisher.key = b"right-key-right-key"
    await world.step()
    process = world.receiver()
    async with world.daemon(signing_key="wrong-key-wrong-key"):
        await world.register(process)
        info = await world.until(lambda i: i.state is ReceiverState.FAILED)
        assert "signature" in info.last_error
    async with world.daemon(signing_key="right-key-right-key"):
        await world.in_sync()


async def test_chunks_are_downloaded_before_the_decision(world: World) -> None:
    process = world.receiver()
    await world.step()
    async with world.daemon():
        await world.register(process)
        await world.in_sync()
        decide = world.publisher._decide
        chunks = world.folder / "data" / "cache" / "chunks"
        undecided: list[Any] = []

        async def later(decision: Any) -> None:
            undecided.append(decision)

        world.publisher._decide = later  # type: ignore[method-assign]
        await world.step()
        async with asyncio.timeout(PATIENCE_S):
            while len(list(chunks.glob("*.dtc"))) < 2:  # noqa: ASYNC110 - another task's files
                await asyncio.sleep(0.02)
        await decide(undecided[0])
        await world.in_sync()
        assert same(process.weights(), world.state)


async def test_receivers_of_the_settings_are_driven_as_long_as_they_stand_there(world: World) -> None:
    await world.step()
    process = world.receiver()
    said = ReceiverRegistration(name=process.name, run="r", sockets=[str(process.socket)])
    other = ReceiverRegistration(name="b", run="r", sockets=[str(world.folder / "not-yet.sock")])
    async with world.daemon(receivers=[said]) as role:
        await world.in_sync()
        await role.register(other)
    async with world.daemon(receivers=[said]) as role:
        assert [i.name for i in role.list()] == ["a", "b"]
        await world.in_sync()
    # Only what was registered by a call is remembered.
    async with world.daemon() as role:
        assert [i.name for i in role.list()] == ["b"]
    # The settings know better than the memory.
    moved = other.model_copy(update={"sockets": [str(process.socket)]})
    async with world.daemon(receivers=[moved]) as role:
        assert role._receivers["b"].registration == moved


async def test_a_receiver_of_the_settings_that_cannot_be_one_is_said_before_anything_starts(world: World) -> None:
    with pytest.raises(InvalidInput, match="needs the `url`"):
        async with world.daemon(receivers=[ReceiverRegistration(name="s", kind="sglang", run="r")]):
            pass
