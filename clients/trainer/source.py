"""`Source`: publishes what a torch optimizer does to a model, without ever waiting for the network.

One invariant: a step is either posted under a hold that the next mutation respects, or its hold is revoked; what was
not read is found by the daemon from the step counters and sent whole.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, get_args

import httpx
import torch

from clients.errors import ApiError, ClientError, NotFound
from clients.protocol import Cut, Detector, Job, SyncRequest
from clients.trainer.daemon import Daemon, SyncHandle, is_down
from clients.trainer.gate import Gate
from clients.trainer.group import Agree, default_agree, new_launch, rank_and_world
from clients.trainer.live import Live, SourceStats, move_in, unmappable
from clients.trainer.names import check_ids
from clients.trainer.places import MemoryMode, Places
from clients.trainer.plan import Planner
from clients.trainer.shards import Names, Plan
from clients.trainer.turns import ACCUMULATE, Ready, Turn, Turns
from engine.errors import DteError, InvalidInput, StateConflict
from transports.memory.cuda_ipc import Cuda, TorchCuda
from transports.memory.generation import ControlBlock, control_name
from transports.memory.shm import remove_stale

log = logging.getLogger(__name__)


class Source(abc.ABC):
    """One trainer rank. Use: `register()` once, then `sync(step)` after optimizer steps, `close()` at the end.

    A kind of trainer says in `_declare` what the rank owns; everything else is the same for all.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        models: Sequence[torch.nn.Module],
        *,
        run: str,
        daemon: str = "http://127.0.0.1:7411",
        token: str | None = None,
        rank: int | None = None,
        world: int | None = None,
        launch: str | None = None,
        group: Any = None,
        agree: Agree | None = None,
        names: Names | None = None,
        detector: Detector | Mapping[str, Detector] | None = None,
        dtypes: Mapping[str, str] | None = None,
        on_daemon_down: Literal["continue", "wait"] = "continue",
        hold_timeout_s: float = 30.0,
        register_timeout_s: float = 600.0,
        memory: MemoryMode = "auto",
        replica_digests: bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`optimizers`: those whose state is read, and whose steps are watched. `models`: whose loading is watched.
        The rest as in `SourceOptions`. Nothing is touched before `register`."""
        if on_daemon_down not in ("continue", "wait"):
            raise InvalidInput(f"on_daemon_down is 'continue' or 'wait', not {on_daemon_down!r}.")
        if memory not in get_args(MemoryMode):
            raise InvalidInput(f"memory is 'auto', 'ipc' or 'mirror', not {memory!r}.")
        check_ids(run, launch)
        found = rank_and_world(group)
        self.run = run
        self.rank = found[0] if rank is None else rank
        self.world = found[1] if world is None else world
        self.launch = launch
        self.epoch: int | None = None
        self._optimizers, self._models = list(optimizers), list(models)
        self._names, self._detector, self._dtypes = names, detector, dtypes
        self._group = group
        self._turns = Turns(agree or default_agree(group))
        self._hold_timeout_s = hold_timeout_s
        self._register_timeout_s = register_timeout_s
        self._memory: MemoryMode = memory
        self._replica_digests = replica_digests
        self._daemon = Daemon(daemon, token, transport, wait=on_daemon_down == "wait")
        self._live: Live | None = None
        self._missed: SyncRequest | None = None
        self._last: tuple[SyncRequest, SyncHandle] | None = None
        self._posted_step = 0
        self._syncs = 0
        self._down = 0

    @abc.abstractmethod
    def _declare(self, planner: Planner) -> None:
        """Add to the plan everything this rank owns. Called in `register`; may talk to the other ranks."""

    def _check(self) -> None:  # noqa: B027 - most kinds have nothing to check
        """Called in every `sync` before anything is posted: raise what forbids publishing the weights as they are."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names → the canonical name that is published for them."""
        return dict(self._registered().plan.aliases)

    @property
    def stats(self) -> SourceStats:
        """Counts since `register`."""
        live = self._registered()
        gate, places = live.gate.stats, live.binding.places
        return SourceStats(
            self._syncs, self._down, gate.hold_ms, gate.last_hold_ms, gate.revoked, live.watch.moved_total,
            live.binding.size_bytes, places.exported, places.mirrored,
        )  # fmt: skip

    # --- registration ------------------------------------------------------------------------------------------------

    def register(self, step: int = 0) -> int:
        """Put θ, m and v where the daemon can read them (shared memory, or exported from a device), register, and wait
        until the first read is done and the epoch is open.

        `step` is the number of the last step done before. Returns the epoch. On any error everything is moved out
        again. Raises InvalidInput or UnsupportedOptimizer for what cannot be declared, SharedMemoryFull,
        DeviceMemoryError, and `clients.errors`.
        """
        if self._live is not None:
            raise StateConflict("this source is registered already.")
        for name in remove_stale():
            log.info("removed shared memory %s of a process that has died", name)
        self.launch = self.launch or new_launch(self._group)
        plan = self._make_plan()
        try:
            return self._enter(self.launch, plan, self._memory, step)
        except DteError as e:
            if self._memory != "auto" or not unmappable(e):
                raise
            log.warning("run %s: θ, m and v are copied to the host at every sync (memory='mirror'): %s", self.run, e)
        return self._enter(self.launch, plan, "mirror", step)

    def _enter(self, launch: str, plan: Plan, memory: MemoryMode, step: int) -> int:
        gate = Gate(ControlBlock.create(control_name(self.run, launch, self.rank)), self._daemon, self._hold_timeout_s)
        places = Places(memory, self._cuda())
        live = move_in(self.run, launch, self.rank, plan, self._optimizers, self._models, places, gate)
        try:
            live.watch.install()
            body = live.registration(self.run, self.rank, self.world, step, hold=live.gate.take())
            job = self._daemon.until_up(lambda: self._daemon.register(body), "register")
            live.gate.posted(job.id)
            self.epoch = self._daemon.until_up(
                lambda: self._daemon.wait_job(job.id, self._register_timeout_s, opened=True), "finish registering"
            ).epoch
        except BaseException:
            live.gate.revoke("the registration failed")
            with live.gate.control.mutating():
                live.binding.move_out()
            live.drop()
            raise
        self._live, self._posted_step = live, step
        self._turns.forget()
        log.info(
            "run %s: rank %d of %d registered, launch %s, epoch %s, %d slices, %.1f MiB shared",
            self.run, self.rank, self.world, launch, self.epoch, len(plan.shards),
            live.binding.size_bytes / 2**20,
        )  # fmt: skip
        assert self.epoch is not None
        return self.epoch

    def close(self, *, unregister: bool = True) -> None:
        """Let a running read finish, say goodbye to the daemon, and remove the files. Idempotent; training may go on.

        Versions already posted are finished by the daemon. In a process forked from the trainer this does nothing.
        """
        live, self._live = self._live, None
        if live is not None and not live.ours:
            return
        if live is not None:
            live.gate.wait()
            if unregister:
                with contextlib.suppress(ClientError):
                    self._daemon.unregister(self.run, live.launch, self.rank)
            live.drop()
        self._last, self._missed = None, None
        self._daemon.close()

    def __enter__(self) -> Self:
        if self._live is None:
            self.register()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    # --- training ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """Wrap every write to declared tensors that is not an optimizer step: clipping, offload, merging, loading."""
        with self._registered().gate.mutating():
            yield

    def sync(self, step: int, *, publish: bool = True) -> SyncHandle:
        """Publish the weights as they are after optimizer step `step`, or accumulate them.

        They accumulate when `publish` is False, when the last version is still undecided, or when a rank's daemon is
        down; the next version then carries them. Returns after one short POST; the next optimizer step waits for the
        read, not this call. All ranks call it for the same steps. Syncing the same step again returns the same job, and
        may be done by one rank alone. A step in which a rank raised becomes no version: the other ranks accumulate it,
        so does that rank if it syncs it again, and otherwise its next sync carries it.

        Raises StateConflict (superseded by a newer launch, steps going back, a parameter replaced), InvalidInput (a
        step that cannot be undone), or ApiError.
        """
        if self._live is not None:
            self._registered()  # a fork of the trainer takes no part in what its ranks agree on
        if (turn := self._turns.known(step)) is not None:
            return self._again(turn)
        turn, mine = self._turns.take(step, lambda: self._ready(publish))
        if not mine.up:
            return self._without_daemon(step)
        return self._post(self._registered(), step, turn.version if publish else None)

    # --- sync, in pieces ---------------------------------------------------------------------------------------------

    def _ready(self, publish: bool) -> Ready:
        """Make everything ready to be read, and ask for the number that this rank's daemon would publish next."""
        live = self._prepare()
        self._report_last()
        return self._cut(live) if publish else Ready(ACCUMULATE)

    def _prepare(self) -> Live:
        live = self._registered()
        live.watch.settle()
        live.watch.hypers()
        self._check()
        return live

    def _cut(self, live: Live) -> Ready:
        try:
            self._confess()
            cut = self._ask(live)
        except ClientError as e:
            if not is_down(e):
                raise
            log.warning("run %s: %s Training goes on; the next sync carries this step too.", self.run, e)
            return Ready(ACCUMULATE, up=False)
        if self.epoch is not None and cut.epoch > self.epoch:
            raise StateConflict(
                f"epoch {cut.epoch} of run {self.run} is open; this trainer is of epoch {self.epoch} and superseded.",
                remedy="Stop it: a newer launch of the run has taken over.",
            )
        return Ready(ACCUMULATE if cut.version is None else cut.version)

    def _ask(self, live: Live) -> Cut:
        def ask() -> Cut:
            return self._daemon.until_up(lambda: self._daemon.cut(self.run, self.rank), "ask for the next version")

        try:
            return ask()
        except NotFound as e:
            self._rejoin(live, e)
        return ask()

    def _rejoin(self, live: Live, why: NotFound) -> None:
        """Register again under the same launch at a daemon that has lost its spool; raises `why` if it is not that.

        The epoch goes on. What the daemon had read is lost, so the next version carries this rank's tiles whole;
        nothing is read now, and the trainer is not held. The step at hand is still to be synced, so it is not named.
        """
        if why.problem_code != "unknown-rank":
            raise why
        log.warning("run %s: the daemon has lost rank %d; registering it again.", self.run, self.rank)
        body = live.registration(self.run, self.rank, self.world, self._posted_step, hold=live.gate.take_over())
        live.gate.posted(self._daemon.until_up(lambda: self._daemon.register(body), "register again").id)
        live.watch.told()

    def _confess(self) -> Job | None:
        """Post, late and with its hold revoked, a version whose parts other ranks' daemons hold already. Its job.

        Only this rank's daemon may say that its own part will never come; the revoked hold makes it say so.
        """
        if (missed := self._missed) is None:
            return None
        job = None
        try:
            job = self._daemon.sync(missed)
        except ApiError as e:
            if is_down(e):
                raise
            log.warning("run %s: version %s of step %d: %s", self.run, missed.version, missed.step, e)
        self._missed = None
        return job

    def _post(self, live: Live, step: int, version: int | None) -> SyncHandle:
        assert self.epoch is not None
        request = live.request(self.run, self.rank, self.epoch, step, version, hold=live.gate.take())
        try:
            job = self._daemon.until_up(lambda: self._daemon.sync(request), "sync")
        except DteError as e:
            live.gate.revoke("the sync could not be posted")
            if isinstance(e, NotFound):
                self._rejoin(live, e)
                return self._without_daemon(step)
            if version is not None:
                self._missed = request
            if not is_down(e):
                raise
            log.warning("run %s: %s Training goes on; the next sync carries this step too.", self.run, e)
            return self._without_daemon(step)
        live.gate.posted(job.id)
        live.watch.told()
        return self._synced(request, job)

    def _synced(self, request: SyncRequest, job: Job) -> SyncHandle:
        handle = SyncHandle(request.step, job.version, job.id, self._daemon)
        self._last, self._posted_step = (request, handle), request.step
        self._syncs += 1
        return handle

    def _again(self, turn: Turn) -> SyncHandle:
        """The same step once more: the same answer, unless the weights are not the same any more.

        What has changed since a step that failed on some rank goes into the next version, like the step itself.
        """
        live, step = self._registered(), turn.step
        if self._last is None or self._last[0].step != step:
            return self._late(live, step)
        request, handle = self._last
        control = live.gate.control
        if not turn.failed and control.generation != request.generation and control.revoked < request.hold:
            raise StateConflict(
                f"step {step} was synced already and the weights have changed since.",
                remedy="Give every optimizer step its own number.",
            )
        return handle

    def _late(self, live: Live, step: int) -> SyncHandle:
        """Sync a step that was agreed on and that this rank's daemon has not got. It only accumulates.

        The other ranks have posted the step, so what this rank holds by now may not be of the same one.
        """
        self._prepare()
        missed = self._missed
        try:
            job = self._confess()
        except ClientError as e:
            if not is_down(e):
                raise
            log.warning("run %s: %s Training goes on; the next sync carries this step too.", self.run, e)
            return self._without_daemon(step)
        if job is not None and missed is not None and missed.step == step:
            return self._synced(missed, job)
        return self._post(live, step, None)

    def _without_daemon(self, step: int) -> SyncHandle:
        self._down += 1
        return SyncHandle(step, None, None, self._daemon)

    def _report_last(self) -> None:
        """Say when the previous sync failed, for those who never look at handles."""
        if self._last is not None and (job := self._last[1].failed()) is not None:
            why = f": {job.problem.title}. {job.problem.detail}" if job.problem is not None else ""
            log.warning("run %s: the sync of step %d ended as %s%s", self.run, job.step, job.state, why)

    # --- life --------------------------------------------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        planner = Planner(
            self._optimizers, names=self._names, detector=self._detector, dtypes=self._dtypes, partial=self.world > 1
        )
        self._declare(planner)
        return planner.finish()

    def _cuda(self) -> Cuda:
        """How memory of devices is shared."""
        return TorchCuda()

    def _registered(self) -> Live:
        if self._live is None:
            raise StateConflict("this source is not registered.", remedy="Call register() first.")
        if not self._live.ours:
            raise StateConflict(
                "this process was forked from the trainer, which goes on with the source.",
                remedy="Use the source in the process that registered it, or give this one a source and a copy of the "
                "model of its own.",
            )
        return self._live
