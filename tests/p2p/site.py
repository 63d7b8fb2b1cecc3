"""A trainer daemon with store and coordinator, rollout daemons, real workers, and receiver ranks as processes.

One invariant: what a receiver must hold is kept by the test for every version, as bits of the trainer's parameters;
nothing of dte's layouts or plans takes part in a verdict. Ports and folders stay the same over the lives of a daemon.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import torch

from clients.control import ControlClient
from clients.errors import ClientError
from clients.protocol import JobState, ReceiverInfo
from clients.trainer import TorchSource
from clients.trainer.source import SyncHandle
from tests.p2p.process import Rank
from tests.p2p.rig import Model, Ranks, Rect, TrainerRank, matrix_of, wait_for_cut
from tests.support.nursery import nursery
from tests.support.ports import free_port
from tests.support.processes import Child
from tests.support.store_proxy import StoreProxy

T = TypeVar("T")
RUN = "site"
PATIENCE_S = 180.0
CUT_S = 10.0
SMALL: Model = {"embed": (64, 48), "q": (48, 48), "norm": (48,)}
LARGE: Model = {"embed": (1024, 768), "norm": (48,)}
"""A version of all its tensors is more than a MiB for each of two ranks."""


def banded(model: Model, parts: int) -> Ranks:
    """Bands of rows for each of `parts` ranks; vectors by columns."""
    out: list[list[Rect]] = [[] for _ in range(parts)]
    for name, shape in model.items():
        rows, columns = matrix_of(shape)
        for r in range(parts):
            if rows >= parts:
                out[r].append(Rect(name, r * rows // parts, (r + 1) * rows // parts))
            else:
                out[r].append(Rect(name, 0, None, r * columns // parts, (r + 1) * columns // parts))
    return out


@dataclass
class _Receiver:
    ranks: Ranks
    transport: str
    rollout: str
    children: list[Rank] = field(default_factory=list)


class Site:
    """Start what is wanted. `settings` are those of all daemons."""

    def __init__(self, folder: Path, model: Model = SMALL, *, apart: bool = False, **settings: Any) -> None:
        self.folder, self.model, self.apart = folder, model, apart
        self.proxy: StoreProxy | None = None
        self.settings: dict[str, Any] = {
            "run": RUN,
            "p2p": True,
            "p2p_timeout_s": 20.0,
            "p2p_lease_s": 5.0,
            "poll_interval_s": 0.05,
            "detect_threads": 1,
            "dense_fraction": 1.0,
            "workers": nursery(),
            **settings,
        }
        self.daemons: dict[str, Child] = {}
        self.ports: dict[str, int] = {}
        self.receivers: dict[str, _Receiver] = {}
        self.sources: list[TorchSource] = []
        self.ranks: list[TrainerRank] = []
        self.truth: dict[int, dict[str, npt.NDArray[np.int16]]] = {}
        self.number = 0
        self._handles: list[SyncHandle] = []
        self._bits: dict[str, npt.NDArray[np.int16]] = {}
        self._all: list[Child] = []
        self._extra: dict[str, dict[str, Any]] = {}
        torch.manual_seed(7)

    # --- processes --------------------------------------------------------------------------------------------------

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports.setdefault(name, free_port())}"

    def start_trainer(self, **extra: Any) -> None:
        """The daemon of trainer, store and coordinator, first or anew. Where the store is a daemon of its own, it is
        reached through a proxy that can hold requests back."""
        if self.apart and self.proxy is None:
            self._start("store", roles="store")
            self.proxy = StoreProxy("trainer", self.ports["store"])
        if self.proxy is None:
            self._start("trainer", roles="publisher,coordinator,store", **extra)
        else:
            self._start("trainer", roles="publisher,coordinator", store=self.proxy.url, **extra)

    def start_rollout(self, name: str = "rollout", **extra: Any) -> None:
        """A rollout daemon, first or anew."""
        store = self.url("store" if self.apart else "trainer")
        where = {"store": f"{store}/store", "p2p_coordinator": self.url("trainer")}
        self._start(name, roles="subscriber", **where | extra)

    def _start(self, name: str, **extra: Any) -> None:
        self.url(name)
        extra = self._extra[name] = self._extra.get(name, {}) | extra
        config = {"data_dir": str(self.folder / name), "port": self.ports[name], **self.settings, **extra}
        child = Child(name, "tests.support.daemon_process:serve", self.folder, **config)
        self.daemons[name] = child
        self._all.append(child)
        child.started()

    def receive(
        self, name: str, ranks: int = 1, *, transport: str = "p2p", rollout: str = "rollout", first: int | None = None
    ) -> list[Rank]:
        """Start the processes of a receiver, the first time or again (`first`: only this rank)."""
        known = self.receivers.setdefault(name, _Receiver(banded(self.model, ranks), transport, rollout))
        ranks = len(known.ranks)
        sockets = [self.folder / f"{name}-{n}.sock" for n in range(ranks)]
        for number in range(ranks) if first is None else [first]:
            sockets[number].unlink(missing_ok=True)
            rank = Rank(
                self.folder,
                known.ranks[number],
                socket=sockets[number],
                name=name,
                run=RUN,
                daemon=self.url(known.rollout) if number == 0 else None,
                model=self.model,
                sockets=[str(s) for s in sockets],
                rank=number,
                transport=known.transport,
            )
            self._all.append(rank.child)
            known.children[number : number + 1] = [rank]
            rank.child.started()
        return known.children

    def train(self, world: int = 2, *, launch: str = "one", lr: float = 2e-4) -> None:
        """A launch of so many ranks, from the weights as they are."""
        old = self.sources
        start = {n: torch.randn(*matrix_of(shape)) * 0.02 for n, shape in self.model.items()}
        if self.ranks:
            for rank in self.ranks:
                for r, p in zip(rank.rects, rank.params, strict=True):
                    r.of(start[r.tensor].numpy())[...] = p.detach().numpy()
        for source in old:
            source.close(unregister=False)
        self.ranks = [TrainerRank(self.model, rects, start) for rects in banded(self.model, world)]
        for rank in self.ranks:
            rank.optimizer.param_groups[0]["lr"] = lr
        self.sources = [
            TorchSource(
                None,
                rank.optimizer,
                slices=rank.slices,
                run=RUN,
                daemon=self.url("trainer"),
                rank=number,
                world=world,
                launch=launch,
                hold_timeout_s=PATIENCE_S,
                register_timeout_s=PATIENCE_S,
            )
            for number, rank in enumerate(self.ranks)
        ]
        with ThreadPoolExecutor(world) as pool:
            list(pool.map(lambda s: s.register(self.number), self.sources))
        self._bits = self.bits()
        if not self.truth:
            self.truth[self.until("the launch has a version", self.head)] = self._bits

    def close(self) -> None:
        for child in self._all:
            if child.alive:
                os.kill(child.pid, signal.SIGCONT)
        for source in self.sources:
            source.close(unregister=False)
        for child in self._all:
            child.end()
        if self.proxy is not None:
            self.proxy.close()

    def workers(self) -> list[int]:
        """Process ids of the trainer ranks' workers, in rank order."""
        return self.daemons["trainer"].workers()

    # --- training ---------------------------------------------------------------------------------------------------

    def bits(self) -> dict[str, npt.NDArray[np.int16]]:
        """The trainer's BF16 bits now."""
        whole = {n: np.zeros(matrix_of(shape), np.int16) for n, shape in self.model.items()}
        for rank in self.ranks:
            for r, p in zip(rank.rects, rank.params, strict=True):
                r.of(whole[r.tensor])[...] = p.detach().bfloat16().view(torch.int16).numpy()
        return whole

    def post(self, without: Collection[str] = ()) -> int | None:
        """One step that leaves some tensors alone, and its sync; the version it is to become."""
        self.number += 1
        for rank in self.ranks:
            rank.step(frozenset(without))
        with contextlib.suppress(ClientError, AssertionError):  # a daemon that is away, or cannot go on
            wait_for_cut(self.sources, CUT_S)
        self._handles = [s.sync(self.number) for s in self.sources]
        self._bits = self.bits()
        version = self._handles[0].version
        if version is not None:
            self.truth[version] = self._bits
        return version

    def landed(self) -> list[JobState]:
        """How the newest sync of every rank ended."""
        return [h.wait(PATIENCE_S).state for h in self._handles]

    def ship(self, without: Collection[str] = ()) -> int:
        """Step and sync until a step has been committed; its version."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            version = self.post(without)
            states: list[JobState] = []
            with contextlib.suppress(ClientError):  # the daemon is away
                states = self.landed()
            if version is not None and set(states) == {JobState.COMMITTED}:
                return version
            assert time.monotonic() < until_s, (states, self.tails())
            time.sleep(0.05)

    # --- looking ----------------------------------------------------------------------------------------------------

    def until(self, what: str, reached: Callable[[], T | None]) -> T:
        """Poll until `reached()` is true."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            try:
                if found := reached():
                    return found
                if found == 0 and found is not None and not isinstance(found, bool):
                    return found
            except (httpx.HTTPError, ClientError):
                pass  # a daemon that is starting
            time.sleep(0.02)
        raise AssertionError(f"never: {what}\n{self.tails()}")

    def get(self, name: str, path: str) -> Any:
        return httpx.get(self.url(name) + path, trust_env=False, timeout=10.0).json()

    def head(self) -> int | None:
        found = self.get("trainer", f"/versions?run={RUN}")["head"]
        return None if found is None else int(found)

    def degraded(self, name: str) -> dict[str, int]:
        found: dict[str, int] = self.get(name, f"/versions?run={RUN}")["degraded"]
        return found

    def view(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("trainer", f"/p2p/{RUN}")
        return found

    def info(self, name: str) -> ReceiverInfo | None:
        """None while its daemon does not know it."""
        with ControlClient(self.url(self.receivers[name].rollout), run=RUN) as control:
            return next((r for r in control.receivers() if r.name == name), None)

    def group(self, receivers: int, *, other_than: Collection[str] = (), world: int | None = None) -> dict[str, Any]:
        """Wait until a group with so many receiver ranks is open; the coordinator's view."""

        def reached() -> dict[str, Any] | None:
            view = self.view()
            group = view["group"]
            found = (
                group is not None
                and group["state"] == "open"
                and group["id"] not in other_than
                and len(group["members"]) - group["senders"] == receivers
                and (world is None or group["senders"] == world)
            )
            return view if found else None

        return self.until(f"a group with {receivers} receiver ranks", reached)

    def exchanging(self, version: int, waiting: int | None = None) -> None:
        """Wait until the exchange of `version` goes on; all but `waiting` members have done their part."""

        def reached() -> bool:
            view = self.view()
            group = view["group"]
            on = bool(group and group["exchanging"] and group["go"]["version"] == version)
            if on and waiting is not None:
                return len(group["members"]) - len(view["exchange"]) == waiting
            return on

        self.until(f"the exchange of version {version}", reached)

    def tails(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {c.name}\n{c.tail()[-2500:]}" for c in self._all[-7:])

    # --- the verdict ------------------------------------------------------------------------------------------------

    def arrived(self, version: int, paths: Mapping[str, str] | None = None, *, names: Collection[str] = ()) -> None:
        """Wait until the receivers (`names`, or all) are proven at `version`, and compare their bits. `paths`: the way
        by which each must have got it."""
        for name in names or self.receivers:

            def there(name: str = name) -> ReceiverInfo | None:
                info = self.info(name)
                return info if info is not None and info.installed == version and info.ready else None

            info = self.until(f"{name} at version {version}", there)
            assert info.proof == "proven"
            if paths is not None and name in paths:
                assert info.path == paths[name], (name, version, info, self.tails())
            for number, rank in enumerate(self.receivers[name].children):
                assert not self.differing(rank, version), (name, number, version)

    def differing(self, rank: Rank, version: int) -> list[str]:
        """Tensors of a receiver rank whose bits are not those of `version`."""
        held = rank.held()
        truth = self.truth[version]
        return [r.tensor for n, r in enumerate(rank.rects) if not np.array_equal(held[str(n)], r.of(truth[r.tensor]))]

    def ship_p2p(self, names: Sequence[str]) -> int:
        """A version that all `names` get rank to rank."""
        version = self.ship()
        self.arrived(version, dict.fromkeys(names, "p2p"))
        return version
