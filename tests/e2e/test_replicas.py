"""Two ranks of a trainer hold the same norm: one publishes it, and each version says whether the other agrees."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from clients.control import ControlClient
from clients.protocol import JobState, VersionInfo
from clients.trainer import OwnedSlice, TorchSource
from tests.e2e.line import TIMEOUT_S, bits

CELL = "5e11" * 8


class Pair:
    """Rank r trains its half of `matrix` and the whole `norm`, with gradients that the ranks have averaged."""

    def __init__(self, url: str, run: str) -> None:
        self.control = ControlClient(url, run=run)
        self.number = 0
        self.matrices = [torch.nn.Parameter(torch.randn(32, 64) * 0.02) for _ in range(2)]
        norm = torch.rand(64)
        self.norms = [torch.nn.Parameter(norm.clone()) for _ in range(2)]
        self.scale = [torch.ones(64) for _ in range(2)]
        self.optimizers = [torch.optim.AdamW([m, n], lr=1e-4) for m, n in zip(self.matrices, self.norms, strict=True)]
        self.sources = [
            TorchSource(
                None,
                self.optimizers[rank],
                slices=[
                    OwnedSlice("matrix", (64, 64), self.matrices[rank], offset=rank * 32 * 64),
                    OwnedSlice("norm", (64,), self.norms[rank], cell=CELL, holders=rank or None),
                    OwnedSlice("scale", (64,), self.scale[rank], side=True, cell=CELL, holders=rank or None),
                ],
                run=run,
                daemon=url,
                rank=rank,
                world=2,
                launch="pair",
                hold_timeout_s=TIMEOUT_S,
            )
            for rank in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda s: s.register(), self.sources))
        self.control.wait_for_version(0, TIMEOUT_S)

    def step(self) -> None:
        shared = torch.randn(64)
        for rank in range(2):
            self.matrices[rank].grad = torch.randn(32, 64)
            self.norms[rank].grad = shared.clone()
            self.optimizers[rank].step()

    def ship(self) -> VersionInfo:
        self.number += 1
        handles = [s.sync(self.number) for s in self.sources]
        jobs = [h.wait(TIMEOUT_S) for h in handles]
        assert [j.state for j in jobs] == [JobState.COMMITTED] * 2, jobs
        assert jobs[0].version is not None
        return self.control.version(jobs[0].version)

    def close(self) -> None:
        for source in self.sources:
            source.close()
        self.control.close()


@pytest.fixture
def pair(url: str, request: pytest.FixtureRequest) -> Iterator[Pair]:
    torch.manual_seed(7)
    made = Pair(url, request.node.name.replace("_", "-")[:60])
    yield made
    made.close()


def count(found: VersionInfo) -> int:
    return found.detail.get("diverged_replicas", 0)


def test_one_bit_of_a_replica_is_seen_until_it_is_equal_again(pair: Pair) -> None:
    def in_force() -> int:
        return pair.control.versions().degraded.get("diverged-replicas", 0)

    pair.step()
    assert count(pair.ship()) == 0
    pair.step()
    with torch.no_grad(), pair.sources[1].mutating():
        pair.norms[1].view(torch.int32)[17] ^= 1 << 16
    assert (bits(pair.norms[0].bfloat16()) != bits(pair.norms[1].bfloat16())).sum() == 1
    assert (count(pair.ship()), in_force()) == (1, 1)

    pair.step()  # the same gradient moves both, and the difference stays
    pair.scale[1][3] += 1
    assert (count(pair.ship()), in_force()) == (2, 2)

    pair.step()
    pair.scale[1][3] -= 1
    with torch.no_grad(), pair.sources[1].mutating():
        pair.norms[1].copy_(pair.norms[0])
    assert (count(pair.ship()), in_force()) == (0, 0)
    pair.step()
    assert count(pair.ship()) == 0


def test_a_replica_in_other_memory_is_still_the_one_that_is_read(pair: Pair) -> None:
    pair.step()
    with torch.no_grad():
        pair.norms[1].data = pair.norms[1].data.clone()
        pair.norms[1].view(torch.int32)[0] ^= 1 << 20
    assert count(pair.ship()) == 1
    assert pair.sources[1].stats.moved == 1
