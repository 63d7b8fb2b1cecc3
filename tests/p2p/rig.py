"""Trainer ranks and receiver ranks of any layout at one real daemon, exchanging versions rank to rank.

One invariant: the verdict compares the receivers' memory with the trainer's parameters, cut by the test's own
rectangles; nothing of dte's layouts or plans takes part in it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from clients.control import ControlClient
from clients.protocol import JobState, ReceiverInfo, VersionInfo
from clients.rollout.torch import Shard, TorchReceiver
from clients.trainer import OwnedSlice, TorchSource
from engine.layout.blocks import Block, Layout
from tests.e2e.line import daemon
from tests.support.daemon_process import Daemon

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Rect:
    """Rows [r0, r1) and columns [c0, c1) of a matrix (None: to the end). A vector is a matrix of one row."""

    tensor: str
    r0: int = 0
    r1: int | None = None
    c0: int = 0
    c1: int | None = None

    def of(self, matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What it cuts out."""
        return matrix[self.r0 : self.r1, self.c0 : self.c1]

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Local element → canonical element."""
        rows, columns = (1, *shape)[-2:]
        r1, c1 = self.r1 or rows, self.c1 or columns
        n, m = r1 - self.r0, c1 - self.c0
        block = Block((n, m), 0, (m, 1), self.r0 * columns + self.c0, (columns, 1))
        return Layout((block,), n * m, rows * columns)


Model = Mapping[str, tuple[int, ...]]
Ranks = Sequence[Sequence[Rect]]


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = (1, *shape)[-2:]
    return rows, columns


class TrainerRank:
    """Parameters for its rectangles, and an optimizer of its own."""

    def __init__(self, model: Model, rects: Sequence[Rect], start: Mapping[str, torch.Tensor]) -> None:
        self.rects = rects
        self.params = [
            nn.Parameter(torch.from_numpy(np.ascontiguousarray(r.of(start[r.tensor].numpy())))) for r in rects
        ]
        # A rank that owns nothing has an optimizer all the same.
        trained = self.params or [nn.Parameter(torch.zeros(1))]
        self.optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.01)
        self.slices = [
            OwnedSlice(r.tensor, model[r.tensor], p, layout=r.layout(model[r.tensor]))
            for r, p in zip(rects, self.params, strict=True)
        ]

    def step(self, skipped: frozenset[str]) -> None:
        for r, p in zip(self.rects, self.params, strict=True):
            p.grad = None if r.tensor in skipped else torch.randn(p.shape)
        self.optimizer.step()


class Holder(nn.Module):
    """A receiver rank: one parameter for each of its rectangles, copies of tied ones included."""

    def __init__(self, model: Model, rects: Sequence[Rect], tied: Mapping[str, str]) -> None:
        super().__init__()
        self.rects = rects
        self.shards: dict[str, Shard] = {}
        self.copies: dict[str, str] = {}
        for number, r in enumerate(rects):
            shape = r.of(np.empty(matrix_of(model[r.tensor]), np.uint8)).shape
            name = f"p{number}"
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False))
            self.shards[name] = Shard(r.tensor, model[r.tensor], r.layout(model[r.tensor]))
            if r.tensor in tied:
                setattr(self, tied[r.tensor], nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
                self.shards[tied[r.tensor]] = self.shards[name]

    def held(self) -> list[tuple[Rect, npt.NDArray[np.int16]]]:
        out = [(r, getattr(self, f"p{n}").detach().view(torch.int16).numpy()) for n, r in enumerate(self.rects)]
        for name, shard in self.shards.items():
            if not name.startswith("p"):
                rect = next(r for r in self.rects if r.tensor == shard.tensor)
                out.append((rect, getattr(self, name).detach().view(torch.int16).numpy()))
        return out


def wait_for_cut(sources: Sequence[TorchSource], timeout_s: float) -> None:
    """Wait until every rank may publish the same number. Ranks of a real trainer agree on one in their own group; these
    are in one process, so one of them might accumulate what the others publish."""
    until_s = time.monotonic() + timeout_s
    while True:
        cuts = {s._daemon.cut(s.run, s.rank).version for s in sources}
        if len(cuts) == 1 and None not in cuts:
            return
        assert time.monotonic() < until_s, cuts
        time.sleep(0.01)


class Job:
    """A trainer of these ranks, and receivers of those, following one run. `step`, then `ship`."""

    def __init__(
        self,
        url: str,
        run: str,
        model: Model,
        trainer: Ranks,
        receivers: Mapping[str, Ranks],
        folder: Path,
        *,
        seed: int = 0,
        transport: Mapping[str, str] | None = None,
        tied: Mapping[str, str] | None = None,
        trainer_urls: Sequence[str] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.url, self.run, self.model = url, run, model
        self.control = ControlClient(url, run=run)
        start = {n: torch.randn(*matrix_of(shape)) * 0.02 for n, shape in model.items()}
        self.ranks = [TrainerRank(model, rects, start) for rects in trainer]
        self.number = 0
        urls = trainer_urls or [url] * len(trainer)
        self.sources = [
            TorchSource(
                None,
                rank.optimizer,
                slices=rank.slices,
                run=run,
                daemon=urls[number],
                rank=number,
                world=len(trainer),
                launch="one",
                hold_timeout_s=TIMEOUT_S,
            )
            for number, rank in enumerate(self.ranks)
        ]
        with ThreadPoolExecutor(len(self.sources)) as pool:
            list(pool.map(lambda s: s.register(), self.sources))
        self.control.wait_for_version(0, TIMEOUT_S)
        self.holders: dict[str, list[Holder]] = {}
        self.receivers: dict[str, list[TorchReceiver]] = {}
        for name, ranks in receivers.items():
            how = (transport or {}).get(name, "p2p")
            self.receive(url, name, ranks, folder, how, tied or {})
        self.arrived(0)

    def receive(
        self, url: str, name: str, ranks: Ranks, folder: Path, transport: str = "p2p", tied: Mapping[str, str] = {}
    ) -> None:
        """Start a receiver of these ranks."""
        self.holders[name] = [Holder(self.model, rects, tied) for rects in ranks]
        sockets = [folder / f"{name}-{n}.sock" for n in range(len(ranks))]
        self.receivers[name] = [
            TorchReceiver(
                holder,
                name=f"{self.run}-{name}",
                run=self.run,
                daemon=url if number == 0 else None,
                socket_path=sockets[number],
                sockets=sockets if len(sockets) > 1 else (),
                rank=number,
                shards=holder.shards,
                transport=transport,  # type: ignore[arg-type]
            )
            for number, holder in enumerate(self.holders[name])
        ]

    # --- training ---------------------------------------------------------------------------------------------------

    def step(self, *, without: Sequence[str] = ()) -> None:
        for rank in self.ranks:
            rank.step(frozenset(without))

    def ship(self, *, publish: bool = True) -> VersionInfo | None:
        """Sync; the version that came of it, once every receiver has it and it is right. None without one."""
        self.number += 1
        wait_for_cut(self.sources, TIMEOUT_S)
        handles = [s.sync(self.number, publish=publish) for s in self.sources]
        jobs = [h.wait(TIMEOUT_S) for h in handles]
        states = {j.state for j in jobs}
        if states != {JobState.COMMITTED}:
            assert states <= {JobState.UNCHANGED, JobState.ACCUMULATED}, jobs
            return None
        version = jobs[0].version
        assert version is not None
        self.arrived(version)
        return self.control.version(version)

    def arrived(self, version: int) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        for receivers in self.receivers.values():
            while not all(r.ready and r.version == version for r in receivers):
                assert time.monotonic() < until_s, self.control.receivers()
                time.sleep(0.01)
        # The daemon notes it down a moment after the ranks are there.
        while any(i.installed != version for i in self.control.receivers() if i.run == self.run):
            assert time.monotonic() < until_s, self.control.receivers()
            time.sleep(0.01)
        assert not self.differing()

    def differing(self) -> list[tuple[str, int, str]]:
        """(receiver, rank, tensor) that do not hold the trainer's BF16 bits."""
        whole = {n: np.zeros(matrix_of(shape), np.int16) for n, shape in self.model.items()}
        for rank in self.ranks:
            for r, p in zip(rank.rects, rank.params, strict=True):
                r.of(whole[r.tensor])[...] = p.detach().bfloat16().view(torch.int16).numpy()
        return [
            (name, number, r.tensor)
            for name, holders in self.holders.items()
            for number, holder in enumerate(holders)
            for r, found in holder.held()
            if not np.array_equal(found, r.of(whole[r.tensor]))
        ]

    def info(self, name: str = "a") -> ReceiverInfo:
        return next(r for r in self.control.receivers() if r.name == f"{self.run}-{name}")

    def until_group(self, receivers: int) -> dict[str, Any]:
        """Wait until a group with so many receiver ranks is open; the coordinator's view."""
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            view = self.view()
            group = view["group"]
            if group and group["state"] == "open" and len(group["members"]) - group["senders"] == receivers:
                return view
            assert time.monotonic() < until_s, view
            time.sleep(0.01)

    def view(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/p2p/{self.run}", trust_env=False).json()
        return found

    def close(self) -> None:
        for receivers in self.receivers.values():
            for receiver in receivers:
                receiver.close()
        for source in self.sources:
            source.close()
        self.control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def p2p_daemon(folder: Path, **changes: Any) -> Daemon:
    """One daemon with all roles that takes part in P2P."""
    return daemon(folder, **{"p2p": True, "p2p_timeout_s": 20.0, "dense_fraction": 1.0} | changes)
