"""The versions API: what is committed, one version with its timings, and the long poll."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from app import problems
from app.api import versions as versions_api
from app.committer import Committer
from clients.protocol import VersionInfo, Versions
from engine.records import keys
from tests.app.test_chain import V0, first, publish
from tests.app.test_coordinator import make_node
from tests.model.build import RUN

pytestmark = pytest.mark.anyio


@pytest.fixture
def node(tmp_path: Path):
    return make_node(tmp_path)


@pytest.fixture
async def http(node):
    app = FastAPI()
    problems.install(app)
    app.include_router(versions_api.router(node))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://daemon") as client:
        yield client


async def test_an_empty_run_has_no_versions(http):
    found = Versions.model_validate_json((await http.get("/versions")).content)
    assert (found.run, found.head, found.next, found.epoch, found.versions) == (RUN, None, 0, None, [])
    assert (await http.get("/versions/latest")).status_code == 204


async def test_versions_are_listed_with_totals_and_degraded_modes(http, node):
    c = Committer(node.chains.get(RUN))
    await first(c)
    await publish(c, 1, V0, ({"w": 5}, {"w": 2}))
    await c.abort(2, 1, "revoked")
    node.degraded.count("dense-fallback", 3)
    found = Versions.model_validate_json((await http.get("/versions")).content)
    assert (found.head, found.next, found.epoch) == (1, 3, 1)
    assert [(v.version, v.base, v.changed, v.dense_tiles, v.anchor) for v in found.versions] == [
        (0, None, 0, 2, False),
        (1, 0, 1, 0, False),
    ]
    assert found.degraded == {"dense-fallback": 3}
    assert len(Versions.model_validate_json((await http.get("/versions?limit=1")).content).versions) == 1


async def test_one_version_carries_its_parts_timings(http, node):
    c = Committer(node.chains.get(RUN))
    await first(c)
    records = [(await c.chain.part(ref)) for ref in c.chain.head.parts]
    for w, record in enumerate(records):
        new = record.model_copy(
            update={
                "version": 1,
                "base": 0,
                "timings_ms": {"detect": 10.0 + w, "upload": 5.0 - w},
                "detail": {"ambiguous": 2},
            }
        )
        await c.put_part(new)
    assert await c.try_commit(1)
    info = VersionInfo.model_validate_json((await http.get("/versions/1")).content)
    assert info.timings_ms == {"detect": 11.0, "upload": 5.0}
    assert info.detail == {"ambiguous": 4}
    assert info.decision_sha256 == c.chain.decision_sha256(1)


async def test_the_list_has_the_timings_of_its_versions_and_reads_each_part_once(http, node):
    c = Committer(node.chains.get(RUN))
    await first(c)
    for number in (1, 2):
        for ref in c.chain.head.parts:
            record = await c.chain.part(ref)
            new = {"version": number, "base": number - 1, "timings_ms": {"detect": 10.0 * number + ref.writer}}
            await c.put_part(record.model_copy(update=new))
        assert await c.try_commit(number)
    node.chains.get(RUN)._parts.clear()
    read: list[str] = []
    get = node.store.get

    async def counted(key: str, *, max_bytes: int) -> bytes:
        read.extend([key] if "/parts/" in key else [])
        return await get(key, max_bytes=max_bytes)

    node.store.get = counted
    for _ in range(2):
        found = Versions.model_validate_json((await http.get("/versions")).content)
        assert [v.timings_ms for v in found.versions] == [{}, {"detect": 11.0}, {"detect": 21.0}]
    assert len(read) == 6


async def test_a_list_reads_a_bounded_number_of_parts_the_newest_versions_first(http, node, monkeypatch):
    c = Committer(node.chains.get(RUN))
    await first(c)
    for ref in c.chain.head.parts:
        record = await c.chain.part(ref)
        await c.put_part(record.model_copy(update={"version": 1, "base": 0, "timings_ms": {"detect": 1.0}}))
    assert await c.try_commit(1)
    monkeypatch.setattr(versions_api, "PARTS_READ", 1)
    found = Versions.model_validate_json((await http.get("/versions")).content)
    assert [v.timings_ms for v in found.versions] == [{}, {}]
    monkeypatch.setattr(versions_api, "PARTS_READ", 2)
    found = Versions.model_validate_json((await http.get("/versions")).content)
    assert [v.timings_ms for v in found.versions] == [{}, {"detect": 1.0}]


async def test_a_damaged_part_costs_the_list_its_timings_only(http, node):
    c = Committer(node.chains.get(RUN))
    await first(c)
    await node.store.put(c.chain.head.parts[0].key, b"{")
    node.chains.get(RUN)._parts.clear()
    found = Versions.model_validate_json((await http.get("/versions")).content)
    assert [v.timings_ms for v in found.versions] == [{}]


async def test_numbers_that_are_no_versions_say_why(http, node):
    c = Committer(node.chains.get(RUN))
    await first(c)
    await c.abort(1, 1, "revoked")
    for number, why in ((1, "an abort (revoked)"), (2, "not decided; the next number is 2")):
        answer = await http.get(f"/versions/{number}")
        assert answer.status_code == 404
        assert why in answer.json()["detail"]
    assert (await http.get("/versions/x")).status_code == 422
    assert (await http.get("/versions/-1")).status_code == 422
    assert (await http.get("/versions?run=../x")).status_code == 422


async def test_the_long_poll_answers_as_soon_as_a_newer_version_is_committed(http, node):
    c = Committer(node.chains.get(RUN))
    await first(c)
    waiting = asyncio.create_task(http.get("/versions/latest", params={"after": 0, "wait": 60}))
    await c.abort(1, 1, "revoked")
    await publish(c, 2, V0, ({"w": 5}, {"w": 2}))
    assert (await waiting).json()["version"] == 2
    assert (await http.get("/versions/latest", params={"after": 2})).status_code == 204
    assert (await http.get("/versions/latest", params={"wait": 1000})).status_code == 422


async def test_the_long_poll_ends_when_the_daemon_does(http, node):
    await first(Committer(node.chains.get(RUN)))
    node.events.close()
    assert (await http.get("/versions/latest", params={"after": 0, "wait": 60})).status_code == 204


async def test_a_corrupt_decision_is_a_problem_document(http, node):
    await first(Committer(node.chains.get(RUN)))
    await node.store.put(keys.decision(RUN, 1), b"{")
    answer = await http.get("/versions")
    assert answer.status_code == 422
    assert "versions/1/decision.json" in answer.json()["detail"]
    assert answer.json()["remedy"]
