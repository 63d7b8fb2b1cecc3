"""Slices that lie on a CUDA device, read by the worker's state machine through a device that does not exist."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from app.worker import protocol as p
from app.worker.rank import RankWorker
from clients.protocol import CudaRef, MemoryRef, RankRegistration, SliceSpec, SyncRequest
from engine.optimizers import selftest
from tests.support.fake_cuda import UUID, FakeCuda
from tests.support.trainer import ScriptedTrainer


def on_device(ref: MemoryRef, **changes: Any) -> CudaRef:
    """The same memory, named as an export of a device's."""
    fields = {
        "device": UUID,
        "handle": base64.b64encode(ref.file.encode().ljust(66, b" ")).decode(),
        "storage_offset_bytes": 0,
        "storage_bytes": 4 << 20,
        "offset_bytes": ref.offset_bytes,
        "numel": ref.numel,
        "dtype": ref.dtype,
        "event": base64.b64encode(b"e" * 64).decode(),
    }
    return CudaRef.model_validate(fields | changes)


def moved(spec: SliceSpec, *, theta_only: bool = False, **changes: Any) -> SliceSpec:
    refs = {"theta": spec.theta, "exp_avg": spec.exp_avg, "exp_avg_sq": spec.exp_avg_sq}
    there = {
        k: on_device(r, **changes)
        for k, r in refs.items()
        if isinstance(r, MemoryRef) and (k == "theta" or not theta_only)
    }
    return spec.model_copy(update=there)


class Pair:
    """The same trainer read through shared memory and through the device: both must say the same."""

    def __init__(self, root: Path) -> None:
        self.trainer = ScriptedTrainer()
        self.cuda = FakeCuda()
        self.plain = self.trainer.registration()
        self.workers = []
        for name, registration in (("plain", self.plain), ("device", self.registration())):
            (root / name).mkdir()
            self.workers.append(
                RankWorker(
                    p.Open(registration=registration, spool=str(root / name), options=p.WorkerOptions(group_tiles=1)),
                    cuda=self.cuda,
                )
            )

    def registration(self, **changes: Any) -> RankRegistration:
        # The first slice has its moments on the host, as trainers have that offload only those.
        slices = [moved(s, theta_only=s.slice == 0, **changes) for s in self.plain.slices]
        return self.plain.model_copy(update={"slices": slices})

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.trainer.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_a_device_is_read_as_host_memory_is(pair: Pair) -> None:
    r, calls = pair.plain, pair.cuda.calls
    assert [w.open().attached for w in pair.workers] == [True, True]
    assert calls == ["open", "wait", "copy", "finish"]
    assert all(w._steps.exact == {"torch-adamw/cpu/single": True} for w in pair.workers)
    firsts = [w.initial(p.Initial(generation=r.generation, hold=r.hold)) for w in pair.workers]
    assert firsts[0] == firsts[1]
    for w in pair.workers:
        w.begin(p.Begin(epoch=1, version=0, base=None, differs=[], generation=r.generation, hold=r.hold))
        w.settle(p.Settle(version=0, committed=True))
    for version in (1, 2):
        pair.trainer.step()
        sync: SyncRequest = pair.trainer.sync(version)
        calls.clear()
        reads = [w.read(p.Read(sync=sync, base=version - 1)) for w in pair.workers]
        assert calls[:2] == ["open", "wait"]
        assert reads[0].detail == reads[1].detail
        assert reads[0].detail["slices_detected"] > 0
        ends = []
        for w in pair.workers:
            files: list[p.EncodedChunkFile] = []
            end = w.encode(p.Encode(version=version), files.append)
            ends.append((end.slices, [f.sha256 for f in files]))
            w.settle(p.Settle(version=version, committed=True))
        assert ends[0] == ends[1]


def test_nothing_stays_mapped_when_the_hold_is_released(pair: Pair) -> None:
    worker, r = pair.workers[1], pair.plain
    opened = worker._steps._memory.device.opened
    worker.open()
    assert not opened._storages
    seen: list[int] = []
    control = worker._attached()
    release = control.release
    control.release = lambda hold: (seen.append(len(opened._storages)), release(hold))  # type: ignore[method-assign,assignment]
    worker.initial(p.Initial(generation=r.generation, hold=r.hold))
    worker.begin(p.Begin(epoch=1, version=0, base=None, differs=None, generation=r.generation, hold=r.hold))
    worker.settle(p.Settle(version=0, committed=True))
    pair.trainer.step()
    assert worker.read(p.Read(sync=pair.trainer.sync(1), base=0)).published == 1
    assert seen == [0, 0]
    worker.settle(p.Settle(version=1, committed=True))
    pair.trainer.step()
    sync = pair.trainer.sync(2)
    pair.trainer.ranks[0].control.revoke()
    assert worker.read(p.Read(sync=sync, base=1)).revoked
    assert not opened._storages


@pytest.mark.parametrize(
    ("changes", "refuses", "message"),
    [
        ({"device": "0" * 8 + "-0000-0000-0000-" + "0" * 12}, "", "sees no CUDA device"),
        ({}, "open", "invalid resource handle"),
        ({"storage_bytes": 100}, "", "does not lie in a storage"),
        ({"offset_bytes": 3}, "", "does not lie in a storage"),
        ({"handle": "A" * 25}, "", "not base64"),
    ],
)
def test_what_cannot_be_mapped_is_said(
    tmp_path: Path, pair: Pair, changes: dict[str, Any], refuses: str, message: str
) -> None:
    cuda = FakeCuda(refuses=refuses)
    registration = pair.registration(**changes)
    worker = RankWorker(p.Open(registration=registration, spool=str(tmp_path), options=p.WorkerOptions()), cuda=cuda)
    opened = worker.open()
    worker.close()
    assert (opened.attached, opened.unmappable) == (False, True)
    assert re.search(message, opened.why), opened.why


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "GPU-0"},
        {"handle": "not base64!" * 4},
        {"handle": "A" * 400_000},
        {"event": "AAAA"},
        {"storage_bytes": 0},
        {"storage_offset_bytes": -1},
        {"storage_bytes": 1 << 60},
        {"dtype": "float8_e4m3fn"},
        {"more": 1},
    ],
)
def test_fields_are_checked_before_anything_is_touched(changes: dict[str, Any]) -> None:
    good = on_device(MemoryRef(file="dte-x", offset_bytes=0, numel=4, dtype="float32"))
    with pytest.raises(ValidationError):
        CudaRef.model_validate(good.model_dump() | changes)


def test_the_contracted_twin_is_taken_only_when_it_is_the_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"torch-adamw/cuda/foreach-fma", "torch-adamw/cuda/fused"}

    def passes(formula: Any, device: str) -> selftest.SelfTestResult:
        assert device == "cuda:3"
        return selftest.SelfTestResult(formula.name in right, "because")

    monkeypatch.setattr(selftest, "passes", passes)
    for name, chosen, ok in (
        ("torch-adamw/cuda/foreach", "torch-adamw/cuda/foreach-fma", True),
        ("torch-adamw/cuda/fused", "torch-adamw/cuda/fused", True),
        ("torch-adamw/cuda/capturable", "torch-adamw/cuda/capturable", False),
        ("torch-adamw/cuda/single", "torch-adamw/cuda/single", False),
    ):
        formula, result = selftest.choose(name, 3)
        assert (formula.name, result.ok) == (chosen, ok)


def test_a_formula_of_a_device_is_not_exact_where_that_cannot_be_shown() -> None:
    formula, result = selftest.choose("torch-adamw/cuda/foreach", None)
    assert (formula.name, result.ok) == ("torch-adamw/cuda/foreach", False)
    assert torch.device("cpu").type in result.detail
