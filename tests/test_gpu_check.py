"""The check that is prepared for machines with a GPU: it says when there is none, and the script itself works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_it_says_so() -> None:
    done = check()
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert done.stdout == ""


def test_all_of_it_runs_on_the_cpu() -> None:
    done = check("--device", "cpu", "--mib", "4", "--rounds", "6")
    assert done.returncode == 0, done.stderr
    assert "6 random layouts agree" in done.stdout
    assert "installed, bit for bit" in done.stdout
    assert "scatter of 1 %" in done.stdout
    for mode in ("auto", "mirror"):
        for kind in ("foreach", "fused", "single"):
            assert re.search(rf"memory: {mode} +{kind} +\d{{4,}} changes found", done.stdout), done.stdout
