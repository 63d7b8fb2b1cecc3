"""`dte demo --engine sglang`: real training, rollouts from a real server, and a second one that loads the export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.demo.checkpoint import WEIGHTS
from tests.support.sglang.server import PYTHON

ROOT = Path(__file__).parents[2]
STEPS = 2
PARAMETERS = 134_515_008


def demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "app.cli", "demo", "--engine", "sglang", "--sglang-python", str(PYTHON)]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def session_of(folder: Path) -> set[int]:
    """Every living process whose command line names the folder."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in line:
                found.add(int(entry.name))
    return found


def family(pid: int) -> set[int]:
    """All processes below one, to the last level."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found |= {int(child)} | family(int(child))
    return found


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(1800)  # most of it is the start of two servers beside a trainer
def test_training_with_a_real_server_ends_bit_exact(tmp_path: Path) -> None:
    with demo(tmp_path, "--steps", str(STEPS), "--json", "--keep") as process:
        out, err = process.communicate(timeout=1700)
    assert process.returncode == 0, out + err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert (result["engine"], result["bit_exact"], result["versions"]) == ("sglang", True, STEPS)

    shipped = [r for r in result["per_version"] if r["version"] is not None]
    deltas = shipped[1:]
    assert [r["version"] for r in shipped] == sorted({r["version"] for r in shipped})
    assert all(r["proof"] == "proven" for r in shipped)
    assert all(0 < r["changed_fraction"] < 0.1 and r["dense_tiles"] == 0 for r in deltas)
    assert all(r["pause_ms"] > 0 for r in deltas)
    # Every sample of an update came from the version that was the newest one before it.
    newest = 0
    for row in result["per_version"][1:]:
        assert row["sampled_from"] == {str(newest): 16}
        newest = row["version"] or newest

    # The second server, started from the exported version, has all of the first one's checksums and greedy answers.
    assert result["reload"]["same"]
    assert result["reload"]["version"] == newest
    assert result["reload"]["parameters"] == 182  # as SGLang keeps them: q, k, v and gate, up stacked
    assert result["reload"]["changed_parameters"] > 100
    assert result["reload"]["prompts"] == 4

    # What that second server loaded is not what the first one started from.
    (workdir,) = tmp_path.glob("dte-demo-*")
    start, end = (load_file(workdir / name / WEIGHTS) for name in ("model", "exported"))
    assert start.keys() == end.keys()
    assert sum(t.numel() for t in end.values()) == PARAMETERS
    differing = sum(int((start[n].view(torch.int16) != end[n].view(torch.int16)).sum()) for n in start)
    assert 0 < differing <= sum(r["changed"] for r in deltas)
    assert not session_of(workdir)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_server_ends_with_the_demo(tmp_path: Path, how: signal.Signals) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "the SGLang server starts (15 s" in line:
                break
        processes = family(process.pid)
        assert len(processes) >= 4, "two daemons, the guard and its server"
        process.send_signal(how)
        process.communicate(timeout=120)
    deadline = time.monotonic() + 120
    while left := [pid for pid in processes if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    if how is signal.SIGINT:
        assert not list(tmp_path.glob("dte-demo-*"))
