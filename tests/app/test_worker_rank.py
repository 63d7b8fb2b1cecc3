"""The worker's state machine in this process: what it remembers, when it lets go, and what it never believes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.worker import protocol as p
from app.worker.rank import RankWorker
from engine import ledger as ledger_bytes
from engine.errors import StateConflict
from engine.ledger import Ledger
from tests.support.trainer import ScriptedTrainer


class Bench:
    """One rank's worker, driven by hand."""

    def __init__(self, trainer: ScriptedTrainer, root: Path) -> None:
        self.trainer = trainer
        self.root = root
        self.base: int | None = None
        self.registration = trainer.registration()
        self.hold = self.registration.hold
        self.worker = self.again()

    def again(self) -> RankWorker:
        """A new worker on the same spool."""
        worker = RankWorker(p.Open(registration=self.registration, spool=str(self.root), options=p.WorkerOptions()))
        self.opened = worker.open()
        self.worker = worker
        return worker

    def begin(self, differs: list[str] | None = None) -> p.ReadDone:
        r = self.registration
        assert not self.worker.initial(p.Initial(generation=r.generation, hold=r.hold)).revoked
        return self.worker.begin(
            p.Begin(epoch=1, version=0, base=None, differs=differs, generation=r.generation, hold=r.hold)
        )

    def read(self, version: int | None, *, dense: bool = False, **changes: object) -> p.ReadDone:
        return self.worker.read(p.Read(sync=self.trainer.sync(version, **changes), base=self.base, dense=dense))

    def settle(self, version: int, *, committed: bool = True, dense: bool = False) -> None:
        self.worker.settle(p.Settle(version=version, committed=committed, dense=dense))
        self.base = version if committed else self.base

    def chunks(self, version: int) -> tuple[list[p.EncodedChunkFile], p.EncodeDone]:
        files: list[p.EncodedChunkFile] = []
        return files, self.worker.encode(p.Encode(version=version), files.append)

    @property
    def ledger(self) -> Ledger:
        """As it is on disk."""
        return ledger_bytes.decode((self.root / "ledger.dtl").read_bytes())

    def tamper(self, ledger: Ledger) -> None:
        """Put another ledger on disk and start over."""
        (self.root / "ledger.dtl").write_bytes(ledger_bytes.encode(ledger))
        self.again()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    trainer = ScriptedTrainer()
    made = Bench(trainer, tmp_path)
    yield made
    made.worker.close()
    trainer.close()


def test_the_hold_is_released_only_when_the_ledger_is_durable(bench: Bench) -> None:
    assert bench.opened.attached
    assert not bench.opened.read
    assert bench.opened.exact_replay == {"torch-adamw/cpu/single": True}
    control = bench.trainer.ranks[0].control
    bench.begin()
    assert control.released == bench.hold
    bench.settle(0)
    bench.trainer.step()
    (bench.root / "ledger.dtl.part").mkdir()
    before = bench.ledger
    with pytest.raises(OSError, match="ledger"):
        bench.read(1)
    assert control.released < bench.trainer.ranks[0].hold
    assert bench.ledger.step == before.step
    assert not (bench.root / "lanes-1.bin").exists()
    (bench.root / "ledger.dtl.part").rmdir()
    assert bench.read(1).published == 1
    assert control.released == bench.trainer.ranks[0].hold


@pytest.mark.parametrize("version", [None, 1])
def test_a_revoked_read_leaves_no_trace(bench: Bench, version: int | None) -> None:
    bench.begin()
    bench.settle(0)
    bench.trainer.step()
    before = (bench.root / "ledger.dtl").read_bytes()
    sync = bench.trainer.sync(version)
    bench.trainer.ranks[0].control.revoke()
    assert bench.worker.read(p.Read(sync=sync, base=0)).revoked
    assert (bench.root / "ledger.dtl").read_bytes() == before
    assert sorted(f.name for f in bench.root.iterdir()) == ["ledger.dtl"]
    odd = bench.trainer.sync(version, generation=bench.trainer.ranks[0].control.generation + 1)
    assert bench.worker.read(p.Read(sync=odd, base=0)).revoked


def test_a_read_asked_for_again_is_the_same_read(bench: Bench) -> None:
    bench.begin()
    bench.settle(0)
    bench.trainer.step()
    first = bench.read(1)
    bench.again()
    assert (bench.opened.in_flight, bench.opened.step) == (1, 1)
    again = bench.read(1)
    assert (again.published, again.detail) == (1, first.detail)
    assert bench.trainer.released()
    with pytest.raises(StateConflict, match="was not read"):
        bench.read(2)
    bench.trainer.step()
    with pytest.raises(StateConflict, match="not decided"):
        bench.read(2)
    bench.settle(1)
    bench.base = 0
    with pytest.raises(StateConflict, match="base"):
        bench.read(2)


def test_encoding_again_gives_the_same_chunks(bench: Bench) -> None:
    bench.begin()
    files, done = bench.chunks(0)
    assert all(s.digest_base is None and s.dense_tiles == s.tiles for s in done.slices)
    assert len(files) == done.chunks > 0
    bench.again()
    assert [f.sha256 for f in bench.chunks(0)[0]] == [f.sha256 for f in files]


def test_damaged_spooled_lanes_are_never_sent(bench: Bench) -> None:
    bench.begin()
    lanes = bench.root / "lanes-0.bin"
    data = bytearray(lanes.read_bytes())
    data[1000] ^= 4
    lanes.write_bytes(bytes(data))
    with pytest.raises(p.SpoolLost, match="damaged"):
        bench.chunks(0)
    lanes.write_bytes(bytes(data[:-2]))
    with pytest.raises(p.SpoolLost, match="bytes instead of"):
        bench.chunks(0)
    lanes.unlink()
    with pytest.raises(p.SpoolLost, match="missing"):
        bench.chunks(0)


def test_a_delta_that_does_not_explain_the_way_from_the_base_goes_dense(bench: Bench) -> None:
    bench.begin()
    bench.settle(0)
    known = bench.ledger
    wrong = known.slices[0]
    assert wrong.digest_base is not None
    digests = wrong.digest_base.copy()
    digests[0] += np.uint64(1)
    bench.tamper(replace(known, slices=(replace(wrong, digest_base=digests), *known.slices[1:])))
    bench.trainer.step()
    done = bench.read(1)
    assert done.detail["failed_tiles"] == 1
    assert bench.ledger.slices[0].in_flight is not None
    assert bench.ledger.slices[0].in_flight.dense.tolist() == [True, False]


def test_an_abort_gives_everything_back_and_a_rejection_believes_nothing(bench: Bench) -> None:
    bench.begin()
    bench.settle(0)
    bench.trainer.step()
    bench.read(1)
    sent = bench.ledger.slices[0].in_flight
    assert sent is not None
    bench.settle(1, committed=False)
    assert np.array_equal(bench.ledger.slices[0].pending.ranks, sent.ranks)
    bench.trainer.step()
    bench.read(2)
    bench.settle(2, committed=False, dense=True)
    assert all(s.pending.dense.all() and s.digest_base_total is None for s in bench.ledger.slices)


def test_a_trainer_that_is_gone_can_still_be_published(bench: Bench) -> None:
    bench.begin()
    bench.trainer._file.unlink()
    bench.again()
    assert not bench.opened.attached
    assert bench.opened.in_flight == 0
    assert bench.chunks(0)[1].chunks > 0
    bench.settle(0)
    with pytest.raises(StateConflict, match="not mapped"):
        bench.read(None)


def mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


def test_a_dense_version_is_dense_everywhere_and_says_how_many_lanes_that_are(bench: Bench) -> None:
    bench.begin()
    bench.settle(0)
    # No step, no change.
    bench.trainer.step_number += 1
    done = bench.read(1, dense=True)
    assert done.published == 1
    slices = bench.chunks(1)[1].slices
    lanes = [s.lanes for s in bench.ledger.slices]
    assert [(s.dense_tiles, s.dense_lanes) for s in slices] == [
        (s.tiles, n) for s, n in zip(slices, lanes, strict=True)
    ]
    assert all(s.digest_base is not None for s in slices)
    bench.settle(1)
    bench.trainer.step()
    assert bench.read(2).detail["dense_tiles"] == 0


def test_a_short_last_tile_counts_its_own_lanes(bench: Bench) -> None:
    bench.begin()
    bench.settle(0)
    known = bench.ledger
    embed = known.slices[0]
    pending = replace(embed.pending, dense=np.array([False, True]))
    bench.tamper(replace(known, slices=(replace(embed, pending=pending), *known.slices[1:])))
    bench.trainer.step()
    bench.read(1)
    first = bench.chunks(1)[1].slices[0]
    assert (first.dense_tiles, first.dense_lanes) == (1, embed.lanes - 65536)


@pytest.mark.parametrize("calls", [1, 2, 8])
def test_a_read_that_takes_too_long_is_given_up_and_leaves_no_trace(bench: Bench, calls: int) -> None:
    """The clock runs out at the start, in the middle, or while the dense lanes are spooled."""
    bench.begin()
    bench.settle(0)
    bench.trainer.step()
    before = (bench.root / "ledger.dtl").read_bytes()
    ticks = iter([0.0] * calls + [100.0] * 1000)
    bench.worker._reader._clock = bench.worker._clock = lambda: next(ticks)
    with pytest.raises(p.HoldTimeout) as given_up:
        bench.worker.read(p.Read(sync=bench.trainer.sync(1), base=0, dense=True, left_s=10.0))
    assert "hold_timeout_s" in given_up.value.remedy
    assert (bench.root / "ledger.dtl").read_bytes() == before
    assert sorted(f.name for f in bench.root.iterdir()) == ["ledger.dtl"]
    # Without a limit the same worker goes on; nothing of the read given up is remembered.
    assert bench.read(1).published == 1


def test_it_lets_go_of_the_trainers_memory(bench: Bench) -> None:
    name = bench.trainer._file.name
    bench.begin()
    bench.trainer.close()
    bench.trainer.optimizer = None
    for rank in bench.trainer.ranks:
        rank.pieces.clear()
    gc.collect()
    assert mapped(name)
    bench.worker.detach()
    gc.collect()
    assert not mapped(name)
    assert bench.chunks(0)[1].chunks > 0
    bench.settle(0)


def test_a_dead_trainers_memory_is_not_mapped(bench: Bench) -> None:
    bench.begin()
    opened = [bench.trainer._file.name, bench.trainer.ranks[0].control.name]
    bench.worker.close()
    bench.trainer._file.close()
    bench.trainer.ranks[0].control.close()  # their locks are free now; the names stay, as after a SIGKILL
    for rank in bench.trainer.ranks:
        rank.pieces.clear()
    bench.trainer.optimizer = None
    gc.collect()
    assert not any(mapped(name) for name in opened)
    bench.again()
    assert (bench.opened.attached, bench.opened.why) == (False, "the trainer process is gone.")
    gc.collect()
    assert not mapped(opened[0])


def test_replicas_are_read_in_the_versions_hold_and_their_digests_are_durable(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    whole = trainer.replicate("embed", 0, holders=0)
    halves = [trainer.replicate("norm", 0, 0, start, start + 48) for start in (0, 48)]
    bench = Bench(trainer, tmp_path)
    try:
        r = bench.registration
        initial = bench.worker.initial(p.Initial(generation=r.generation, hold=r.hold))
        assert [(d.tensor, d.holders, d.lanes) for d in initial.replicas] == [("embed", 0, 72 * 1024), ("norm", 0, 96)]
        assert {s.tensor: s.cell is not None for s in initial.slices if s.cell} == {"embed": True, "norm": True}
        bench.begin()
        published = {s.tensor: s.digest for s in bench.chunks(0)[1].slices}
        assert [x.digest for x in bench.chunks(0)[1].replicas] == [published["embed"], published["norm"]]
        bench.settle(0)
        trainer.step()
        trainer.flip(halves[1])
        assert bench.read(1).published == 1
        done = bench.chunks(1)[1]
        published = {s.tensor: s.digest for s in done.slices}
        embed, norm = done.replicas
        assert embed.digest == published["embed"]
        assert norm.digest != published["norm"]
        # What is read later, or by another worker, does not change what the part will say.
        whole.theta.zero_()
        bench.again()
        assert bench.chunks(1)[1].replicas == done.replicas
        bench.settle(1)
        trainer.step()
        accumulated = bench.read(None)
        assert not any("replica" in name for name in accumulated.detail)
    finally:
        bench.worker.close()
        trainer.close()


def test_a_read_that_takes_too_long_in_a_replica_is_given_up(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    trainer.replicate("embed", 0, holders=0)
    bench = Bench(trainer, tmp_path)
    try:
        bench.begin()
        bench.settle(0)
        trainer.step()
        worker = bench.worker
        worker._steps.replicas.digests = lambda: (_ for _ in ()).throw(p.HoldTimeout("too long"))  # type: ignore[method-assign]
        with pytest.raises(p.HoldTimeout):
            bench.read(1)
        assert bench.ledger.in_flight is None
        assert not (tmp_path / "lanes-1.bin").exists()
    finally:
        bench.worker.close()
        trainer.close()


def test_a_replicas_memory_may_move(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    replica = trainer.replicate("norm", 0, holders=0)
    bench = Bench(trainer, tmp_path)
    try:
        bench.begin()
        bench.settle(0)
        trainer.step()
        replica.ref = trainer._alloc(96, "float32")
        replica.theta = trainer._view(replica.ref)
        replica.follow()
        trainer.flip(replica)
        bench.read(1, replica_handles=trainer.replica_specs(0))
        done = bench.chunks(1)[1]
        assert done.replicas[0].digest != next(s.digest for s in done.slices if s.tensor == "norm")
    finally:
        bench.worker.close()
        trainer.close()
