"""One receiver rank behind the protocol, whatever its weights look like: operations, readiness, watchdog.

One invariant: from the first write of a commit to its finalize or rollback, and from the first write of a resync until
its digests are right, the gate is held and nothing is served. The owner ends that, or else the watchdog.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from clients.rollout import protocol as p
from clients.rollout.gate import Gate
from clients.rollout.p2p import GroupReceiver, Mailbox
from engine.apply import Applier, ChunkFile, LiveChanged, LiveSet, Phase, Target
from engine.digest import to_hex
from engine.errors import DteError, StateConflict
from engine.plan.operations import Delivery

log = logging.getLogger(__name__)


class Weights(Protocol):
    """The weights of one rank, as some engine keeps them."""

    def live(self) -> LiveSet:
        """The live tensors as they are now, resolved anew."""

    def places(self) -> tuple[object, ...]:
        """Changes when a tensor is replaced by another one (pointers, shapes)."""

    def writes(self) -> tuple[object, ...]:
        """Changes when somebody other than this protocol writes to a tensor, as far as the engine can tell."""


def to_target(body: p.TargetBody, received: tuple[Delivery, ...] | None = None) -> Target:
    """The engine's form of a target. `received`: what has arrived of it rank to rank."""
    return Target(
        run=body.run,
        version=body.version,
        step=body.step,
        base=body.base,
        tensors=tuple(body.tensors),
        base_digests=body.base_digests,
        chunks=tuple(ChunkFile(Path(c.path), c.sha256, c.size_bytes, c.raw_bytes, c.entries) for c in body.chunks),
        received=received,
    )


class ReceiverCore:
    """All operations of the protocol on one rank's weights. Thread-safe: operations take turns.

    `owner_grace_s`: how long a lost owner may take to come back before a commit without finalize is rolled back.
    `finalize_timeout_s`: the same for an owner that is there but silent. `run` None: that of whoever owns it. `device`,
    `p2p_host`: see `GroupReceiver`.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        name: str,
        run: str | None,
        rank: int = 0,
        ranks: int = 1,
        owner_grace_s: float = 2.0,
        finalize_timeout_s: float = 60.0,
        on_install: Callable[[int], None] | None = None,
        device: str = "",
        p2p_host: str | None = None,
    ) -> None:
        self.name, self.run, self.rank, self.ranks = name, run, rank, ranks
        self._any_run = run is None
        self.fence = 0
        self.gate = Gate()
        self._weights = weights
        self._op = threading.RLock()
        self._places = weights.places()
        self._writes = weights.writes()
        self._seen = (self._places, self._writes)
        self._generation = 0
        self.mailbox = Mailbox()
        self.group = GroupReceiver(self.mailbox, device, p2p_host)
        self._applier = Applier(weights.live())
        self._prepared_generation = 0
        self._owner_grace_s = owner_grace_s
        self._finalize_timeout_s = finalize_timeout_s
        self._on_install = on_install
        self._deadline: float | None = None
        self._timer = threading.Condition()
        self._closed = False
        self._watchdog = threading.Thread(target=self._watch, name=f"dte-watchdog-{name}", daemon=True)
        self._watchdog.start()

    # --- serving ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        return self._applier.version

    @property
    def step(self) -> int | None:
        return self._applier.step

    @property
    def phase(self) -> Phase:
        """As it is, without looking at the weights."""
        return self._applier.phase

    @property
    def ready(self) -> bool:
        """True when the live weights are a proven version and nobody has touched them since."""
        return (
            self._applier.version is not None
            and not self._applier.phase.dirty
            and self._places == self._weights.places()
            and self._writes == self._weights.writes()
        )

    @contextmanager
    def serving(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the weights at one proven version while something is computed with them."""
        self.gate.enter_read(lambda: self.ready, timeout_s)
        try:
            yield
        finally:
            self.gate.leave_read()

    # --- operations -------------------------------------------------------------------------------------------------

    def describe(self, _: p.Empty) -> p.Description:
        with self._op:
            self._look()
            tensors = []
            for live in self._applier.live.tensors:
                layout = live.copies[0].layout
                plain = live.whole and len(layout.blocks) <= 1 and live.copies[0].locator.shift == 0
                tensors.append(
                    p.LocalTensor.model_validate(
                        {
                            "names": list(live.names),
                            "shape": live.shape,
                            "dtype": live.dtype,
                            "held": layout.src_numel,
                            "blocks": None if plain else [b.to_json() for b in layout.blocks],
                        }
                    )
                )
            return p.Description(
                protocol=p.PROTOCOL,
                name=self.name,
                run=None if self._any_run else self.run,
                pid=os.getpid(),
                rank=self.rank,
                ranks=self.ranks,
                tensors=tensors,
                device=self.group.device,
            )

    def status(self, _: p.Empty | None = None) -> p.Status:
        """Never waits for an operation in progress. Weights that cannot be used just now are no version."""
        if self._op.acquire(blocking=False):
            known = self._generation
            try:
                self._look()
            except DteError as error:
                if self._generation != known:  # said once, however often it is asked
                    log.warning("receiver %s: %s", self.name, error)
            finally:
                self._op.release()
        applier = self._applier
        return p.Status(
            phase=applier.phase.value,
            version=applier.version,
            step=applier.step,
            target=applier.target_version,
            generation=self._generation,
            fence=self.fence,
            ready=self.ready,
        )

    def audit(self, body: p.Audit) -> p.Digests:
        with self._op:
            self._look()
            digests = self._applier.audit(body.tensors)
            return p.Digests(digests={n: to_hex(d) for n, d in digests.items()}, generation=self._generation)

    def adopt(self, body: p.Adopt) -> p.Status:
        with self._op:
            self._look()
            self._applier.adopt(body.version, body.step, body.tensors, body.digests)
        self.gate.wake()
        return self.status()

    def prepare(self, body: p.Prepare) -> p.Prepared:
        with self._op:
            self._look()
            self._check_run(body.target)
            if self._applier.phase is Phase.PREPARED:
                self._applier.abort()
            self._arm(None)
            received = None if body.target.received is None else self.mailbox.take(body.target)
            verdict = self._applier.prepare(to_target(body.target, received))
            self._prepared_generation = self._generation
            return p.Prepared(
                version=verdict.version,
                already=verdict.already,
                live=verdict.live,
                after=verdict.after,
                entries=verdict.entries,
                generation=self._generation,
            )

    def commit(self, body: p.Commit) -> p.Status:
        with self._op:
            if self._applier.target_version != body.version:
                raise StateConflict(f"version {body.version} is not prepared.", remedy="Prepare it first.")
            fresh = self._applier.phase is Phase.PREPARED
            self.gate.enter_write(body.wait_s)
            try:
                self._look()
                if fresh and self._generation != self._prepared_generation:
                    raise LiveChanged(
                        "the weights were replaced or written to between prepare and commit.",
                        remedy="Nothing was written; prepare again.",
                    )
                self._applier.commit(body.version)
            finally:
                if self._applier.phase.dirty:
                    self._arm(self._finalize_timeout_s)
                else:
                    self._release()
        return self.status()

    def finalize(self, body: p.Finalize) -> p.Status:
        with self._op:
            self._applier.finalize(body.version)
            self.mailbox.drop(body.version)
            self._arm(None)
            if self._on_install is not None:
                self._on_install(body.version)
            self._release()
        return self.status()

    def rollback(self, _: p.Empty | None = None) -> p.Status:
        with self._op:
            self._applier.rollback()
            self._arm(None)
            self._release()
        return self.status()

    def abort(self, _: p.Empty | None = None) -> p.Status:
        with self._op:
            self._applier.abort()
            self._arm(None)
        return self.status()

    def resync(self, body: p.Resync) -> p.Digests:
        with self._op:
            for target in body.targets:
                self._check_run(target)
            self._look()
            tensors = body.targets[-1].tensors
            targets = [t if t.tensors else t.model_copy(update={"tensors": tensors}) for t in body.targets]
            try:
                digests = self._applier.resync(
                    [to_target(t) for t in targets], before_write=lambda: self.gate.enter_write(body.wait_s)
                )
            finally:
                phase = self._applier.phase
                if phase not in (Phase.WRITING, Phase.WRITTEN):
                    self._arm(None)  # nothing is left to roll back
                if not phase.dirty:
                    self._release()
            return p.Digests(digests={n: to_hex(d) for n, d in digests.items()}, generation=self._generation)

    # --- ownership and watchdog -------------------------------------------------------------------------------------

    def check_owner_run(self, run: str | None) -> None:
        """StateConflict if an owner that follows `run` may not own this receiver."""
        if run is not None and not self._any_run and run != self.run:
            raise StateConflict(f"this receiver follows run {self.run!r}, not {run!r}.")

    def follow(self, run: str | None) -> None:
        """Take the owner's run, where it was left open; the weights are none of its versions until proven."""
        if self._any_run and run is not None and run != self.run:
            with self._op:
                self.run = run
                self._applier.unprove()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Several operations in a row that neither another one nor the watchdog comes between."""
        with self._op:
            yield

    def owner_present(self) -> None:
        """An owner has attached; whatever the one before left unfinished is now its business, within its own time."""
        with self._timer:
            if self._deadline is not None:
                self._deadline = time.monotonic() + self._finalize_timeout_s

    def owner_lost(self) -> None:
        """The owner's connection ended: undo what it left behind, unless it comes back soon."""
        if self._applier.phase in (Phase.PREPARED, Phase.WRITING, Phase.WRITTEN):
            self._arm(self._owner_grace_s)

    def close(self) -> None:
        """Stop the watchdog; roll back a commit that was not finalized."""
        with self._timer:
            self._closed = True
            self._deadline = None
            self._timer.notify_all()
        self._watchdog.join()
        self.group.leave()
        self._undo("the receiver is closing")

    def _arm(self, after_s: float | None) -> None:
        with self._timer:
            self._deadline = None if after_s is None else time.monotonic() + after_s
            self._timer.notify_all()

    def _watch(self) -> None:
        while True:
            with self._timer:
                if self._closed:
                    return
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is None or left > 0:
                    self._timer.wait(left)
                    continue
                self._deadline = None
            try:
                self._undo("its owner is gone or silent")
            except Exception:
                log.exception("receiver %s: the rollback failed; it stays unready", self.name)

    def _undo(self, why: str) -> None:
        with self._op:
            with self._timer:
                if self._deadline is not None:
                    return  # armed again while we waited for the operation in progress: its owner is back
            if self._applier.phase in (Phase.WRITING, Phase.WRITTEN):
                log.warning("receiver %s: rolling back version %s: %s", self.name, self._applier.target_version, why)
                self._applier.rollback()
                self._release()
            elif self._applier.phase is Phase.PREPARED:
                self._applier.abort()

    # --- what others do to the weights ------------------------------------------------------------------------------

    def _check_run(self, target: p.TargetBody) -> None:
        if target.run != self.run:
            raise StateConflict(f"this receiver follows run {self.run!r}, not {target.run!r}.")

    def _look(self) -> None:
        """Notice tensors that were replaced or written to by others: nothing about them is proven any more.

        In the middle of a commit this waits for its end: the undo belongs to the memory that was written.
        """
        if self._applier.phase in (Phase.WRITING, Phase.WRITTEN):
            return
        places, writes = self._weights.places(), self._weights.writes()
        if places == self._places and writes == self._writes:
            return
        self._applier.unprove()
        if (places, writes) != self._seen:
            # Once for each change, though it may take many looks until the tensors can be bound.
            self._seen = (places, writes)
            self._generation += 1
            if places != self._places:
                log.warning("receiver %s: the engine replaced tensors; they are proven again", self.name)
        if places != self._places:
            self._applier.rebind(self._weights.live())
        self._places, self._writes = places, writes

    def _release(self) -> None:
        self.gate.leave_write()
