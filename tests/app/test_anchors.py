"""Anchors and retention: an anchor is the version bit for bit or is not there; chunks go only behind two of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from app.chain import Chain
from app.cli.verifying import run_verify
from app.committer import Committer
from app.compactor import Compactor
from app.retention import Retention
from engine.codec.chunk import ChunkHeader, ChunkItem, decode, encode
from engine.digest import DigestKey, digest_array, to_hex
from engine.errors import ProofError, StateConflict
from engine.records import (
    ChunkRef,
    LaunchRecord,
    PartRecord,
    SliceDecl,
    SliceResult,
    TensorMeta,
    keys,
    record_bytes,
    sha256_hex,
)
from transports.errors import ObjectNotFound
from transports.store.local import LocalStore

pytestmark = pytest.mark.anyio
RUN = "run"
TILE = 1 << 16
ROWS, COLS = 300, 400
"""Tensor `big` is split by columns over two writers (strided slices of about a tile); `small` belongs to writer 0."""
CHUNK_BYTES = 100_000
HOUR_MS = 3_600_000


class Trainer:
    """Two writers with real chunks, by the shortest way."""

    def __init__(self, store: LocalStore) -> None:
        self.committer = Committer(Chain(RUN, store, poll_interval_s=0.01))
        self.store = store
        self.rng = np.random.default_rng(7)
        bits = self.rng.integers(0, 1 << 16, (ROWS, COLS), dtype=np.uint16)
        self.state = {"big": bits, "small": np.arange(10, dtype=np.uint16)}
        self.shipped: dict[str, np.ndarray] = {}
        self.history: list[dict[str, np.ndarray]] = []

    def slices(self, writer: int):
        half = COLS // 2
        blocks = [([ROWS, half], 0, [half, 1], writer * half, [COLS, 1])]
        yield 0, "big", blocks, lambda s: s["big"][:, writer * half : (writer + 1) * half].ravel()
        if writer == 0:
            yield 1, "small", [([10], 0, [1], 0, [1])], lambda s: s["small"]

    def canonical(self, name: str, blocks) -> np.ndarray:
        index = np.arange(self.state[name].size).reshape(self.state[name].shape)
        if name == "small":
            return index
        offset, half = blocks[0][3], COLS // 2
        return index[:, offset : offset + half].ravel()

    def digest(self, name: str, blocks, lanes: np.ndarray) -> str:
        key = DigestKey.for_tensor(name)
        with np.errstate(over="ignore"):
            terms = key.weights(self.canonical(name, blocks)) * (lanes.astype(np.uint64) + np.uint64(1))
            return to_hex(int(terms.sum(dtype=np.uint64)))

    async def open(self) -> None:
        tensors = [TensorMeta(name=n, shape=a.shape) for n, a in self.state.items()]
        for writer in (0, 1):
            decls = [
                SliceDecl(
                    slice=i,
                    tensor=name,
                    lanes=get(self.state).size,
                    blocks=blocks,
                    digest=self.digest(name, blocks, get(self.state)),
                )
                for i, name, blocks, get in self.slices(writer)
            ]
            record = LaunchRecord(run=RUN, launch="one", rank=writer, world=2, step=0, tensors=tensors, slices=decls)
            await self.committer.announce(record)
        assert await self.committer.try_open("one")

    def step(self) -> None:
        hit = self.rng.random((ROWS, COLS)) < 0.01
        self.state["big"] = self.state["big"] + hit.astype(np.uint16)
        self.state["small"] = self.state["small"] + np.uint16(1)

    async def publish(self, *, dense: bool = False, created_ms: int = 0) -> int:
        head = self.committer.chain.head
        version, base = self.committer.chain.next_version, None if head is None else head.version
        for writer in (0, 1):
            items, results = [], []
            for i, name, blocks, get in self.slices(writer):
                now = get(self.state)
                tiles = -(-now.size // TILE)
                ranks = np.empty(0, np.int64)
                diffs = np.empty(0, np.uint16)
                old = None if dense else get(self.shipped)
                if old is not None:
                    ranks = np.flatnonzero(now != old)
                    diffs = (now - old)[ranks]
                items.append(
                    ChunkItem(
                        tensor=name,
                        shape=self.state[name].shape,
                        dtype="bfloat16",
                        slice=i,
                        lanes=now.size,
                        blocks=[list(b) for b in blocks],
                        ranks=ranks,
                        diffs=diffs,
                        dense_tiles=np.arange(tiles if dense else 0, dtype=np.int64),
                        dense_bits=now if dense else np.empty(0, np.uint16),
                    )
                )
                results.append(
                    SliceResult(
                        slice=i,
                        tensor=name,
                        digest_base=None if old is None else self.digest(name, blocks, old),
                        digest=self.digest(name, blocks, now),
                        changed=len(ranks),
                        dense_tiles=tiles if dense else 0,
                        dense_lanes=now.size if dense else 0,
                        tiles=tiles,
                    )
                )
            refs = []
            for seq, item in enumerate(items):
                chunk = encode(ChunkHeader(RUN, version, 1, writer, seq, base), [item])
                key = keys.chunk(RUN, version, 1, writer, seq, sha256_hex(chunk.data))
                await self.store.put_if_absent(key, chunk.data)
                refs.append(
                    ChunkRef(
                        key=key,
                        sha256=sha256_hex(chunk.data),
                        size_bytes=len(chunk.data),
                        raw_bytes=chunk.raw_bytes,
                        entries=chunk.entries,
                    )
                )
            await self.committer.put_part(
                PartRecord(
                    run=RUN,
                    version=version,
                    epoch=1,
                    writer=writer,
                    launch="one",
                    step=version,
                    base=base,
                    chunks=refs,
                    slices=results,
                    created_ms=created_ms,
                )
            )
        decision = await self.committer.try_commit(version)
        assert decision.kind == "commit"
        self.shipped = dict(self.state)
        self.history.append(self.shipped)
        return version

    async def run(self, versions: int) -> None:
        await self.open()
        await self.publish(dense=True)
        for n in range(1, versions):
            self.step()
            await self.publish(created_ms=n * HOUR_MS)


@pytest.fixture
async def trainer(tmp_path: Path) -> Trainer:
    return Trainer(LocalStore(tmp_path / "store"))


def compactor(trainer: Trainer, tmp_path: Path, **options) -> Compactor:
    return Compactor(Chain(RUN, trainer.store), tmp_path / "scratch", CHUNK_BYTES, **options)


async def restore(store: LocalStore, record) -> dict[str, np.ndarray]:
    out = {t.name: np.zeros(int(np.prod(t.shape)), np.uint16) for t in record.tensors}
    for ref in record.chunks:
        data = await store.get(ref.key, max_bytes=ref.size_bytes)
        assert sha256_hex(data) == ref.sha256
        _, items = decode(data, max_raw_bytes=ref.raw_bytes)
        for item in items:
            at = 0
            for tile in item.dense_tiles:
                size = min(TILE, item.lanes - int(tile) * TILE)
                out[item.tensor][int(tile) * TILE :][:size] = item.dense_bits[at : at + size]
                at += size
    return out


@pytest.mark.parametrize("cache_bytes", [1 << 30, 0], ids=["cached", "nothing-cached"])
async def test_an_anchor_is_the_version_bit_for_bit(trainer, tmp_path, cache_bytes):
    await trainer.run(4)
    c = compactor(trainer, tmp_path, cache_bytes=cache_bytes)
    await c._chain.refresh()
    assert await c.due(4) is None
    record = await c.run_due(3)
    assert record.version == 3
    assert len(record.chunks) > 2
    restored = await restore(trainer.store, record)
    for name, lanes in trainer.history[3].items():
        np.testing.assert_array_equal(restored[name], lanes.ravel())
        digest = to_hex(digest_array(DigestKey.for_tensor(name), lanes.ravel()))
        assert {t.name: t.digest for t in record.tensors}[name] == digest
    assert await c.due(3) is None
    assert not any((tmp_path / "scratch" / RUN).iterdir())


async def test_the_next_anchor_starts_from_the_last_one(trainer, tmp_path):
    await trainer.run(5)
    c = compactor(trainer, tmp_path)
    await c._chain.refresh()
    await c.make(2)
    for version in (0, 1, 2):
        for ref in c._chain.decisions[version].parts:
            for chunk in (await c._chain.part(ref)).chunks:
                await trainer.store.delete(chunk.key)
    record = await c.make(4)
    np.testing.assert_array_equal((await restore(trainer.store, record))["big"], trainer.history[4]["big"].ravel())
    assert [a.version for a in await c._chain.anchors()] == [2, 4]


async def test_a_version_that_is_dense_everywhere_is_a_start(trainer, tmp_path, capsys):
    """The chain behind it may be gone: anchors are made from it, and the run verifies."""
    await trainer.run(2)
    for path in (tmp_path / "store" / keys.version_prefix(RUN, 0) / "chunks").iterdir():
        path.unlink()
    await trainer.publish(dense=True)
    trainer.step()
    await trainer.publish()
    work = compactor(trainer, tmp_path)
    await work._chain.refresh()
    with pytest.raises(ObjectNotFound):
        await work.make(1)
    for version in (2, 3):
        restored = await restore(trainer.store, await work.make(version))
        for name, value in trainer.history[version].items():
            assert np.array_equal(restored[name], value.ravel())
    code = await asyncio.to_thread(run_verify, str(tmp_path / "store"), RUN, None, workdir=tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (code, found["problems"], found["proven"], found["anchors"]) == (0, [], [2, 3], [2, 3])


async def test_two_compactors_write_the_same_anchor(trainer, tmp_path):
    await trainer.run(3)
    one, two = compactor(trainer, tmp_path / "1"), compactor(trainer, tmp_path / "2")
    await one._chain.refresh()
    await two._chain.refresh()
    first = await one.make(2)
    await trainer.store.delete(keys.anchor_manifest(RUN, 2))
    assert record_bytes(await two.make(2)) == record_bytes(first)


async def test_a_chain_that_does_not_prove_makes_no_anchor(trainer, tmp_path):
    await trainer.run(2)
    chain = trainer.committer.chain
    # A part whose chunk is well-formed but not what its digests say: only the proof can see it.
    ref = chain.head.parts[0]
    part = await chain.part(ref)
    wrong = part.model_copy(update={"chunks": part.chunks[:1]})
    await trainer.store.put(ref.key, record_bytes(wrong))
    changed = ref.model_copy(update={"sha256": sha256_hex(record_bytes(wrong))})
    decision = chain.head.model_copy(update={"parts": [changed, chain.head.parts[1]]})
    await trainer.store.put(keys.decision(RUN, 1), record_bytes(decision))
    c = compactor(trainer, tmp_path)
    await c._chain.refresh()
    with pytest.raises(ProofError, match="tensor 'small'"):
        await c.make(1)
    assert await c._chain.anchor_versions() == []


async def test_only_commits_get_anchors(trainer, tmp_path):
    await trainer.run(1)
    c = compactor(trainer, tmp_path)
    await c._chain.refresh()
    with pytest.raises(StateConflict):
        await c.make(1)


async def exists(store: LocalStore, prefix: str) -> set[str]:
    return {key async for key in store.list(prefix)}


async def test_retention_deletes_only_chunks_behind_two_anchors_and_the_hours(trainer, tmp_path):
    await trainer.run(8)
    c = compactor(trainer, tmp_path)
    await c._chain.refresh()
    retention = Retention(Chain(RUN, trainer.store), keep_anchors=2, hours=1)
    await c.make(2)
    assert (await retention.plan(now_ms=100 * HOUR_MS)).chunks == ()
    await c.make(4)
    await c.make(6)
    before = await exists(trainer.store, f"runs/{RUN}/")
    plan = await retention.plan(now_ms=4 * HOUR_MS)
    assert plan.versions == (0, 1, 2)
    assert plan == await retention.plan(now_ms=4 * HOUR_MS)
    assert before == await exists(trainer.store, f"runs/{RUN}/")
    assert await retention.apply(plan) == len(plan.manifests) + len(plan.chunks)
    gone = before - await exists(trainer.store, f"runs/{RUN}/")
    assert gone == {*plan.manifests, *plan.chunks}
    assert plan.manifests == (keys.anchor_manifest(RUN, 2),)
    assert not [k for k in gone if k.endswith("decision.json") or "/parts/" in k]
    late = await retention.plan(now_ms=100 * HOUR_MS)
    assert late.versions == (3, 4)
    await retention.apply(late)
    fresh = Chain(RUN, trainer.store)
    await fresh.refresh()
    assert [a.version for a in await fresh.anchors()] == [4, 6]
    kept = await compactor(trainer, tmp_path)._chain.refresh()
    assert len(kept) == 8
    later = compactor(trainer, tmp_path)
    await later._chain.refresh()
    restored = await restore(trainer.store, await later.make(7))
    np.testing.assert_array_equal(restored["big"], trainer.history[7]["big"].ravel())


def test_fewer_than_two_anchors_cannot_be_asked_for(tmp_path):
    with pytest.raises(StateConflict):
        Retention(Chain(RUN, LocalStore(tmp_path)), keep_anchors=1, hours=1)
