"""The subscriber's parts on their own: cache, jigsaw of ranks, registry, routes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from app import problems
from app.degraded import Degraded
from app.main import build_node
from app.metrics import Metrics
from app.roles.subscriber import SubscriberRole
from app.settings import Settings
from app.subscriber.cache import ChunkCache
from app.subscriber.jigsaw import Jigsaw
from app.subscriber.registry import Registry
from clients.protocol import ReceiverRegistration
from clients.rollout.protocol import Description, LocalTensor
from engine.digest import DigestKey, digest_live, to_hex
from engine.errors import InvalidInput, LayoutError, ProofError
from engine.layout.algebra import to_json
from engine.layout.blocks import Block, Layout
from engine.records import ChunkRef, TensorMeta, sha256_hex
from tests.support.versions import digest_of
from transports.errors import ObjectNotFound
from transports.store.local import LocalStore

pytestmark = pytest.mark.anyio


class SlowStore(LocalStore):
    """Counts how often an object is read."""

    reads = 0

    def stream(self, key: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        self.reads += 1
        return super().stream(key, start=start, length=length)


async def put(store: LocalStore, data: bytes, number: int) -> ChunkRef:
    sha = sha256_hex(data)
    key = f"runs/r/versions/0/chunks/1-0-{number}-{sha[:32]}.dtc"
    await store.put(key, data)
    return ChunkRef(key=key, sha256=sha, size_bytes=len(data), raw_bytes=len(data), entries=0)


def cache_of(folder: Path, store: LocalStore, max_bytes: int = 1 << 20) -> ChunkCache:
    metrics = Metrics()
    return ChunkCache(
        folder / "cache", store, max_bytes=max_bytes, parallel=2, metrics=metrics, degraded=Degraded(metrics)
    )


async def test_a_chunk_is_downloaded_once_for_all_who_wait(tmp_path: Path) -> None:
    store = SlowStore(tmp_path / "store")
    cache = cache_of(tmp_path, store)
    await cache.open()
    ref = await put(store, b"x" * 1000, 0)
    paths = await asyncio.gather(*(cache.fetch(ref) for _ in range(5)))
    assert {p.read_bytes() for p in paths} == {b"x" * 1000}
    assert store.reads == 1
    await cache.discard([ref])
    assert not paths[0].exists()
    await cache.fetch(ref)
    assert store.reads == 2
    with pytest.raises(ObjectNotFound):
        await cache.fetch(ref.model_copy(update={"key": "runs/r/none.dtc", "sha256": "0" * 64}))
    await cache.aclose()


async def test_the_cache_is_bounded_but_never_drops_what_is_held(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    cache = cache_of(tmp_path, store, max_bytes=2500)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "leftover.part").write_bytes(b"half")
    await cache.open()
    assert not (tmp_path / "cache" / "leftover.part").exists()
    refs = [await put(store, bytes([i]) * 1000, i) for i in range(4)]
    async with cache.holding(refs) as paths:
        assert all(p.exists() for p in paths)
        assert cache.bytes == 4000
    assert cache.bytes <= 2500
    assert [p.exists() for p in paths] == [False, False, True, True]
    await cache.aclose()
    again = cache_of(tmp_path, store, max_bytes=2500)
    await again.open()
    assert again.bytes == cache.bytes, "a restarted daemon finds what is there"


def rank(number: int, of: int, tensors: list[LocalTensor]) -> Description:
    return Description(protocol=1, name="x", run="r", pid=1, rank=number, ranks=of, tensors=tensors)


def local(meta: TensorMeta, layout: Layout | None, held: int) -> LocalTensor:
    return LocalTensor.model_validate(
        {
            "names": [meta.name],
            "shape": list(meta.shape),
            "dtype": meta.dtype,
            "held": held,
            "blocks": None if layout is None else to_json(layout),
        }
    )


COLUMNS = TensorMeta(name="w", shape=(6, 8), dtype="bfloat16")
NORM = TensorMeta(name="n", shape=(8,), dtype="bfloat16")


def columns(start: int, count: int) -> Layout:
    return Layout((Block((6, count), 0, (count, 1), start, (8, 1)),), 6 * count, 48)


def test_pieces_of_ranks_add_up_and_replicas_count_once() -> None:
    rng = np.random.default_rng(0)
    w, n = (rng.integers(0, 1 << 16, size).astype(np.uint16) for size in (48, 8))
    cuts = [(0, 4), (0, 4), (4, 4), (4, 4)]
    ranks = [rank(i, 4, [local(COLUMNS, columns(*c), 24), local(NORM, None, 8)]) for i, c in enumerate(cuts)]
    jigsaw = Jigsaw(ranks, [COLUMNS, NORM])
    found: list[dict[str, str]] = []
    for start, count in cuts:
        piece = np.ascontiguousarray(w.reshape(6, 8)[:, start : start + count]).reshape(-1)
        part = to_hex(digest_live(DigestKey.for_tensor("w"), piece, columns(start, count)))
        found.append({"w": part, "n": digest_of("n", n)})
    assert jigsaw.combine(found) == {"w": digest_of("w", w), "n": digest_of("n", n)}
    with pytest.raises(ProofError, match="same piece of 'w'"):
        jigsaw.combine([found[0], {**found[1], "w": "0" * 16}, *found[2:]])
    with pytest.raises(ProofError):
        jigsaw.combine([{"w": found[0]["w"]}, *found[1:]])


@pytest.mark.parametrize("cuts", [[(0, 4), (5, 3)], [(0, 5), (4, 4)], []])
def test_pieces_with_a_gap_or_an_overlap_are_refused(cuts: list[tuple[int, int]]) -> None:
    ranks = [rank(i, 2, [local(COLUMNS, columns(a, n), 6 * n)]) for i, (a, n) in enumerate(cuts)]
    with pytest.raises(LayoutError):
        Jigsaw(ranks or [rank(0, 1, [])], [COLUMNS])


def test_another_shape_on_a_rank_is_refused() -> None:
    other = TensorMeta(name="w", shape=(8, 6), dtype="bfloat16")
    with pytest.raises(InvalidInput):
        Jigsaw([rank(0, 1, [local(other, None, 48)])], [COLUMNS])


async def test_the_registry_survives_and_its_fence_only_grows(tmp_path: Path) -> None:
    degraded = Degraded()
    registry = Registry(tmp_path / "receivers.json", degraded)
    assert await registry.load() == []
    one = ReceiverRegistration(name="a", run="r", sockets=["/x"])
    far = registry.fence + 10**9
    registry.fence = far
    await registry.save([one])
    again = Registry(tmp_path / "receivers.json", degraded)
    assert await again.load() == [one]
    assert again.fence > far
    (tmp_path / "receivers.json").write_text(json.dumps({"fence": 1}))
    assert await Registry(tmp_path / "receivers.json", degraded).load() == []
    assert sorted(os.listdir(tmp_path)) == ["receivers.damaged", "receivers.json"]
    assert degraded.snapshot() == {"receivers-file-damaged": 1}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(
        **{"data_dir": tmp_path / "d", "store": str(tmp_path / "store"), "roles": "subscriber", "run": "r"}
    )
    role = SubscriberRole(build_node(settings))
    await role.start()
    app = FastAPI()
    problems.install(app)
    router = role.router()
    assert router is not None
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        yield client
    await role.stop()


async def test_the_routes(http: httpx.AsyncClient, tmp_path: Path) -> None:
    body: dict[str, Any] = {"name": "a", "run": "r", "sockets": [str(tmp_path / "nobody.sock")]}
    assert (await http.get("/receivers/a")).status_code == 404
    answer = await http.post("/receivers", json=body)
    assert answer.status_code == 200
    assert answer.json()["state"] in ("proving", "lost")
    assert [r["name"] for r in (await http.get("/receivers")).json()] == ["a"]
    assert (await http.get("/receivers", params={"run": "other"})).json() == []
    ready = await http.get("/receivers/a/ready")
    assert ready.status_code == 503
    assert ready.json()["remedy"]
    for bad in ({"sockets": []}, {"kind": "sglang"}, {"run": "../x"}, {"more": 1}, {"name": "a/b"}):
        assert (await http.post("/receivers", json=body | bad)).status_code == 422
    assert (await http.delete("/receivers/a")).status_code == 204
    assert (await http.delete("/receivers/a")).status_code == 404
