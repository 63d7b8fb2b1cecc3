"""The documentation against the code: what it lists exists, what it prints runs, its links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from prometheus_client import Counter

from app.cli.root import app as cli
from app.events import DROPPED
from app.metrics import Metrics
from app.problems import STATUS, STATUS_OF_CODE, status_of_class
from app.settings import ROLES, Settings
from engine.errors import DteError
from tests.support.ports import free_port

ROOT = Path(__file__).parent.parent
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
OURS = ("app", "clients", "transports", "engine")
SHELLS = {"sh", "bash", "shell", "console"}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, *languages: str) -> list[str]:
    """The page's fenced blocks in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.M | re.S)
    return [text for language, text in found if language in languages]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


@cache
def sources() -> dict[Path, ast.Module]:
    return {f: ast.parse(f.read_text()) for room in ("app", "clients") for f in sorted((ROOT / room).rglob("*.py"))}


def called(name: str) -> Iterator[tuple[Path, ast.Call]]:
    """Every call of a function or method of this name in the product."""
    for file, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                f = node.func
                if (f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else None) == name:
                    yield file, node


def literal(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def rows(section: str) -> list[list[str]]:
    """The cells of the tables below a heading of operations.md, without their head rows."""
    match = re.search(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", OPERATIONS, flags=re.M | re.S)
    assert match is not None, section
    lines = [line for line in match[1].splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {i - 1 for i, row in enumerate(cells) if set(row[0]) <= set("-: ")}
    return [row for i, row in enumerate(cells) if i not in heads and i - 1 not in heads]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- links ------------------------------------------------------------------------------------------------------------


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = 0
        while (unique := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(unique)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or not file.is_relative_to(ROOT) or (anchor and anchor not in slugs(file)):
            wrong.append(target)
    assert not wrong


def test_every_page_can_be_reached_from_the_readme() -> None:
    readme = prose(ROOT / "README.md")
    linked = {(ROOT / t.partition("#")[0]).resolve() for t in re.findall(r"\]\(([^)\s]+)\)", readme)}
    assert [p for p in pages() if not linked & {p, p.parent} and p.name != "README.md"] == []


# --- code blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_use_what_exists(page: Path) -> None:
    """They compile; imports, methods and keyword arguments of our own classes and functions are there."""
    for text in blocks(page, "python", "py"):
        tree = ast.parse(text)
        known: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
                module = importlib.import_module(node.module)
                known |= {a.asname or a.name: getattr(module, a.name) for a in node.names}
        made = {name: known[cls] for name, cls in instances(tree) if cls in known}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                check_call(node, known, made)


def instances(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(variable, class) of every `x = C(…)` and `with C(…) as x`."""
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.With):
            pairs = [(item.optional_vars, item.context_expr) for item in node.items]
        for target, value in pairs:
            if isinstance(target, ast.Name) and isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                yield target.id, value.func.id


def check_call(call: ast.Call, known: dict[str, Any], made: dict[str, Any]) -> None:
    if isinstance(call.func, ast.Name) and call.func.id in known:
        function = known[call.func.id]
    elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id in made:
        function = getattr(made[call.func.value.id], call.func.attr)
    else:
        return
    known_keywords = keywords_of(function)
    for keyword in call.keywords:
        assert keyword.arg in known_keywords, ast.unparse(call)


def keywords_of(function: Any) -> set[str]:
    """What may be passed by name, the keys of an `Unpack[…]` included."""
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(hints[parameter.name]) is typing.Unpack:
            names |= set(typing.get_args(hints[parameter.name])[0].__annotations__)
    return names


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.M))
    named = {t for page in pages() for t in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), flags=re.M)}
    assert named
    assert named <= targets


def test_toml_blocks_are_settings() -> None:
    found = [t for page in pages() for t in blocks(page, "toml")]
    assert found
    for text in found:
        Settings(**tomllib.loads(text))


def commands(page: Path) -> Iterator[list[str]]:
    """Every `dte …` in the page's shell blocks and inline code, split into words."""
    lines = [line for text in blocks(page, *SHELLS) for line in text.replace("\\\n", " ").splitlines()]
    lines += [code for code in re.findall(r"`([^`\n]+)`", prose(page)) if code.startswith("dte ")]
    for line in lines:
        command = re.match(r"(?:\$ )?(?:[A-Z_]+=\S* )*dte (.*)", line)
        if command is not None and "…" not in line:
            yield shlex.split(command[1], comments=True)


def check_command(words: list[str]) -> None:
    """AssertionError unless the command exists and has these options; their values are not looked at."""
    command: Any = typer.main.get_command(cli)
    while (commands := getattr(command, "commands", None)) and words and not words[0].startswith("-"):
        assert words[0] in commands, words
        command = commands[words.pop(0)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in options | {"--help", "-h"}, (command.name, word)


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path) -> None:
    for words in commands(page):
        check_command(list(words))


def test_a_command_that_does_not_exist_is_noticed() -> None:
    for words in (["cook"], ["serve", "--prot", "1"], ["bench", "speed"]):
        with pytest.raises(AssertionError):
            check_command(words)


# --- tables of operations.md ------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """A default as the table prints it."""
    if value is None or value == ():
        return "–"
    return f"`{','.join(ROLES)}`" if isinstance(value, frozenset) else f"`{value}`"


def test_settings_are_all_listed_with_their_defaults() -> None:
    table = {names(row[0])[0]: row for row in rows("Settings")}
    assert list(table) == list(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        if field.default_factory is None:
            assert table[name][1] == shown(field.default), name
        assert table[name][2], name


def test_settings_without_effect_are_called_so() -> None:
    used = "\n".join(f.read_text() for f in sources() if f.name != "settings.py")
    used = used.replace("settings.p2p_address", "settings.p2p_host")  # which it gives, or a default
    for row in rows("Settings"):
        name = names(row[0])[0]
        effective = re.search(rf"(\bsettings|\bs)\.((ordered_)?{name}|{name}_dir)\b", used)
        assert bool(effective) != ("has no effect" in row[2]), name


def test_degraded_modes_are_all_listed() -> None:
    from app.decision_events import DIVERGED
    from app.publisher.accounting import _DEGRADED

    found: set[str] = {*_DEGRADED.values(), DIVERGED}
    for file, call in called("count"):
        if isinstance(call.func, ast.Attribute) and "degraded" in ast.unparse(call.func.value):
            mode = literal(call.args[0])
            if mode is None:  # the names of `_DEGRADED`
                assert file.name == "accounting.py", file
            else:
                found.add(str(mode))
    assert [names(row[0])[0] for row in rows("Degraded modes")] == sorted(found)
    assert all(row[1] and row[2] for row in rows("Degraded modes"))


def test_metrics_are_all_listed_with_their_labels() -> None:
    expected = []
    for collector in list(Metrics().registry._collector_to_names):
        name = getattr(collector, "_name", "")
        if name.startswith("dte_"):
            total = "_total" if isinstance(collector, Counter) else ""
            expected.append((name + total, list(getattr(collector, "_labelnames", ()))))
    assert [(names(row[0])[0], names(row[1])) for row in rows("Metrics")] == expected


def test_events_are_all_listed_with_their_data() -> None:
    table = {names(row[0])[0]: names(row[2]) for row in rows("Events")}
    found = {DROPPED}
    for _, call in called("publish"):
        kind = literal(call.args[0]) if call.args else None
        if isinstance(kind, str):
            found.add(kind)
            given = {k.arg for k in call.keywords if k.arg not in (None, "run")}
            assert given <= set(table.get(kind, [])), (kind, given)
    for _, call in called("_notice"):  # passed on as events by who made the meeting
        kind, data = literal(call.args[0]), call.args[1]
        assert isinstance(kind, str)
        assert isinstance(data, ast.Dict)
        found.add(kind)
        assert {literal(k) for k in data.keys if k is not None} == set(table.get(kind, [])), kind
    assert set(table) == found


def documented_codes() -> dict[str, str]:
    return {code: row[1] for row in rows("Problem codes") for code in names(row[0])}


def test_problem_codes_are_all_listed_with_their_status() -> None:
    expected = {cls.code: str(int(status)) for cls, status in STATUS.items()}
    for _, call in called("HttpProblem"):
        status, code = (literal(a) for a in call.args[:2])
        assert isinstance(code, str)
        expected[code] = str(status)
    framework = {"invalid-request": "422", "internal": "500", "not-found": "404", "method-not-allowed": "405"}
    documented = documented_codes()
    assert {c: s for c, s in documented.items() if c in expected | framework} == expected | framework
    assert set(documented) <= set(expected | framework) | set(in_jobs())


def subclasses(cls: type[DteError]) -> Iterable[type[DteError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from subclasses(sub)


def in_jobs() -> dict[str, str]:
    """Codes that show up in jobs and receivers: of the daemon's roles and workers and what they stand on."""
    import app.roles.publisher
    import app.roles.subscriber  # noqa: F401

    rooms = ("app.publisher", "app.subscriber", "app.worker", "transports.", "engine.errors")
    return {cls.code: str(status_of_class(cls)) for cls in subclasses(DteError) if cls.__module__.startswith(rooms)}


def test_statuses_given_by_code_are_of_codes_that_exist() -> None:
    assert set(STATUS_OF_CODE) <= set(in_jobs())


def test_codes_of_jobs_and_receivers_are_all_listed() -> None:
    documented = documented_codes()
    assert {c: documented.get(c) for c in in_jobs()} == in_jobs()


# --- the README's commands --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_daemons_of_the_readme_start_as_printed(tmp_path: Path) -> None:
    """Both commands, with nothing replaced but the ports; each daemon answers and the second reaches the first."""
    printed = [line for text in blocks(ROOT / "README.md", *SHELLS) for line in text.splitlines()]
    lines = [line for line in printed if line.startswith("dte serve")]
    assert len(lines) == 2
    ports = {port: str(free_port()) for port in ("7411", "7412")}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DTE_")}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)}
    running: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "log"
    try:
        with log.open("wb") as out:
            for line in lines:
                words = shlex.split(re.sub(r"\b(7411|7412)\b", lambda m: ports[m[1]], line))
                command = [sys.executable, "-m", "app.cli", *words[1:]]
                running.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out))
        deadline = time.monotonic() + 120
        for path in ("healthz", "readyz"):
            for port in ports.values():
                while not answers(f"http://127.0.0.1:{port}/{path}"):
                    assert all(p.poll() is None for p in running), log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
    finally:
        for process in running:
            process.terminate()
        assert [p.wait(60) for p in running] == [0] * len(running)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
