"""`StepReader`: all slices of a rank, read for one step with the detector each of them needs.

One invariant: what it remembers between reads (the bits of `snapshot` slices) changes only in `keep`, so a
read that is thrown away leaves no trace.
"""

from __future__ import annotations

from collections import Counter

from app.worker.lanes import LanesWriter
from app.worker.reader import SliceRead, SliceReader
from app.worker.replicas import ReplicaReader
from app.worker.source import Memory, SliceShape, SliceSource, check_registration, check_slice, files_named
from clients.protocol import RankRegistration, SyncRequest
from engine.detect.base import U16
from engine.errors import InvalidInput
from engine.ledger import SliceLedger
from engine.optimizers import registry, selftest
from engine.optimizers.base import Formula, Hyper, StepContext
from engine.pending import empty
from transports.memory.cuda_ipc import Cuda


class StepReader:
    """Shapes are there from the start; memory only after `attach`."""

    def __init__(self, registration: RankRegistration, reader: SliceReader, cuda: Cuda | None = None) -> None:
        """Checks the whole registration: InvalidInput, LayoutError or UnsupportedOptimizer name what does not fit."""
        self._registration = registration
        self._reader = reader
        self._metas = {t.name: t for t in registration.tensors}
        self.shapes: list[SliceShape] = check_registration(registration)
        self.replicas = ReplicaReader(registration, reader)
        self._sources: list[SliceSource] = []
        self._memory = Memory(cuda)
        self._snapshots: dict[int, U16] = {}
        self.exact: dict[str, bool] = {}
        """Formulas in use → whether their replay may drop elements in this process."""
        self._formulas: dict[str, Formula] = {}

    def attach(self) -> dict[str, str]:
        """Map the trainer's memory and self-test the formulas; returns why formulas are not exact here, by name.

        SharedMemoryError or DeviceMemoryError if some of it cannot be mapped.
        """
        sources = [self._memory.source(s) for s in self.shapes]
        arrays = [a for s in [*sources, *self.replicas.attach(self._memory)] for a in s.arrays]
        self._memory.device.try_out(arrays)
        self._sources = sources
        index = self._memory.device.device_of(arrays)
        why: dict[str, str] = {}
        for name in sorted({g.name for g in self._registration.groups}):
            chosen, result = selftest.choose(name, index)
            self._formulas[name], self.exact[name] = chosen, result.ok
            if not result.ok:
                why[name] = result.detail
        return why

    def rest(self) -> None:
        """A read is over: map nothing that the trainer may want to free."""
        self._memory.device.rest()

    @property
    def attached(self) -> bool:
        return len(self._sources) == len(self.shapes)

    def digests(self) -> list[SliceLedger]:
        """A first ledger of every slice: the digests of the bits as they are now."""
        return [self._first(source) for source in self._sources]

    def read(self, known: tuple[SliceLedger, ...], sync: SyncRequest, counts: Counter[str]) -> list[SliceRead]:
        """Read every slice for one step."""
        return [
            self._read_slice(source, known[i], sync.steps[i], sync, counts) for i, source in enumerate(self._sources)
        ]

    def publish(
        self, ledgers: tuple[SliceLedger, ...], writer: LanesWriter, counts: Counter[str], *, dense: bool = False
    ) -> tuple[SliceLedger, ...]:
        """Every slice with what is pending (`dense`: with every tile) in flight, its dense lanes given to `writer`.
        TornRead as in SliceReader."""
        return tuple(
            self._reader.publish(source, s, writer, counts, dense=dense)
            for source, s in zip(self._sources, ledgers, strict=True)
        )

    def keep(self, reads: list[SliceRead]) -> None:
        """The read is durable: remember its bits where the detector needs them."""
        for source, read in zip(self._sources, reads, strict=True):
            number = source.shape.spec.slice
            if read.snapshot_full is not None:
                self._snapshots[number] = read.snapshot_full
            elif read.snapshot_change is not None:
                ranks, new = read.snapshot_change
                self._snapshots[number][ranks] = new

    def close(self) -> None:
        """Give up all mappings."""
        self._sources.clear()
        self.replicas.close()
        self._memory.close()

    def _first(self, source: SliceSource) -> SliceLedger:
        return SliceLedger(
            slice=source.shape.spec.slice,
            lanes=source.shape.lanes,
            step=-1,
            digest_last=self._reader.digests(source),
            digest_base=None,
            digest_base_total=None,
            digest_sent=None,
            pending=empty(source.shape.tiles),
            in_flight=None,
        )

    def move(self, sync: SyncRequest) -> None:
        """Map memory references that moved. InvalidInput if anything else of a declaration changed."""
        for spec in sync.handles:
            if not 0 <= spec.slice < len(self.shapes):
                raise InvalidInput(f"slice {spec.slice} was never registered.")
            old = self.shapes[spec.slice].spec
            if (spec.tensor, spec.numel, spec.detector, spec.blocks, spec.group, spec.remainder is None) != (
                old.tensor, old.numel, old.detector, old.blocks, old.group, old.remainder is None,
            ):  # fmt: skip
                raise InvalidInput(f"slice {spec.slice} may only move; its declaration changed.")
            self.shapes[spec.slice] = check_slice(spec, self._metas, len(self._registration.groups))
            self._sources[spec.slice] = self._memory.source(self.shapes[spec.slice])
        self.replicas.move(sync.replica_handles, self._memory)
        if sync.handles or sync.replica_handles:
            self._memory.keep_only(files_named([s.spec for s in (*self.shapes, *self.replicas.shapes)]))

    def _read_slice(
        self, source: SliceSource, known: SliceLedger, step: int, sync: SyncRequest, counts: Counter[str]
    ) -> SliceRead:
        spec = source.shape.spec
        if spec.detector == "frozen":
            counts["slices_frozen"] += 1
            if known.digest_last is not None and step == max(known.step, 0):
                return SliceRead(known)
            return self._reader.compare(source, known, step, counts)
        if spec.detector == "snapshot":
            return self._reader.snapshot(source, known, self._snapshots.get(spec.slice), step, counts)
        if spec.detector == "dense" or known.digest_last is None:
            return self._reader.compare(source, known, step, counts)
        assert spec.group is not None
        if known.step >= 0 and step == known.step:
            counts["slices_unchanged"] += 1
            before = counts["tiles_compared_dense"]
            read = self._reader.compare(source, known, step, counts)
            counts["outside_tiles"] += counts["tiles_compared_dense"] - before
            return read
        # The counter at the registration is not known: take one step for granted, the proof catches what is not so.
        one_step = step == known.step + 1 if known.step >= 0 else not self._unmoved(source, known)
        if one_step and step > 0:
            h = sync.hypers[spec.group]
            hyper = Hyper(h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.lr_is_tensor)
            name = self._registration.groups[spec.group].name
            counts["slices_detected"] += 1
            m_scale, v_scale = sync.scales[spec.slice] if sync.scales else (1.0, 1.0)
            return self._reader.certified(
                source,
                known,
                self._formulas.get(name) or registry.get(name),
                StepContext(hyper, step, m_scale, v_scale),
                counts,
                exact_replay=self.exact.get(name, False),
            )
        counts["slices_unjoined" if known.step >= 0 else "slices_unchanged"] += 1
        return self._reader.compare(source, known, step, counts)

    def _unmoved(self, source: SliceSource, known: SliceLedger) -> bool:
        return known.digest_last is not None and bool((self._reader.digests(source) == known.digest_last).all())
