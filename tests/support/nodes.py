"""A store daemon, a rollout daemon and node daemons as real processes that tests kill, start again and hold up.

Every daemon but the store's reaches the store through a proxy of its own. Ports and folders stay the same over the
lives of a daemon.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx

from clients.protocol import Job
from tests.support.ports import free_port
from tests.support.processes import PATIENCE_S, Child
from tests.support.store_proxy import Hold, StoreProxy


class Nodes:
    """Start what is wanted with `start_*`. `run` is the run that is looked at; `settings` are those of all daemons."""

    def __init__(self, folder: Path, run: str, **settings: Any) -> None:
        self.folder = folder
        self.run = run
        self.settings = settings
        self.all: list[Child] = []
        self.proxies: list[StoreProxy] = []
        self.daemons: dict[int, Child] = {}
        self.proxy: dict[int, StoreProxy] = {}
        self.ports: dict[str, int] = {}
        self.store: Child
        self.rollout: Child
        self.rollout_proxy: StoreProxy

    # --- processes -------------------------------------------------------------------------------------------------

    def child(self, name: str, main: str, /, **config: Any) -> Child:
        child = Child(name, main, self.folder, **config)
        self.all.append(child)
        return child

    def port(self, name: str) -> int:
        return self.ports.setdefault(name, free_port())

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port(name)}"

    def _daemon(self, name: str, **settings: Any) -> Child:
        base = {
            "data_dir": str(self.folder / name),
            "port": self.port(name),
            "poll_interval_s": 0.2,
            "run": self.run,
            "detect_threads": 1,
        }
        return self.child(name, "tests.support.daemon_process:serve", **{**base, **self.settings, **settings})

    def _proxy(self, name: str) -> StoreProxy:
        proxy = StoreProxy(name, self.port("store"))
        self.proxies.append(proxy)
        return proxy

    def start_store(self) -> None:
        self.store = self._daemon("store", roles="store")
        self.store.receive()

    def start_daemon(self, number: int, *, wait: bool = True, roles: str = "publisher,coordinator") -> None:
        """Trainer daemon `number`, the first time or after its death."""
        if number not in self.proxy:
            self.proxy[number] = self._proxy(f"daemon{number}")
        self.daemons[number] = self._daemon(f"daemon{number}", roles=roles, store=self.proxy[number].url)
        if wait:
            self.daemons[number].receive()

    def start_daemons(self, count: int) -> None:
        """The trainer daemons 0, 1, … at the same time."""
        for number in range(count):
            self.start_daemon(number, wait=False)
        for number in range(count):
            self.daemons[number].receive()

    def start_rollout(self) -> None:
        if not hasattr(self, "rollout_proxy"):
            self.rollout_proxy = self._proxy("rollout")
        self.rollout = self._daemon("rollout", roles="subscriber", store=self.rollout_proxy.url)
        self.rollout.receive()

    def kill_daemon(self, number: int) -> None:
        self.daemons[number].kill()

    def restart_daemon(self, number: int) -> None:
        """Start it after its death and wait until it takes syncs again."""
        self.start_daemon(number)
        self.ready(number)

    def restart_all(self) -> None:
        self.start_daemons(len(self.daemons))
        for number in self.daemons:
            self.ready(number)

    def ready(self, number: int) -> None:
        """Wait while the workers of the ranks at daemon `number` are starting."""
        for rank in self.ranks_at(number):
            cut = f"/ranks/{rank}/cut?run={self.run}"
            self.until("the worker has started", lambda cut=cut: self.get(f"daemon{number}", cut).status_code != 503)

    def ranks_at(self, number: int) -> Iterable[int]:
        """The trainer ranks whose daemon it is."""
        return (number,)

    def wipe(self, number: int) -> None:
        """Lose a trainer daemon's whole data_dir."""
        shutil.rmtree(self.folder / f"daemon{number}")

    def close(self) -> None:
        for child in self.all:
            child.end()
        for proxy in self.proxies:
            proxy.close()

    # --- holding ---------------------------------------------------------------------------------------------------

    def hold(self, method: str, path: str, *, at: list[int] | None = None, **options: Any) -> Hold:
        """Hold a request of the trainer daemons (or of some), whichever sends it first."""
        hold = Hold(method, path, **options)
        for number in self.proxy if at is None else at:
            self.proxy[number].add(hold)
        return hold

    def hold_decision(self, **options: Any) -> Hold:
        """Hold the next decision, not what a daemon that is late sends of one that stands."""
        return self.hold("PUT", rf"/versions/{self.next_number()}/decision\.json", **options)

    def clear_holds(self) -> None:
        for proxy in self.proxies:
            proxy.clear()

    def number_of(self, proxy: StoreProxy | None) -> int:
        return next(n for n, p in self.proxy.items() if p is proxy)

    # --- looking ---------------------------------------------------------------------------------------------------

    def until(self, what: str, reached: Callable[[], Any]) -> Any:
        """Poll until `reached()` is true."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            found = reached()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"never: {what}\n{self.tails()}")

    def final_job(self, number: int, job_id: str) -> Job | None:
        """A job of trainer daemon `number` once it is final."""
        job = Job.model_validate_json(self.get(f"daemon{number}", f"/jobs/{job_id}").content)
        return job if job.state.final else None

    def get(self, name: str, path: str) -> httpx.Response:
        return httpx.get(self.url(name) + path, trust_env=False, timeout=PATIENCE_S)

    def degraded(self, number: int) -> dict[str, int]:
        found: dict[str, int] = self.get(f"daemon{number}", f"/versions?run={self.run}").json()["degraded"]
        return found

    def decision(self, number: int) -> dict[str, Any] | None:
        """The raw record in the store."""
        path = self.store_dir / f"runs/{self.run}/versions/{number}/decision.json"
        return json.loads(path.read_bytes()) if path.exists() else None

    def next_number(self) -> int:
        n = 0
        while self.decision(n) is not None:
            n += 1
        return n

    def part_writers(self, version: int) -> list[str]:
        """`<epoch>-<writer>` of the parts of a version."""
        folder = self.store_dir / "runs" / self.run / "versions" / str(version) / "parts"
        return sorted(p.stem for p in folder.glob("*.json"))

    @property
    def store_dir(self) -> Path:
        return self.folder / "store" / "store"

    def tails(self) -> str:
        return "\n".join(f"--- {c.name}\n{c.tail()[-2500:]}" for c in self.all[-9:])
