"""The benchmarks run on recorded state, check what they time, and end with one JSON object."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.bench.construct import run_construct
from app.bench.memory import run_memory
from app.bench.p2p import Options, run_p2p
from app.bench.p2p_case import llama, make_case, synthetic
from app.bench.p2p_rank import compare
from app.bench.wire import run_wire
from app.demo.grpo import Grpo, GrpoSettings
from app.demo.record import Recorder, load
from app.demo.sampling import generate
from engine.errors import InvalidInput, ProofError
from engine.optimizers.base import Hyper
from tests.support.tiny_policy import load_tiny

STEPS = 3


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of the last of a few real optimizer steps of a tiny policy."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("record")
    policy = load_tiny(1)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=5e-6, weight_decay=0.01, fused=True)
    grpo = Grpo(policy.model, policy.tokenizer, GrpoSettings(), seed=1, optimizer=optimizer)
    recorder = Recorder(directory, list(policy.model.named_parameters()))
    optimizer.register_step_pre_hook(lambda *_: recorder.before() if grpo.step_count + 1 == STEPS else None)
    for _ in range(STEPS):
        for _ in grpo.update(grpo.collect(lambda request: generate(policy.model, request))):
            pass
    lr = optimizer.param_groups[0]["lr"]
    recorder.after(optimizer, "torch-adamw/cpu/fused", Hyper(lr, 0.9, 0.999, 1e-8, 0.01), STEPS)
    return directory


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def test_a_record_comes_back_as_it_was_written(record: Path) -> None:
    opened = load(record)
    assert opened.step == STEPS
    assert opened.numel == sum(t.numel for t in opened.tensors)
    before = torch.from_numpy(np.array(opened.prev_bits).view(np.int16))
    after = torch.from_numpy(np.array(opened.theta)).bfloat16().view(torch.int16)
    assert 0.001 < float((before != after).float().mean()) < 0.5


def test_construct_finds_exactly_the_changes(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_construct(record, repeats=1, threads=1, reference=True, json_output=True)
    result = last_json(capsys)
    assert result["bench"] == "construct"
    assert result["missed"] == 0
    assert isinstance(result["changed"], int)
    assert result["changed"] > 0
    assert set(result["seconds"]) == {"read", "cpu", "snapshot", "reference"}  # type: ignore[call-overload]


def test_construct_notices_a_record_that_does_not_fit(record: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(record, damaged)
    bits = np.load(damaged / "prev_bits.npy")
    bits[100] ^= 1 << 9
    np.save(damaged / "prev_bits.npy", bits)
    with pytest.raises(ProofError):
        run_construct(damaged, repeats=1, threads=1, reference=False, json_output=False)


def test_wire_costs_a_third_of_pulse_and_is_near_the_entropy(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_wire(record, json_output=True)
    result = last_json(capsys)
    bits = result["bits_per_entry"]
    assert isinstance(bits, dict)
    assert bits["gap"] * 3 < bits["pulse"]
    # A tiny model's chunk table weighs more than its entries' last bit.
    assert bits["entropy"] * 0.9 < bits["gap"] < bits["entropy"] * 1.6


@pytest.mark.p2p
def test_p2p_delivers_the_same_bits_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    run_p2p(Options(parameters=200_000, senders=3, receivers=2, rounds=1, seed=5), json_output=True)
    result: dict[str, Any] = last_json(capsys)
    assert result["bench"] == "p2p"
    assert result["bit_exact"] is True
    assert (result["senders"], result["receivers"], result["rounds"], result["seed"]) == (3, 2, 1, 5)
    assert 0.008 < result["changed_fraction"] < 0.012
    assert set(result["methods"]) == {"dense-broadcast", "dense-direct", "patch-broadcast", "ours"}
    for measured in (*result["methods"].values(), *result["by_bucket"], *result["by_operations"], result["install"]):
        times = measured.get("seconds", measured.get("both"))
        assert 0 < times["min"] <= times["median"] <= times["max"]
    methods, changed, numel = result["methods"], result["changed"], result["parameters"]
    ours = methods["ours"]["bytes"]
    # Norms are on both receivers, everything else on one.
    assert 6 * changed < ours < 6 * changed * 1.02 + 3 * 2 * 120 + 30 * result["operations"] + 16 * result["operations"]
    assert 2 * numel <= methods["dense-direct"]["bytes"] < 2 * numel * 1.02
    assert methods["dense-broadcast"]["bytes"] > 2 * 2 * numel
    assert methods["patch-broadcast"]["bytes_per_receiver"] == [6 * changed + 8] * 2
    for name, m in methods.items():
        assert len(m["bytes_per_receiver"]) == 2
        assert sum(m["bytes_per_receiver"]) <= m["bytes"]
        assert m["times_ours"]["bytes"] == pytest.approx(m["bytes"] / ours), name
        assert m["seconds_at_1_gbit"] > 0
    buckets = [b["bucket_bytes"] for b in result["by_bucket"]]
    assert buckets == sorted({64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, result["bucket_bytes"]})
    operations = [o["operations"] for o in result["by_operations"]]
    assert operations == sorted(set(operations))
    assert len(operations) > 1


@pytest.mark.slow
@pytest.mark.p2p
def test_p2p_takes_a_record(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_p2p(Options(record=record, senders=1, receivers=3, rounds=1), json_output=True)
    result: dict[str, Any] = last_json(capsys)
    opened = load(record)
    assert (result["state"], result["parameters"]) == ("record", opened.numel)
    assert 0 < result["changed"] < opened.numel // 2
    with pytest.raises(InvalidInput, match="its own"):
        run_p2p(Options(record=record, changed=0.1), json_output=False)


def test_p2p_notices_what_is_not_right() -> None:
    shapes = llama(200_000)
    old, new = synthetic(shapes, 0.01, 1)
    expected = make_case(shapes, 2, 2).expected(1, old, new)
    assert sum(local.size for local, _ in expected.values()) > 100
    lanes = [(tensor, *found) for tensor, found in expected.items()]
    compare(expected, lanes)
    tensor, local, bits = max(lanes, key=lambda one: one[1].size)
    others = [one for one in lanes if one[0] != tensor]
    compare(expected, [(tensor, local[9:], bits[9:]), *others, (tensor, local[:9], bits[:9])])
    for wrong in (
        (tensor, local[1:], bits[1:]),
        (tensor, np.append(local, local[-1]), np.append(bits, bits[-1])),
        (tensor, local, bits ^ np.uint16(1)),
        (tensor, local + 1, bits),
        ("another", local, bits),
    ):
        with pytest.raises(ProofError):
            compare(expected, [wrong, *others])


@pytest.mark.slow
def test_memory_measures_a_real_worker(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_memory(record, json_output=True)
    result = last_json(capsys)
    assert set(result["extra"]) == {"certified", "snapshot"}  # type: ignore[call-overload]
    assert not list(Path("/dev/shm").glob(f"dte-bench-*-{os.getpid()}-*"))


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no complete record"):
        load(tmp_path)


def test_a_half_written_record_is_none(record: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(record, cut)
    np.save(cut / "exp_avg.npy", np.load(cut / "exp_avg.npy")[:-1])
    with pytest.raises(InvalidInput, match="exp_avg"):
        load(cut)
