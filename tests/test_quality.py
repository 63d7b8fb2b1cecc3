"""Lint, format and types are part of the test suite, so one command says whether the tree is in order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_MODULE_LINES = 400
ROOMS = ("app", "clients", "transports", "engine")


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", ".")


def test_everything_is_formatted() -> None:
    run("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_mypy_finds_nothing() -> None:
    run("mypy")


def modules() -> list[Path]:
    return [f for room in ROOMS for f in sorted((ROOT / room).rglob("*.py"))]


def test_modules_say_why_they_exist_and_stay_small() -> None:
    bad = []
    for file in modules():
        text = file.read_text()
        if not text.strip():
            continue
        if not text.startswith('"""'):
            bad.append(f"{file.relative_to(ROOT)}: no module docstring")
        lines = text.count("\n")
        if lines > MAX_MODULE_LINES:
            bad.append(f"{file.relative_to(ROOT)}: {lines} lines")
    assert not bad


def test_nothing_can_run_code_from_bytes() -> None:
    """No pickle, marshal or eval, no torch.load or numpy objects, no shell, anywhere in the product."""
    forbidden = re.compile(
        r"\bimport (?:pickle|marshal|dill|shelve)\b|\bfrom (?:pickle|marshal|dill|shelve) import\b"
        r"|\btorch\.(?:load|save)\(|allow_pickle=True|shell=True|(?<![.\w])(?:eval|exec)\(|\bos\.system\("
    )
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}" for file in modules() for match in forbidden.finditer(file.read_text())
    ]
    assert not found
