"""A rollout daemon in a process of its own, killed and started again around a receiver that lives on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.control import AsyncControlClient
from clients.protocol import ReceiverInfo
from tests.support.daemon_process import Daemon
from tests.support.proxy import Proxy
from tests.support.receiver_process import Process, tiny_metas, tiny_state
from tests.support.versions import Publisher, changed
from transports.store.local import LocalStore

pytestmark = [pytest.mark.anyio, pytest.mark.faults]

PATIENCE_S = 120.0


@pytest.fixture
def ends() -> Iterator[list[Any]]:
    things: list[Any] = []
    yield things
    for thing in things:
        thing.end()


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    store = LocalStore(tmp_path / "store")
    publisher = Publisher(store, tiny_metas())
    await publisher.publish(tiny_state(0))
    yield publisher
    await store.aclose()


async def next_version(publisher: Publisher) -> dict[str, Any]:
    assert publisher.head is not None
    state = publisher.states[publisher.head.version]
    new = changed(state, np.random.default_rng(publisher.next), 0.1)
    new["counter"] = state["counter"]
    await publisher.publish(new)
    return new


def start(folder: Path, ends: list[Any], port: int = 0) -> Daemon:
    daemon = Daemon(
        folder,
        data_dir=str(folder / "data"),
        store=str(folder / "store"),
        roles="subscriber",
        run="r",
        port=port,
        poll_interval_s=0.05,
    )
    ends.append(daemon)
    return daemon


async def in_sync(daemon: Daemon, version: int) -> list[ReceiverInfo]:
    async with AsyncControlClient(daemon.url, run="r") as control:
        return await control.wait_for_receivers(version, PATIENCE_S)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(a[n], b[n]) for n in b)


@pytest.mark.parametrize("operation", ["commit", "finalize"])
async def test_the_daemon_is_killed_in_the_middle_of_an_install(
    tmp_path: Path, ends: list[Any], publisher: Publisher, operation: str
) -> None:
    process = Process(tmp_path, "a")
    ends.append(process)
    async with Proxy(tmp_path / "p.sock", process.socket) as proxy:
        daemon = await asyncio.to_thread(start, tmp_path, ends)
        async with AsyncControlClient(daemon.url, run="r"):
            import httpx

            async with httpx.AsyncClient() as http:
                body = {"name": "a", "run": "r", "sockets": [str(proxy.listen)]}
                (await http.post(f"{daemon.url}/receivers", json=body)).raise_for_status()
        await in_sync(daemon, 0)
        proxy.hold = {operation}
        new = await next_version(publisher)
        await asyncio.wait_for(proxy.holding.wait(), PATIENCE_S)
        daemon.kill()
        proxy.hold = set()
        async with asyncio.timeout(PATIENCE_S):
            # Without any daemon: the receiver's own watchdog takes it back to version 0, and it serves on.
            while not (await asyncio.to_thread(process.ask, "status"))["ready"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await asyncio.to_thread(process.ask, "status"))["version"] == 0
        assert same(await asyncio.to_thread(process.weights), tiny_state(0))
        # Nobody registers again: the new daemon remembers the receiver.
        daemon = await asyncio.to_thread(start, tmp_path, ends)
        (info,) = await in_sync(daemon, 1)
        assert (info.proof, info.resyncs) == ("proven", 0)
        assert same(await asyncio.to_thread(process.weights), new)


async def test_a_receiver_registers_itself_and_again_at_another_daemon(
    tmp_path: Path, ends: list[Any], publisher: Publisher
) -> None:
    first = await asyncio.to_thread(start, tmp_path, ends)
    process = await asyncio.to_thread(lambda: Process(tmp_path, "a", daemon=first.url))
    ends.append(process)
    await in_sync(first, 0)
    port = int(first.url.rsplit(":", 1)[1])
    first.kill()
    (tmp_path / "data" / "receivers.json").unlink()  # a daemon that remembers nothing
    second = await asyncio.to_thread(start, tmp_path, ends, port)
    new = await next_version(publisher)
    await in_sync(second, 1)
    assert same(await asyncio.to_thread(process.weights), new)
