"""A receiver of two ranks that share a tensor by columns and each hold a copy of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from app.subscriber.engine import Engine
from clients.rollout.protocol import ReceiverClient, ReceiverError
from clients.rollout.torch import Shard, TorchReceiver
from engine.errors import InvalidInput, ProofError
from engine.layout.blocks import Block, Layout
from tests.clients.test_rollout_torch import body_of
from tests.support.versions import State, changed, digest_of, local_target, metas_of

pytestmark = pytest.mark.anyio

ROWS, COLUMNS, HALF = 40, 30, 15
METAS = metas_of({"w": ((ROWS, COLUMNS), "bfloat16"), "norm": ((COLUMNS,), "bfloat16")})


def state_of(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {"w": rng.integers(0, 1 << 16, ROWS * COLUMNS).astype(np.uint16),
            "norm": rng.integers(0, 1 << 16, COLUMNS).astype(np.uint16)}  # fmt: skip


@dataclass
class Ranks:
    """Both ranks in this process, and how to reach them."""

    modules: list[nn.Module]
    receivers: list[TorchReceiver]
    sockets: list[str]
    folder: Path
    fence: int = 0

    async def engine(self) -> Engine:
        self.fence += 1
        return await Engine.connect("r", self.sockets, owner="test", fence=self.fence)

    def state(self) -> State:
        """The whole tensors as the ranks hold them; the copies must be equal."""
        w = [m.get_parameter("w").detach().view(torch.uint16).numpy() for m in self.modules]
        norm = [m.get_parameter("norm").detach().view(torch.uint16).numpy() for m in self.modules]
        assert np.array_equal(norm[0], norm[1])
        return {"w": np.concatenate(w, axis=1).reshape(-1), "norm": norm[0].copy()}


def load(module: nn.Module, rank: int, state: State) -> None:
    whole = state["w"].reshape(ROWS, COLUMNS)[:, rank * HALF : (rank + 1) * HALF]
    for name, bits in (("w", np.ascontiguousarray(whole)), ("norm", state["norm"].copy())):
        with torch.no_grad():
            module.get_parameter(name).copy_(torch.from_numpy(bits).view(torch.bfloat16))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    sockets = [str(tmp_path / f"{rank}.sock") for rank in range(2)]
    found = Ranks([], [], sockets, tmp_path)
    with ExitStack() as stack:
        for rank in range(2):
            module = nn.Module()
            module.w = nn.Parameter(torch.zeros(ROWS, HALF, dtype=torch.bfloat16))
            module.norm = nn.Parameter(torch.zeros(COLUMNS, dtype=torch.bfloat16))
            load(module, rank, state_of(0))
            block = Block((ROWS, HALF), 0, (HALF, 1), rank * HALF, (COLUMNS, 1))
            shard = Shard("w", (ROWS, COLUMNS), Layout((block,), ROWS * HALF, ROWS * COLUMNS))
            found.modules.append(module)
            found.receivers.append(
                stack.enter_context(
                    TorchReceiver(
                        module, name=f"x{rank}", run="r", socket_path=sockets[rank], sockets=sockets, rank=rank,
                        shards={"w": shard}, owner_grace_s=60.0,
                    )
                )
            )  # fmt: skip
        yield found


@pytest.fixture
async def engine(ranks: Ranks) -> AsyncIterator[Engine]:
    engine = await ranks.engine()
    yield engine
    await engine.aclose()


def same(a: State, b: State) -> bool:
    return all(np.array_equal(a[n], b[n]) for n in b)


async def test_install_and_resync_over_both(ranks: Ranks, engine: Engine) -> None:
    base, one = state_of(0), changed(state_of(0), np.random.default_rng(1))
    target = body_of(local_target(ranks.folder, METAS, one, base, writers=2))
    found, per_rank = await engine.audit(target.tensors)
    assert found == {n: digest_of(n, v) for n, v in base.items()}
    assert per_rank[0]["w"] != per_rank[1]["w"]
    await engine.install(target)
    assert same(ranks.state(), one)
    assert [s.version for s in engine.statuses] == [1, 1]
    dense = body_of(local_target(ranks.folder, METAS, base, None, version=0))
    await engine.resync([dense])
    assert same(ranks.state(), base)


async def test_a_wrong_piece_on_one_rank_stops_both(ranks: Ranks, engine: Engine) -> None:
    base, one = state_of(0), changed(state_of(0), np.random.default_rng(1))
    target = body_of(local_target(ranks.folder, METAS, one, base))
    with torch.no_grad():
        ranks.modules[1].get_parameter("w")[3, 4] = 1.5
    before = ranks.state()
    with pytest.raises(ReceiverError) as error:
        await engine.install(target)
    assert error.value.code == "wrong-base"
    assert same(ranks.state(), before), "no rank may have written"
    assert [s.phase for s in await engine.refresh()] == ["clean", "clean"]
    with torch.no_grad():
        ranks.modules[1].get_parameter("norm")[0] = 1.5
    with pytest.raises(ProofError):
        await engine.audit(target.tensors)


async def test_a_rank_that_cannot_commit_takes_the_other_back(ranks: Ranks, engine: Engine) -> None:
    base, one = state_of(0), changed(state_of(0), np.random.default_rng(1))
    target = body_of(local_target(ranks.folder, METAS, one, base))
    commit = engine._links[1].commit

    async def touched(version: int, *, wait_s: float = 600.0) -> object:
        with torch.no_grad():
            w = ranks.modules[1].get_parameter("w")
            w.copy_(w.clone())  # the same bits, but somebody wrote them
        return await commit(version, wait_s=wait_s)

    engine._links[1].commit = touched  # type: ignore[method-assign, assignment]
    with pytest.raises(ReceiverError) as error:
        await engine.install(target)
    assert error.value.code == "live-changed"
    assert same(ranks.state(), base)
    assert [s.phase for s in await engine.refresh()] == ["clean", "clean"]


async def test_a_new_owner_brings_ranks_together(ranks: Ranks) -> None:
    """The daemon died between two finalizes, or between two commits."""
    base, one = state_of(0), changed(state_of(0), np.random.default_rng(1))
    target = body_of(local_target(ranks.folder, METAS, one, base))
    engine = await ranks.engine()
    _, per_rank = await engine.audit(list(body_of(local_target(ranks.folder, METAS, base, None, version=0)).tensors))
    await engine.adopt(0, 0, body_of(local_target(ranks.folder, METAS, base, None, version=0)).tensors, per_rank)
    for link in engine._links:
        await link.prepare(target)
    for link in engine._links:
        await link.commit(1)
    await engine._links[0].finalize(1)
    await engine.aclose()
    engine = await ranks.engine()
    assert [(s.version, s.phase) for s in engine.statuses] == [(1, "clean"), (0, "clean")], "the second rolled back"
    await engine.install(target)
    assert [s.version for s in engine.statuses] == [1, 1]
    assert same(ranks.state(), one)
    await engine.aclose()


async def test_sockets_in_the_wrong_order_are_refused(ranks: Ranks) -> None:
    ranks.sockets.reverse()
    with pytest.raises(InvalidInput):
        await ranks.engine()
    alone = await ReceiverClient.connect(ranks.sockets[0])
    assert (await alone.status()).phase == "clean"
    await alone.aclose()
    await asyncio.sleep(0)
