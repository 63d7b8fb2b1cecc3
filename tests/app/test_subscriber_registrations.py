"""Registrations at one daemon: each receiver is driven once, with a fence of its own. No receiver is there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.main import build_node
from app.roles.subscriber import SubscriberRole
from app.settings import Settings
from clients.protocol import ReceiverRegistration, ReceiverState
from engine.errors import StateConflict
from tests.support.sglang_stand_in import Rank

pytestmark = pytest.mark.anyio


def torch_at(name: str, *sockets: Path | str) -> ReceiverRegistration:
    return ReceiverRegistration(name=name, run="r", sockets=[str(s) for s in sockets])


def sglang_at(name: str, url: str) -> ReceiverRegistration:
    return ReceiverRegistration(name=name, kind="sglang", run="r", url=url)


@asynccontextmanager
async def daemon(folder: Path, *configured: ReceiverRegistration) -> AsyncIterator[SubscriberRole]:
    values: dict[str, Any] = {"data_dir": folder / "d", "store": str(folder / "s"), "roles": "subscriber", "run": "r"}
    role = SubscriberRole(build_node(Settings(**values, receivers=configured)))
    await role.start()
    try:
        yield role
    finally:
        await role.stop()
        role.node.events.close()


async def until(role: SubscriberRole, what: Callable[[], bool]) -> None:
    cursor = role.node.events.last_id
    while not what():
        found = await role.node.events.after(cursor, 0.2)
        cursor = found[-1].id if found else cursor


def written_fence(folder: Path) -> int:
    return int(json.loads((folder / "d" / "receivers.json").read_text())["fence"])


async def test_every_receiver_has_a_fence_of_its_own_also_after_a_restart(tmp_path: Path) -> None:
    async with daemon(tmp_path) as role:
        for name in "abc":
            await role.register(torch_at(name, tmp_path / f"{name}.sock"))
        first = [r._fence for r in role._receivers.values()]
    async with daemon(tmp_path, torch_at("d", tmp_path / "d.sock")) as role:
        again = [r._fence for r in role._receivers.values()]
        assert len(role.list()) == 4
        assert written_fence(tmp_path) >= max(again), "the next daemon's are higher still"
    assert len({*first, *again}) == 7
    assert max(first) < min(again)


async def test_what_lives_under_another_name_is_refused(tmp_path: Path) -> None:
    async with Rank(tmp_path / "x.sock") as rank, daemon(tmp_path) as role:
        await role.register(torch_at("a", rank.path))
        await until(role, lambda: role._receivers["a"].connected)
        for sockets in ([rank.path], [f"{tmp_path}/./x.sock"], [tmp_path / "y.sock", rank.path]):
            with pytest.raises(StateConflict, match="'a'"):
                await role.register(torch_at("b", *sockets))
        assert [i.name for i in role.list()] == ["a"]


@pytest.mark.parametrize("again", ["http://127.0.0.1:9/", "http://localhost:9", "http://LOCALHOST:9"])
async def test_what_stands_in_the_settings_is_refused_under_another_name(tmp_path: Path, again: str) -> None:
    async with daemon(tmp_path, sglang_at("a", "http://127.0.0.1:9")) as role:
        await until(role, lambda: role.get("a").state is ReceiverState.LOST)
        with pytest.raises(StateConflict, match="'a'"):
            await role.register(sglang_at("b", again))
        await role.register(sglang_at("b", "http://127.0.0.1:10"))


async def test_one_that_is_lost_may_come_back_under_another_name(tmp_path: Path) -> None:
    async with daemon(tmp_path) as role:
        await role.register(torch_at("a", tmp_path / "x.sock"))
        await until(role, lambda: role.get("a").state is ReceiverState.LOST)
        await role.register(torch_at("b", tmp_path / "x.sock"))
        assert [i.name for i in role.list()] == ["b"]
    async with daemon(tmp_path) as role:
        assert [i.name for i in role.list()] == ["b"]


async def test_settings_that_name_one_receiver_twice_are_refused_at_the_start(tmp_path: Path) -> None:
    twice = (sglang_at("a", "http://x"), sglang_at("b", "http://X:80/"))
    with pytest.raises(StateConflict, match="'a' and 'b'"):
        async with daemon(tmp_path, *twice):
            pass


async def test_the_settings_know_better_than_the_memory(tmp_path: Path) -> None:
    async with daemon(tmp_path) as role:
        await role.register(torch_at("a", tmp_path / "x.sock"))
    path = tmp_path / "d" / "receivers.json"
    known = json.loads(path.read_text())
    known["receivers"].append(sglang_at("odd", "http://h:999999").model_dump(mode="json"))
    path.write_text(json.dumps(known))
    async with daemon(tmp_path, torch_at("b", tmp_path / "x.sock")) as role:
        assert [i.name for i in role.list()] == ["b"], "and what makes no sense keeps no daemon from starting"
