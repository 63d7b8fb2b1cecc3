"""The command line: help, exit codes, one message for bad input and never a traceback, JSON where asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.cli.inspecting import show_object
from app.cli.output import human_bytes, human_ms, percent
from app.cli.status import show_status, show_versions
from clients.errors import ApiError, DaemonUnavailable
from engine.codec.chunk import ChunkHeader, ChunkItem, encode
from engine.errors import CodecError, InvalidInput
from engine.layout.algebra import identity, to_json
from engine.records import AbortDecision, EpochRecord, LatestHint, record_bytes
from tests.support.command import dte
from tests.support.ports import free_port

ROOT = Path(__file__).parent.parent.parent
COMMANDS = ("serve", "demo", "status", "versions", "inspect", "verify", "export", "bench")


def test_help_names_every_command() -> None:
    done = dte("--help", COLUMNS="200")
    assert done.returncode == 0
    assert all(c in done.stdout for c in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "bench construct", "bench wire", "bench memory"])
def test_every_command_explains_itself(command: str) -> None:
    done = dte(*command.split(), "--help", COLUMNS="200")
    assert done.returncode == 0
    assert len(done.stdout) > 200


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "nonsense"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--receivers", "x"], "--receivers"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--roles", "cook"], "roles"),
        (["serve", "--host", "0.0.0.0"], "token"),
        (["serve", "--roles", "subscriber"], "store"),
        (["serve", "--config", "/no/such.toml"], "/no/such.toml"),
        (["serve", "--run", "../x"], "run"),
        (["serve", "--store", "ftp://x"], "ftp"),
        (["inspect", "/no/such/file"], "/no/such/file"),
        (["inspect", "../etc/passwd", "--store", "/tmp"], "key"),
        (["verify", "ftp://x"], "ftp"),
        (["verify", "/no/such/store"], "no run"),
        (["export", "1", "/tmp", "--store", "/tmp", "--base", "/no/such/base"], "/no/such/base"),
        (["bench", "wire", "--record", "/no/such/record"], "/no/such/record"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_two(arguments: list[str], says: str) -> None:
    done = dte(*arguments, COLUMNS="200")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_variable_is_refused() -> None:
    done = dte("serve", DTE_PROT="1")
    assert done.returncode == 2
    assert "DTE_PROT" in done.stderr


def test_a_daemon_that_does_not_answer_is_exit_code_one() -> None:
    done = dte("versions", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no answer from the daemon" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real `dte serve` with every role; its URL."""
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(free_port()), "--run", "r"]
    command += ["--data-dir", str(tmp_path_factory.mktemp("data"))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("dte: serving store, coordinator, publisher, subscriber on http://127.0.0.1:")
        yield line.split()[-1]
        process.terminate()
        assert process.wait(60) == 0


def test_status_of_a_fresh_daemon(daemon: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_status(daemon, None, None, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ready"] is True
    assert set(answer["roles"]) == {"store", "coordinator", "publisher", "subscriber"}
    assert answer["receivers"] == []
    assert show_status(daemon, None, None, as_json=False) == 0
    assert "publisher" in capsys.readouterr().out


def test_versions_of_a_fresh_daemon(daemon: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_versions(daemon, None, None, last=5, as_json=False)
    assert "no version yet" in capsys.readouterr().out
    show_versions(daemon, None, "r", last=5, as_json=True)
    assert json.loads(capsys.readouterr().out)["versions"] == []


def test_status_says_when_something_else_answers(daemon: str) -> None:
    with pytest.raises(ApiError):
        show_status(daemon + "/store", None, None, as_json=False)
    with pytest.raises(DaemonUnavailable):
        show_status("http://127.0.0.1:9", None, None, as_json=False)


# --- inspect ------------------------------------------------------------------------------------------------------


def chunk() -> bytes:
    empty = np.zeros(0, np.int64)
    item = ChunkItem(
        "w", (300,), "bfloat16", 0, 300, to_json(identity(300)), np.array([1, 5, 200]),
        np.array([1, 65535, 2], np.uint16), empty, np.zeros(0, np.uint16),
    )  # fmt: skip
    return encode(ChunkHeader("r", 3, 1, 0, 0, 2), [item]).data


def shown(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    show_object(str(path), None, None, as_json=False)
    assert capsys.readouterr().out
    show_object(str(path), None, None, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def test_inspect_a_chunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c"
    path.write_bytes(chunk())
    answer = shown(path, capsys)
    assert (answer["object"], answer["version"], answer["base"], answer["entries"]) == ("chunk", 3, 2, 3)
    assert answer["items"][0]["tensor"] == "w"


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (AbortDecision(run="r", version=1, epoch=1, reason="unchanged"), "abort decision"),
        (EpochRecord(run="r", epoch=1, launch="l", world=2), "epoch"),
        (LatestHint(version=4), "latest hint"),
    ],
)
def test_inspect_records(record: Any, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(record_bytes(record))
    answer = shown(path, capsys)
    assert answer["object"] == kind
    assert answer["record"] == record.model_dump(mode="json")


def test_inspect_reads_keys_of_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "latest.json").write_bytes(record_bytes(LatestHint(version=4)))
    show_object("runs/r/latest.json", str(tmp_path), None, as_json=True)
    assert json.loads(capsys.readouterr().out)["record"]["version"] == 4
    with pytest.raises(InvalidInput):
        show_object("../latest.json", str(tmp_path), None, as_json=True)


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b'{"kind":"commit"}', b"[1]", b"\x00\x01junk", chunk()[:-3]])
def test_inspect_refuses_what_is_none_of_ours(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(CodecError):
        show_object(str(path), None, None, as_json=False)


def test_numbers_for_people() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 1.5e6, 2.34e9, 5e12)] == [
        "0 B", "999 B", "1.00 kB", "1.50 MB", "2.34 GB", "5.00 TB",
    ]  # fmt: skip
    assert [human_ms(n) for n in (0.4, 999, 1234)] == ["0 ms", "999 ms", "1.23 s"]
    assert percent(0.01234) == "1.234 %"


def test_the_health_route_of_a_real_daemon(daemon: str) -> None:
    assert httpx.get(daemon + "/healthz", trust_env=False).json() == {"status": "ok"}
