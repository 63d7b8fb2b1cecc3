"""Imports go one way: app → clients, transports, engine; clients → transports, engine; transports → engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("app", "clients", "transports", "engine")
ALLOWED = {
    "app": {"app", "clients", "transports", "engine"},
    "clients": {"clients", "transports", "engine"},
    "transports": {"transports", "engine"},
    "engine": {"engine"},
}
WEB = ("fastapi", "starlette", "uvicorn", "httpx", "typer", "aiofiles", "prometheus_client", "rich")


def imported_modules(source: str, package: str) -> set[str]:
    """Absolute names of all modules that `source`, a module inside `package`, imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            found.add(".".join([*parents, node.module or ""]).strip("."))
    return found


def violations(room: str, source: str, package: str) -> list[str]:
    """Imports of our rooms that `room` may not have."""
    tops = {name.split(".")[0] for name in imported_modules(source, package)}
    return sorted(top for top in tops if top in OURS and top not in ALLOWED[room])


@pytest.mark.parametrize("room", OURS)
def test_imports_go_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    bad = {}
    for file in files:
        package = ".".join(file.relative_to(ROOT).parent.parts)
        found = violations(room, file.read_text(), package)
        if found:
            bad[str(file.relative_to(ROOT))] = found
    assert not bad


@pytest.mark.parametrize("room", OURS[1:])
def test_the_check_sees_a_violation(room: str) -> None:
    assert violations(room, "def f():\n    from app.settings import Settings\n", room) == ["app"]
    assert violations(room, f"from .. import x\nimport {room}.y", f"{room}.a.b") == []


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules in a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def every_module(room: str) -> list[str]:
    names = []
    for file in sorted((ROOT / room).rglob("*.py")):
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__main__":
            continue
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_the_engine_pulls_in_no_web_framework() -> None:
    loaded = loaded_by("\n".join(f"import {name}" for name in every_module("engine")))
    assert "engine" in loaded
    assert not loaded & set(WEB)
    assert not loaded & {"app", "clients", "transports"}


@pytest.mark.parametrize("module", ["clients.control", "clients.http", "clients.protocol", "engine.records"])
def test_light_modules_pull_in_no_torch(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert module.split(".")[0] in loaded
    assert "torch" not in loaded


def test_the_command_line_starts_without_torch() -> None:
    loaded = loaded_by("import app.cli.root")
    assert not loaded & {"torch", "fastapi", "transformers"}
