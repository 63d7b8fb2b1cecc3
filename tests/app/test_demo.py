"""The demo, end to end with a tiny policy and real processes, and its parts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from app.demo.compare import Comparison, compare
from app.demo.compute import widen_compute
from app.demo.grpo import GenerateRequest, Grpo, GrpoSettings
from app.demo.link import Link, LinkServer, ReceiverFailed
from app.demo.model import build, dither_in_cell, replace_zeros
from app.demo.processes import ChildFailed, Children
from app.demo.rollouts import Reload, Sampled, Verdict
from app.demo.run import DemoOptions, Outcome, conclude
from app.demo.sampling import generate
from app.demo.task import Addition, reward
from tests.support.command import dte
from tests.support.tiny_policy import config_json, load_tiny

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Finished:
    """A demo that ran: its exit code, its last line as JSON, and the folder it kept."""

    code: int
    result: dict[str, Any]
    workdir: Path


def shared_files(pid: int) -> list[Path]:
    """What a trainer process has left in shared memory."""
    return list(Path("/dev/shm").glob(f"dte-demo-*-{pid}-*"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """One demo with two receivers and two optimizer steps between syncs."""
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from app.demo.run import DemoOptions, run_demo\n"
        "from tests.support.tiny_policy import load_tiny\n"
        "raise SystemExit(run_demo(DemoOptions(steps=5, receivers=2, minibatches=2, json_output=True, keep=True),"
        " load_tiny))\n"
    )
    folder = tmp_path_factory.mktemp("demo")
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        try:
            out, err = demo.communicate(timeout=500)
        finally:
            demo.kill()
    assert out.strip(), err
    (workdir,) = folder.glob("dte-demo-*")
    assert not shared_files(demo.pid)
    yield Finished(demo.returncode, json.loads(out.splitlines()[-1]), workdir)
    shutil.rmtree(workdir)


@pytest.mark.slow
def test_the_demo_ends_bit_exact_after_real_changes(finished: Finished) -> None:
    assert finished.code == 0
    result = finished.result
    assert result["bit_exact"] is True
    assert result["versions"] == 5
    deltas = [r for r in result["per_version"] if r["version"]]
    assert all(0 < r["changed_fraction"] < 0.5 for r in deltas)
    assert all(r["proof"] == "proven" for r in result["per_version"] if r["version"] is not None)
    assert all(r["dense_tiles"] == 0 for r in deltas)
    for key in ("changed_fraction", "bytes_per_version", "bits_per_entry", "trainer_hold_ms"):
        assert result[key] > 0


@pytest.mark.slow
def test_verify_proves_every_version(finished: Finished) -> None:
    done = dte("verify", str(finished.workdir / "trainer" / "store"), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert len(report["proven"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "delete", "part", "decision"])
def test_verify_sees_damage(finished: Finished, tmp_path: Path, damage: str) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished.workdir / "trainer" / "store", store)
    version = store / "runs" / "demo" / "versions" / "2"
    (chunk,) = (version / "chunks").iterdir()
    if damage == "flip":
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        chunk.write_bytes(data)
    elif damage == "delete":
        chunk.unlink()
    else:
        path = version / "decision.json" if damage == "decision" else version / "parts" / "1-0.json"
        record = json.loads(path.read_text())
        entry = record["tensors" if damage == "decision" else "slices"][0]
        entry["digest"] = f"{int(entry['digest'], 16) ^ 1:016x}"
        path.write_text(json.dumps(record, sort_keys=True, separators=(",", ":")))
    done = dte("verify", str(store), "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["ok"]
    assert any("version" in p or "versions/2/" in p for p in report["problems"])


@pytest.mark.slow
def test_inspect_shows_every_kind_of_object(finished: Finished) -> None:
    store = finished.workdir / "trainer" / "store"
    kinds = set()
    for file in sorted(p for p in store.rglob("*") if p.is_file() and p.suffix in (".json", ".dtc")):
        done = dte("inspect", str(file.relative_to(store)), "--store", str(store), "--json")
        assert done.returncode == 0, done.stderr
        kinds.add(json.loads(done.stdout)["object"])
        if len(kinds) == 6:
            break
    assert kinds >= {"chunk", "part", "commit decision", "launch", "epoch"}
    (chunk,) = (store / "runs" / "demo" / "versions" / "2" / "chunks").iterdir()
    assert "bits an entry" in dte("inspect", str(chunk)).stdout


@pytest.mark.slow
@pytest.mark.faults
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "from app.demo.run import DemoOptions, run_demo\n"
        "from tests.support.tiny_policy import load_tiny\n"
        "run_demo(DemoOptions(steps=1000), load_tiny)\n"
    )
    folder = tmp_path / ("a" * 80)  # too long for a Unix socket
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("2 "):
                break
        children = descendants(demo.pid)
        assert len(children) >= 4
        assert shared_files(demo.pid)
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=120)
        assert demo.returncode != 0
    assert not list(folder.glob("dte-demo-*"))
    assert not shared_files(demo.pid)
    assert not [pid for pid in children if alive(pid)]


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


# --- parts --------------------------------------------------------------------------------------------------------


def test_dithering_stays_in_the_cell() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(50_000, generator=generator) * 10.0**e for e in range(-30, 30, 7)])
    powers = torch.cat([s * 2.0 ** torch.arange(-120.0, 120.0) for s in (1, -1)])
    weights = torch.cat([values, powers])
    bits = weights.bfloat16().view(torch.int16).clone()
    dither_in_cell(weights, generator)
    assert torch.equal(weights.bfloat16().view(torch.int16), bits)
    assert float((weights == weights.bfloat16().float()).float().mean()) < 0.01


def test_zeros_are_replaced_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1000, generator=generator)
    weights[::3] = 0
    before = weights.clone()
    assert replace_zeros(weights, generator) == 334
    assert not bool((weights == 0).any())
    assert torch.equal(weights[before != 0], before[before != 0])
    assert replace_zeros(weights, generator) == 0


@pytest.mark.parametrize(
    ("text", "score"), [("42\n", 1.1), ("42", 1.0), ("41\n", 0.1 + 0.3 * 0.98), ("x\n", 0.1), ("", 0.0), ("999", 0.0)]
)
def test_reward(text: str, score: float) -> None:
    assert reward(text, 42) == pytest.approx(score)


def test_the_same_seed_gives_the_same_problems() -> None:
    a, b = Addition(7), Addition(7)
    assert [a.next() for _ in range(20)] == [b.next() for _ in range(20)]
    assert all(eval_sum(p.prompt) == p.answer for p in (a.next() for _ in range(20)))


def eval_sum(prompt: str) -> int:
    left, right = prompt.splitlines()[-1].rstrip("=").split("+")
    return int(left) + int(right)


def test_widened_computation_uses_the_live_bf16_weights() -> None:
    policy = load_tiny(0)
    narrow = build(config_json(), torch.bfloat16)
    names = [n for n, _ in narrow.named_parameters()]
    widen_compute(narrow)
    assert [n for n, _ in narrow.named_parameters()] == names
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        for (_, theirs), ours in zip(narrow.named_parameters(), policy.model.parameters(), strict=True):
            ours.copy_(ours.bfloat16().float())
            theirs.copy_(ours)
        expected = policy.model(tokens).logits
        got = narrow(tokens).logits
    assert got.dtype == torch.float32
    assert torch.allclose(got, expected, atol=1e-4)


def test_generation_is_repeatable_and_bounded() -> None:
    policy = load_tiny(0)
    request = GenerateRequest([[1, 2, 3], [4, 5]], 5, seed=3)
    first = generate(policy.model, request)
    assert [len(c) for c in first] == [5, 5]
    assert generate(policy.model, request) == first


def test_grpo_starts_at_learning_rate_zero_and_takes_every_minibatch() -> None:
    policy = load_tiny(0)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1.0)
    grpo = Grpo(policy.model, policy.tokenizer, GrpoSettings(minibatches=4), seed=0, optimizer=optimizer)
    before = [p.detach().clone() for p in policy.model.parameters()]
    rollout = grpo.collect(lambda request: generate(policy.model, request))
    updates = grpo.update(rollout)
    first = next(updates)
    assert (first.step, first.lr) == (1, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert [(s.step, s.lr) for s in updates] == [(2, 2.5e-6), (3, 5e-6), (4, 5e-6)]


def test_grpo_refuses_completions_of_the_wrong_number() -> None:
    policy = load_tiny(0)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1.0)
    grpo = Grpo(policy.model, policy.tokenizer, GrpoSettings(), seed=0, optimizer=optimizer)
    with pytest.raises(ValueError, match="wrong number"):
        grpo.collect(lambda request: [[1]])


def test_compare_sees_one_bit_a_missing_and_an_extra_tensor(tmp_path: Path) -> None:
    ours = {"a": torch.randn(100), "b": torch.randn(3, 4)}
    theirs = {n: t.bfloat16() for n, t in ours.items()}
    file = tmp_path / "w.safetensors"
    save_file(theirs, file)
    assert compare("r", file, ours.items()).bit_exact
    flipped = theirs["a"].clone()
    flipped.view(torch.int16)[7] ^= 1
    save_file({**theirs, "a": flipped}, file)
    found = compare("r", file, ours.items())
    assert not found.bit_exact
    assert (found.differing_elements, found.differing_tensors) == (1, ("a",))
    save_file({"a": theirs["a"], "c": theirs["b"]}, file)
    assert compare("r", file, ours.items()).differing_tensors == ("b", "c")
    save_file({**theirs, "b": ours["b"]}, file)
    assert compare("r", file, ours.items()).differing_tensors == ("b",)
    assert not compare("r", file, []).bit_exact


def test_minus_zero_is_not_zero(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"a": torch.tensor([-0.0]).bfloat16()}, file)
    assert not compare("r", file, [("a", torch.tensor([0.0]))]).bit_exact


def test_the_link_answers_and_says_what_went_wrong(tmp_path: Path) -> None:
    path = tmp_path / "l.sock"
    with LinkServer(path, {"add": lambda r: {"sum": r["a"] + r["b"]}}) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert path.stat().st_mode & 0o077 == 0
        link = Link("x", path, timeout_s=10)
        assert link.call("add", a=1, b=2) == {"sum": 3}
        with pytest.raises(ReceiverFailed, match="KeyError"):
            link.call("add", a=1)
        with pytest.raises(ReceiverFailed, match="refused 'nothing'"):
            link.call("nothing")
        assert link.call("add", a=2, b=2) == {"sum": 4}
        link.close()
        server.shutdown()
    with pytest.raises(ReceiverFailed, match="cannot reach"):
        Link("x", tmp_path / "absent.sock")


def test_children_end_with_their_own_children(tmp_path: Path) -> None:
    code = "import subprocess,sys; subprocess.Popen(['sleep','1000']); print('up', flush=True); sys.stdin.read()"
    with Children(tmp_path, stop_timeout_s=5) as children:
        child = children.start("parent", [sys.executable, "-c", code], dict(os.environ))
        children.wait_until("it", lambda: "up" in child.log.read_text(), 30)
        (grandchild,) = descendants(child.process.pid)
        assert alive(grandchild)
    assert child.process.returncode is not None
    deadline = 200
    while alive(grandchild) and deadline:
        deadline -= 1
        os.sched_yield()
    assert not alive(grandchild)


def test_a_child_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("bad", [sys.executable, "-c", "raise SystemExit('no luck')"], dict(os.environ))
        child.process.wait(30)
        with pytest.raises(ChildFailed, match="no luck"):
            children.wait_until("it", lambda: False, 30)


def test_a_demo_whose_receivers_differ_fails(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Comparison("rollout-0", 2, 100, 1, ("a",))
    right = Comparison("rollout-1", 2, 100, 0, ())
    options = DemoOptions(json_output=True)
    assert conclude(Outcome([], Verdict([right, wrong]), 0.0, Path()), 1.0, options) == 1
    out = capsys.readouterr().out
    assert "1 elements differ" in out
    assert json.loads(out.splitlines()[-1])["bit_exact"] is False
    assert conclude(Outcome([], Verdict([right]), 0.0, Path()), 1.0, options) == 0
    assert conclude(Outcome([], Verdict([]), 0.0, Path()), 1.0, options) == 1


def test_a_demo_whose_second_engine_differs_fails(capsys: pytest.CaptureFixture[str]) -> None:
    right = Comparison("exported checkpoint", 2, 100, 0, ())
    options = DemoOptions(json_output=True, engine="sglang")

    def code(reload: Reload) -> int:
        return conclude(Outcome([], Verdict([right], reload), 0.0, Path()), 1.0, options)

    assert code(Reload(3, 2, 1, (), 4, 0)) == 0
    assert "same 2 checksums (1 of them changed since the start), same 4 greedy answers" in capsys.readouterr().out
    assert code(Reload(3, 2, 1, ("0/a",), 4, 0)) == 1
    out = capsys.readouterr().out
    assert "1 of 2 checksums differ" in out
    assert json.loads(out.splitlines()[-1])["reload"]["same"] is False
    assert code(Reload(3, 2, 1, (), 4, 1)) == 1
    assert code(Reload(3, 0, 0, (), 4, 0)) == 1
    assert code(Reload(3, 2, 1, (), 0, 0)) == 1


def test_a_sample_from_another_version_is_an_error() -> None:
    assert Sampled([[1], [2]], [3, 3]).from_version(3) == {"3": 2}
    with pytest.raises(ReceiverFailed, match="1 from version 2, 1 from version 3"):
        Sampled([[1], [2]], [3, 2]).from_version(3)
