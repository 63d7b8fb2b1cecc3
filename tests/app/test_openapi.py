"""docs/openapi.json is what the code says, and docs/http-api.md describes all of it and runs as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.openapi import export
from tests.support.ports import free_port

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "http-api.md"
WHERE_ALWAYS = {"422", "default"}
PRINTED = "http://127.0.0.1:7411"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return dict(json.loads(export()))


def sections() -> dict[str, str]:
    """`GET /path` → the text below that heading."""
    parts = re.split(r"^### `([A-Z]+ /[^`]*)`$|^##+ .*$", PAGE.read_text(), flags=re.M)
    return {heading: text for heading, text in zip(parts[1::2], parts[2::2], strict=True) if heading}


def calls(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_the_file_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "openapi.json").read_text() == export(), "run `make openapi`"


def test_it_does_not_depend_on_the_environment() -> None:
    environment = {**os.environ, "DTE_PORT": "1", "DTE_RUN": "other", "HOME": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-m", "app.openapi"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == export()


def test_the_page_has_every_call_and_no_other(document: dict[str, Any]) -> None:
    assert sorted(sections()) == sorted(calls(document))


def test_the_page_names_every_parameter_and_status(document: dict[str, Any]) -> None:
    missing = []
    for call, operation in calls(document).items():
        text = sections()[call]
        for parameter in operation.get("parameters", []):
            named = parameter["in"] == "path" or re.search(rf"`{parameter['name']}[`:=]", text, flags=re.I)
            if not named:
                missing.append(f"{call}: {parameter['in']} parameter {parameter['name']}")
        missing += [f"{call}: {s}" for s in operation["responses"] if s not in WHERE_ALWAYS and s not in text]
    assert not missing


def test_the_page_names_every_field_of_every_request(document: dict[str, Any]) -> None:
    missing = []
    for call, operation in calls(document).items():
        body = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if body is None:
            continue
        text = sections()[call]
        for kind in body["schema"].get("oneOf", [body["schema"]]):
            schema = document["components"]["schemas"][kind["$ref"].rsplit("/", 1)[1]]
            missing += [f"{call}: {f}" for f in schema["properties"] if f"`{f}`" not in text and f'"{f}"' not in text]
    assert not missing


# --- the page as a script ---------------------------------------------------------------------------------------------


def blocks() -> list[tuple[str, str]]:
    """(language, text) of every fenced block of the page, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)


@contextmanager
def running(command: list[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def wait_until(ready: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        return httpx.get(url + "/healthz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def last_json(printed: str) -> Any:
    """The last JSON value of what a block printed."""
    return json.loads(printed[max(printed.rfind("\n{"), printed.rfind("\n[")) + 1 :])


@pytest.mark.slow
def test_every_command_of_the_page_runs_as_printed(tmp_path: Path) -> None:
    """One daemon, one rank made by hand, all shell blocks in order; printed answers have the fields of real ones."""
    url = f"http://127.0.0.1:{free_port()}"
    shared = f"dte-docs-{os.getpid()}-"
    found = blocks()
    (serve,) = [text for language, text in found if language == "sh" and text.startswith("dte serve")]
    (rank,) = [text for language, text in found if language == "python"]
    (tmp_path / "rank.py").write_text(rank.replace("dte-by-hand-", shared))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DTE_")}
    environment |= {
        "DTE_PORT": url.rsplit(":", 1)[1],
        "DTE_DATA_DIR": str(tmp_path / "data"),
        "DTE_DETECT_THREADS": "1",
    }
    daemon = [sys.executable, "-m", "app.cli", *serve.split()[1:]]
    trainer = [sys.executable, str(tmp_path / "rank.py")]
    log = tmp_path / "log"
    with (
        running(daemon, log, environment) as process,
        running(trainer, tmp_path / "rank.log", environment | {"PYTHONPATH": str(ROOT)}) as by_hand,
    ):
        try:
            wait_until(lambda: answers(url), process, log)
            wait_until(Path(f"/dev/shm/{shared}theta").exists, by_hand, tmp_path / "rank.log")
            ran = 0
            for (language, text), (next_language, printed) in zip(found, [*found[1:], ("", "")], strict=True):
                if language != "sh" or text == serve:
                    continue
                script = f"URL={url}\n" + text.replace(PRINTED, url).replace("dte-by-hand-", shared)
                done = subprocess.run(
                    ["bash", "-euc", script], env=environment, capture_output=True, text=True, timeout=120, check=False
                )
                assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
                if next_language == "json":
                    real, example = last_json(done.stdout), json.loads(printed)
                    assert real.keys() == example.keys(), text
                    assert real.get("type") == example.get("type"), done.stdout
                else:
                    assert "urn:dte:problem:" not in done.stdout, f"{text}\n{done.stdout}"
                ran += 1
            assert ran > 15
            assert "Traceback" not in log.read_text()
        finally:
            by_hand.terminate()
            by_hand.wait(60)
            for name in ("control", "theta"):
                Path(f"/dev/shm/{shared}{name}").unlink(missing_ok=True)
