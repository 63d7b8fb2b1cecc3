"""One scheduler rank behind the receiver protocol: reads on a socket, writes inside the engine's update call.

One invariant: weights are written only in the scheduler's own thread, inside an update call that all ranks of the
engine take part in, and that call ends with all ranks at one version: the new one, or the old one through the undo.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from clients.rollout import protocol as p
from clients.rollout.core import ReceiverCore
from clients.rollout.operations import Operations, error_body, operations
from clients.rollout.server import ReceiverServer
from clients.rollout.sglang.call import EngineAnswer, EngineCall, Hold, Stage, StageUnit
from clients.rollout.sglang.converter import Converter
from clients.rollout.sglang.core import EngineCore
from clients.rollout.sglang.weights import EngineWeights
from engine.apply import Phase
from engine.errors import DteError, StateConflict

log = logging.getLogger(__name__)

REPORT_BYTES = 4096
OWNER_GRACE_S = 2.0


class Host(Protocol):
    """What a rank needs of the engine around it."""

    def can_flush(self) -> bool:
        """True if the cache could be flushed now: nothing runs that needs it."""

    def flush(self, keep_running: bool) -> None:
        """Drop what old weights computed; StateConflict if it could not be done."""

    def refresh_derived(self) -> None:
        """Recompute what the model derives from its parameters."""

    def set_version(self, label: str) -> None:
        """Make answers carry this weight version."""

    def go_on(self) -> None:
        """Ask the server to continue generation. Called from a thread of ours."""


class PauseWatch:
    """Lets the engine continue when whoever paused it is gone, replaced or silent.

    One invariant: an engine whose weights are between versions stays paused; it is asked again and again until they
    are not, and until the engine has continued.
    """

    def __init__(self, go_on: Callable[[], None], may: Callable[[], bool], grace_s: float) -> None:
        self._go_on, self._may, self._grace_s = go_on, may, grace_s
        self._lock = threading.Lock()
        self._continuing = threading.Lock()
        self._held = False
        self._timer: threading.Timer | None = None

    def hold(self, held: bool, patience_s: float) -> None:
        """The owner is about to pause the engine, or has let it continue."""
        with self._continuing, self._lock:  # a continue of ours that is on its way must not end the new pause
            self._held = held
            self._arm(patience_s if held else None)

    def owner(self, present: bool) -> None:
        """An owner came or went: either way the one that holds the engine may not be there to let it continue."""
        with self._lock:
            if self._held:
                self._arm(self._grace_s)

    def close(self) -> None:
        with self._lock:
            self._held = False
            self._arm(None)

    def _arm(self, after_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if after_s is not None:
            self._timer = threading.Timer(after_s, self._ring)
            self._timer.daemon = True
            self._timer.start()

    def _ring(self) -> None:
        with self._continuing:
            with self._lock:
                if not self._held or threading.current_thread() is not self._timer:
                    return
            done = False
            if not self._may():
                log.error("the weights are between two versions and their owner is gone: the engine stays paused.")
            else:
                log.warning("whoever paused the engine is gone or silent: it continues at the version it has.")
                try:
                    self._go_on()
                    done = True
                except Exception:
                    log.exception("could not let the engine continue")
            with self._lock:
                if threading.current_thread() is self._timer:
                    self._held = not done
                    self._arm(None if done else self._grace_s)


class SglangRank:
    """Binds weights, core, socket and engine of one scheduler rank. `group`: all ranks of the engine, on CPUs.

    `p2p_host`: address at which a trainer's ranks reach this process, None for the one that its daemon names. Versions
    that are sent to it go through host memory, so that the engine's own collectives are left alone.
    """

    def __init__(
        self,
        weights: EngineWeights,
        converter: Converter,
        host: Host,
        server_of: Callable[[ReceiverCore, Operations], ReceiverServer],
        *,
        name: str,
        rank: int,
        ranks: int,
        group: Any,
        p2p_host: str | None = None,
    ) -> None:
        self._weights = weights
        self._host = host
        self._ranks = ranks
        self._group = group
        self._staged: list[p.TargetBody] = []
        self._converter = converter
        self._torn = False
        """True from a call's begin until all ranks are known to be clean."""
        self.core = EngineCore(
            weights,
            converter,
            name=name,
            run=None,
            rank=rank,
            ranks=ranks,
            owner_grace_s=OWNER_GRACE_S,
            finalize_timeout_s=86400,
            p2p_host=p2p_host,
        )
        self._watch = PauseWatch(host.go_on if rank == 0 else lambda: None, self._may_continue, grace_s=OWNER_GRACE_S)
        self.core.on_owner = self._owner
        self.server = server_of(self.core, self._operations())

    def close(self) -> None:
        self._watch.close()
        self.server.close()

    def _owner(self, present: bool) -> None:
        self._watch.owner(present)
        if not present:
            with self.core.exclusively():
                if not self.server.owned:
                    self._converter.drop()  # and with it files that are gone but for our mapping

    # --- on the socket ----------------------------------------------------------------------------------------------

    def _operations(self) -> Operations:
        """Everything that writes is done in the engine's update call instead."""
        serves = operations(self.core)
        for op in ("commit", "finalize", "rollback", "resync"):
            del serves[op]
        return {
            **serves,
            "stage": (Stage, self._stage, True),
            "unit": (StageUnit, self.core.stage_unit, True),
            "hold": (Hold, self._hold, True),
        }

    def _stage(self, body: Stage) -> p.Status:
        last = body.targets[-1]
        with self.core.exclusively():
            self._staged = list(body.targets)
            self._converter.aim(last.version, last.tensors, None)
        return self.core.status()

    def _hold(self, body: Hold) -> p.Status:
        self._watch.hold(body.held, body.patience_s)
        return self.core.status()

    # --- in the scheduler's thread ----------------------------------------------------------------------------------

    def touch(self) -> None:
        """Another update path writes, or has written, to the weights."""
        self._weights.touch()

    def memory(self, away: bool) -> None:
        """The engine is about to release the weights' memory, or has resumed it."""
        with self.core.exclusively():
            self._weights.away = away
            self._weights.touch()

    def update(self, call: EngineCall) -> EngineAnswer:
        """Do one call together with all other ranks. Never raises: an error is part of the answer, on every rank."""
        with self.core.exclusively():
            self._torn = True
            error = self._run(call)
            mine = {"phase": self.core.phase.value, "dirty": self.core.dirty}
            reports = share(mine, self._ranks, self._group)
            self._torn = any(r["dirty"] for r in reports)
        return EngineAnswer(phases=[str(r["phase"]) for r in reports], error=error)

    def _may_continue(self) -> bool:
        """False while a rank, not only this one, is between two versions."""
        return not self._torn and not self.core.dirty

    def _run(self, call: EngineCall) -> p.ErrorBody | None:
        steps: dict[str, Callable[[EngineCall], p.ErrorBody | None]] = {
            "commit": self._commit,
            "rollback": self._rollback,
            "resync": self._resync,
            "finalize": self._finalize,
        }
        return self._together(lambda: self._allow(call)) or steps[call.op](call)

    def _allow(self, call: EngineCall) -> None:
        if not self.server.owned_by(call.owner, call.fence):
            raise StateConflict(f"{call.owner!r} with fence {call.fence} does not own this engine.")
        if call.run != self.core.run:
            raise StateConflict(f"the engine follows run {self.core.run!r}, not {call.run!r}.")

    def _commit(self, call: EngineCall) -> p.ErrorBody | None:
        at_it = False

        def ready() -> None:
            nonlocal at_it
            self.core.status()  # a look at what others did meanwhile
            at_it = self.core.version == call.version and not self.core.phase.dirty
            if not call.keep_cache and not self._host.can_flush():
                raise StateConflict(
                    "requests are running, so that the cache could not be flushed.",
                    remedy="Pause the engine in mode retract or abort, or accept old KV caches with in_place.",
                )

        def write() -> None:
            if not at_it:
                self.core.commit(p.Commit(version=call.version, wait_s=0))
            self._converter.convert(call.version)

        error = self._together(ready) or self._together(write) or self._together(lambda: self._settle(call))
        if error is not None:
            failed = self._together(self._undo)
            return error if failed is None else failed.model_copy(update={"code": "half-written"})

        def done() -> None:
            self._converter.finalize(call.version)
            if not at_it:
                self.core.finalize(p.Finalize(version=call.version))
            self._host.set_version(str(call.version))

        return self._together(done)

    def _settle(self, call: EngineCall) -> None:
        self._host.refresh_derived()
        self._host.flush(call.keep_cache)

    def _undo(self) -> None:
        written = self._converter.dirty or self.core.phase in (Phase.WRITING, Phase.WRITTEN)
        self._converter.rollback()
        if self.core.phase is Phase.PREPARED:
            self.core.abort()
        elif self.core.phase in (Phase.WRITING, Phase.WRITTEN):
            self.core.rollback()
        if written:
            self._host.refresh_derived()

    def _rollback(self, call: EngineCall) -> p.ErrorBody | None:
        return self._together(self._undo)

    def _resync(self, call: EngineCall) -> p.ErrorBody | None:
        staged, self._staged = self._staged, []

        def ready() -> None:
            if not staged or staged[-1].version != call.version:
                raise StateConflict(f"version {call.version} is not staged.", remedy="Stage its targets first.")

        def write() -> None:
            self.core.resync(p.Resync(targets=staged, wait_s=0))
            self._converter.convert(call.version, undo=False)

        return self._together(ready) or self._together(write)

    def _finalize(self, call: EngineCall) -> p.ErrorBody | None:
        def done() -> None:
            self._converter.finalize(call.version)
            self.core.finalize(p.Finalize(version=call.version))
            self._host.set_version(str(call.version))

        return self._together(lambda: self._settle(call)) or self._together(done)

    def _together(self, do: Callable[[], object]) -> p.ErrorBody | None:
        """`do` on every rank; None if it succeeded on all, else the error of the first rank where it did not."""
        mine: p.ErrorBody | None = None
        try:
            do()
        except DteError as error:
            mine = error_body(error)
        except Exception as error:
            log.exception("rank %d", self.core.rank)
            mine = error_body(error)
        reports = share({"error": None if mine is None else _short(mine)}, self._ranks, self._group)
        for rank, report in enumerate(reports):
            if report["error"] is not None:
                found = p.ErrorBody.model_validate(report["error"])
                where = f" (rank {rank})" if self._ranks > 1 else ""
                return found.model_copy(update={"message": found.message + where})
        return None


def share(report: dict[str, Any], ranks: int, group: Any) -> list[dict[str, Any]]:
    """Every rank's report, as JSON in buffers of one size. All ranks of `group` call it."""
    if ranks == 1:
        return [report]
    data = json.dumps(report).encode()
    mine = torch.zeros(REPORT_BYTES, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyone, mine, group=group)
    return [json.loads(bytes(e.numpy()).rstrip(b"\0")) for e in everyone]


def plain(text: str, length: int) -> str:
    """Printable ASCII without quotes and backslashes, so that JSON makes it no longer."""
    return "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in text[:length])


def _short(error: p.ErrorBody) -> dict[str, Any]:
    """An error body that surely fits a report."""
    tensors = [plain(t, 100) for t in error.detail.get("tensors", [])][:5]
    return {
        "code": plain(error.code, 60),
        "message": plain(error.message, 500),
        "remedy": plain(error.remedy, 200),
        "detail": {"tensors": tensors} if tensors else {},
    }
