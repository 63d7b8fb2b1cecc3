"""`RankWorker`: one trainer rank's state machine in the worker process, one method per request.

Invariants: what a read learned is either durable in the ledger or not remembered at all; the trainer's hold is released
only after that; the ledger in memory equals the one on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from app.worker import protocol as p
from app.worker.encoder import VersionEncoder, slice_result
from app.worker.lanes import LanesWriter
from app.worker.reader import SliceReader, TornRead
from app.worker.replicas import declarations, digests_of
from app.worker.source import SliceShape, declaration
from app.worker.spool import RankSpool, write_atomic
from app.worker.steps import StepReader
from clients.protocol import RankRegistration, SyncRequest
from engine import ledger as ledger_bytes
from engine.detect import backends
from engine.digest import add_all, from_hex, to_hex
from engine.errors import CodecError, InvalidInput, StateConflict
from engine.ledger import InFlight, Ledger, SliceLedger
from engine.pending import empty, fold
from transports.memory.cuda_ipc import Cuda, DeviceMemoryError
from transports.memory.generation import ControlBlock
from transports.memory.shm import SharedMemoryError

log = logging.getLogger(__name__)


class RankWorker:
    """Built by `open`; then `initial`, `begin`, `read`, `settle` one at a time, `encode` beside them."""

    def __init__(self, request: p.Open, clock: Callable[[], float] = time.monotonic, cuda: Cuda | None = None) -> None:
        self._registration: RankRegistration = request.registration
        self._options = request.options
        self._spool = RankSpool.of_root(request.spool)
        self._control: ControlBlock | None = None
        self._ledger: Ledger | None = None
        self._lock = threading.Lock()
        backend = backends.get(self._options.backend, threads=self._options.threads)
        self._clock = clock
        self._reader = SliceReader(
            backend, group_tiles=self._options.group_tiles, dense_fraction=self._options.dense_fraction, clock=clock
        )
        self._steps = StepReader(self._registration, self._reader, cuda)
        self._shapes = self._steps.shapes

    # --- opening ---------------------------------------------------------------------------------------------------

    def open(self) -> p.Opened:
        """Map memory, run the formula self-tests, load the ledger."""
        attached, why, unmappable = True, "", False
        try:
            self._control = ControlBlock.open(self._registration.control)
            if self._control.owner_alive():
                inexact = self._steps.attach()
                for name, detail in inexact.items():
                    log.warning("replay of %s may not drop elements: %s", name, detail)
            else:
                # Not mapped: the next trainer on this node needs the room.
                attached, why = False, "the trainer process is gone."
        except SharedMemoryError as error:
            attached, why = False, str(error)
        except DeviceMemoryError as error:
            attached, why, unmappable = False, error.message, True
        damaged = self._load()
        known = self._ledger
        flight = None if known is None else known.in_flight
        self._spool.drop_others(None if flight is None else flight.version)
        return p.Opened(
            attached=attached,
            why=why,
            unmappable=unmappable,
            exact_replay=self._steps.exact,
            read=known is not None,
            epoch=None if known is None else known.epoch,
            step=None if known is None else known.step,
            base=None if known is None else known.base,
            in_flight=None if flight is None else flight.version,
            in_flight_step=None if flight is None else flight.step,
            ledger_damaged=damaged,
        )

    def _load(self) -> bool:
        try:
            known = ledger_bytes.decode(self._spool.ledger_file.read_bytes())
        except FileNotFoundError:
            return False
        except CodecError as error:
            log.error("the ledger is not usable: %s", error)
            return True
        fits = (known.run, known.launch, known.rank) == (
            self._registration.run,
            self._registration.launch,
            self._registration.rank,
        ) and [(s.slice, s.lanes) for s in known.slices] == [(s.spec.slice, s.lanes) for s in self._shapes]
        if not fits:
            log.error("the ledger belongs to another registration")
            return True
        self._ledger = known
        return False

    def _save(self, new: Ledger) -> None:
        write_atomic(self._spool.ledger_file, ledger_bytes.encode(new))
        with self._lock:
            self._ledger = new

    def _known(self) -> Ledger:
        if self._ledger is None:
            raise StateConflict("this rank has not been read yet.")
        return self._ledger

    def _attached(self) -> ControlBlock:
        if self._control is None or not self._steps.attached:
            raise StateConflict("the trainer's memory is not mapped.", remedy="Register the rank again.")
        return self._control

    # --- registration ----------------------------------------------------------------------------------------------

    def initial(self, request: p.Initial) -> p.InitialDone:
        """Digest all slices under the registration's hold. The hold stays."""
        control = self._attached()
        if not control.intact(request.generation, request.hold):
            return p.InitialDone(revoked=True)
        try:
            slices = self._steps.digests()
        finally:
            self._steps.rest()
        if not control.intact(request.generation, request.hold):
            return p.InitialDone(revoked=True)
        self._save(
            Ledger(
                run=self._registration.run,
                launch=self._registration.launch,
                rank=self._registration.rank,
                epoch=None,
                step=self._registration.step,
                base=None,
                in_flight=None,
                slices=tuple(slices),
            )
        )
        return p.InitialDone(
            slices=[declaration(s, to_hex(_last_total(x))) for s, x in zip(self._shapes, slices, strict=True)],
            replicas=declarations(self._steps.replicas.shapes),
        )

    def begin(self, request: p.Begin) -> p.ReadDone:
        """The epoch is open: set the base, and put its first version in flight if it has one."""
        known = self._known()
        if known.epoch == request.epoch:
            self._release(request.hold)
            flight = known.in_flight
            return p.ReadDone(published=None if flight is None else flight.version)
        differs = None if request.differs is None else frozenset(request.differs)
        slices = tuple(
            _based(s, x, dense=differs is None or s.meta.name in differs)
            for s, x in zip(self._shapes, known.slices, strict=True)
        )
        opened = replace(known, epoch=request.epoch, base=request.base, slices=slices)
        if request.version is None:
            self._save(opened)
            self._release(request.hold)
            return p.ReadDone()
        done = self._finish_read(opened, request.version, request.generation, request.hold, Counter(), {})
        if done.revoked:
            self._save(opened)
        return done

    def rebase(self, request: p.Rebase) -> p.Done:
        """Start over after the ledger was lost: nothing is known but the slices' digests at the newest commit."""
        if len(request.digests) != len(self._shapes):
            raise InvalidInput("one digest per slice is needed.")
        slices = tuple(
            SliceLedger(
                slice=s.spec.slice,
                lanes=s.lanes,
                step=-1,
                digest_last=None,
                digest_base=None,
                digest_base_total=None if d is None else from_hex(d),
                digest_sent=None,
                pending=empty(s.tiles, dense=True),
                in_flight=None,
            )
            for s, d in zip(self._shapes, request.digests, strict=True)
        )
        r = self._registration
        self._save(
            Ledger(
                run=r.run,
                launch=r.launch,
                rank=r.rank,
                epoch=request.epoch,
                step=0,
                base=request.base,
                in_flight=None,
                slices=slices,
            )
        )
        return p.Done()

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, request: p.Read) -> p.ReadDone:
        """Read one step under its hold, make what was learned durable, release the hold."""
        sync = request.sync
        known = self._known()
        control = self._attached()
        if sync.step <= known.step and known.step > 0:
            return self._read_before(sync, known)
        if sync.version is not None:
            if known.in_flight is not None:
                raise StateConflict(f"version {known.in_flight.version} of this rank is not decided yet.")
            if known.base != request.base:
                raise p.BaseMoved(f"this rank's base is version {known.base}, the chain's head {request.base}.")
        if not control.intact(sync.generation, sync.hold):
            return p.ReadDone(revoked=True)
        if request.left_s is not None:
            self._reader.until_s = self._clock() + request.left_s
        try:
            return self._read_now(request, known, control)
        finally:
            self._steps.rest()
            self._reader.until_s = None

    def _read_now(self, request: p.Read, known: Ledger, control: ControlBlock) -> p.ReadDone:
        sync = request.sync
        self._steps.move(sync)
        started = time.monotonic()
        counts: Counter[str] = Counter()
        reads = self._steps.read(known.slices, sync, counts)
        if not control.intact(sync.generation, sync.hold):
            return p.ReadDone(revoked=True)
        after = replace(known, step=sync.step, slices=tuple(r.ledger for r in reads))
        timings = {"detect": (time.monotonic() - started) * 1e3}
        if sync.version is not None:
            done = self._finish_read(
                after, sync.version, sync.generation, sync.hold, counts, timings, dense=request.dense
            )
        else:
            self._save(after)
            self._release(sync.hold)
            done = p.ReadDone(detail=dict(counts), timings_ms=timings)
        if not done.revoked:
            self._steps.keep(reads)
        return done

    def _read_before(self, sync: SyncRequest, known: Ledger) -> p.ReadDone:
        """A read that was durable before the worker died, asked for again."""
        flight = known.in_flight
        if sync.step != known.step or (sync.version is not None and (flight is None or flight.version != sync.version)):
            raise StateConflict(f"step {sync.step} was not read; step {known.step} was.")
        self._release(sync.hold)
        if sync.version is None or flight is None:
            return p.ReadDone()
        return p.ReadDone(published=flight.version, detail=flight.detail, timings_ms=flight.timings_ms)

    def _finish_read(
        self,
        after: Ledger,
        version: int,
        generation: int,
        hold: int,
        counts: Counter[str],
        timings: dict[str, float],
        *,
        dense: bool = False,
    ) -> p.ReadDone:
        """Put `version` in flight: spool its dense lanes, then the ledger, then release. Nothing stays if revoked."""
        control = self._attached()
        started = time.monotonic()
        writer = LanesWriter(self._spool.lanes_file(version))
        try:
            slices = self._steps.publish(after.slices, writer, counts, dense=dense)
            replicas = self._steps.replicas.digests()
            if not control.intact(generation, hold):
                raise TornRead("the hold was revoked")
            writer.finish()
            timings = {**timings, "spool": (time.monotonic() - started) * 1e3}
            detail = dict(counts)
            flight = InFlight(version, after.step, after.base, detail, timings, replicas)
            self._save(replace(after, in_flight=flight, slices=slices))
        except TornRead as error:
            writer.abandon()
            log.warning("version %d: the read is thrown away: %s", version, error)
            return p.ReadDone(revoked=True)
        except BaseException:
            writer.abandon()
            raise
        finally:
            self._steps.rest()
        self._release(hold)
        return p.ReadDone(published=version, detail=detail, timings_ms=timings)

    def _release(self, hold: int) -> None:
        self._steps.rest()
        if self._control is not None:
            self._control.release(hold)

    def release(self, request: p.Release) -> p.Done:
        """Give a hold back unread."""
        self._release(request.hold)
        return p.Done()

    @property
    def shapes(self) -> list[SliceShape]:
        """The rank's slices, in lanes."""
        return self._shapes

    def in_flight(self, version: int) -> tuple[Ledger, Path]:
        """The ledger with the version in flight, and where its dense lanes are; SpoolLost if it is another one."""
        with self._lock:
            known = self._ledger
        if known is None or known.in_flight is None or known.in_flight.version != version:
            raise p.SpoolLost(f"version {version} is not in the spool.")
        return known, self._spool.lanes_file(version)

    # --- publishing ------------------------------------------------------------------------------------------------

    def encode(self, request: p.Encode, on_chunk: Callable[[p.EncodedChunkFile], None]) -> p.EncodeDone:
        """Encode the version in flight; safe beside a read, because a version in flight does not change."""
        known, _ = self.in_flight(request.version)
        flight = known.in_flight
        assert flight is not None
        started = time.monotonic()
        chunks = VersionEncoder(self._spool, self._shapes, known, self._options.chunk_bytes).run(on_chunk)
        return p.EncodeDone(
            chunks=chunks,
            step=flight.step,
            base=flight.base,
            slices=[slice_result(s, x) for s, x in zip(self._shapes, known.slices, strict=True)],
            replicas=digests_of(flight.replicas),
            detail=flight.detail,
            timings_ms={**flight.timings_ms, "encode": (time.monotonic() - started) * 1e3},
        )

    def settle(self, request: p.Settle) -> p.Done:
        """The version in flight is decided."""
        known = self._known()
        if known.in_flight is not None and known.in_flight.version == request.version:
            slices = tuple(
                _settled(s, committed=request.committed, dense=request.dense and not request.committed)
                for s in known.slices
            )
            base = request.version if request.committed else known.base
            self._save(replace(known, base=base, in_flight=None, slices=slices))
        self._spool.drop_version(request.version)
        return p.Done()

    def detach(self, _: p.Detach | None = None) -> p.Done:
        """Let go of the trainer's memory; reads fail from now on."""
        self._steps.close()
        if self._control is not None:
            self._control.close()
            self._control = None
        return p.Done()

    def close(self) -> None:
        """Give up all mappings."""
        self.detach()


def _last_total(s: SliceLedger) -> int:
    assert s.digest_last is not None
    return add_all(s.digest_last)


def _based(shape: SliceShape, s: SliceLedger, *, dense: bool) -> SliceLedger:
    if dense:
        return replace(s, digest_base=None, digest_base_total=None, pending=empty(shape.tiles, dense=True))
    return replace(s, digest_base=s.digest_last, digest_base_total=_last_total(s))


def _settled(s: SliceLedger, *, committed: bool, dense: bool) -> SliceLedger:
    if s.in_flight is None:
        return s
    if committed:
        total = None if s.digest_sent is None else add_all(s.digest_sent)
        return replace(s, digest_base=s.digest_sent, digest_base_total=total, digest_sent=None, in_flight=None)
    back = fold(s.in_flight, s.pending)
    if dense:
        return replace(
            s,
            digest_base=None,
            digest_base_total=None,
            digest_sent=None,
            in_flight=None,
            pending=empty(back.dense.size, dense=True),
        )
    return replace(s, digest_sent=None, in_flight=None, pending=back)
