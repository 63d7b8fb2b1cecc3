"""The demo's SGLang side without SGLang: arguments, the checkpoint, the server's answers, and how its process ends."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from app.demo.checkpoint import WEIGHTS, write_checkpoint
from app.demo.compare import compare
from app.demo.grpo import GenerateRequest
from app.demo.link import ReceiverFailed
from app.demo.model import Policy
from app.demo.processes import ChildFailed, Children
from app.demo.run import DemoOptions, _Loop
from app.demo.sglang_rollouts import Seen, SglangRollouts
from app.demo.sglang_server import SglangServer, SglangUnavailable, command, environment, find_python
from app.demo.stage import Stage
from app.demo.table import DemoTable, Row
from clients.errors import WaitTimeout
from clients.protocol import ReceiverInfo, ReceiverState
from tests.support.command import dte
from tests.support.tiny_policy import CharTokenizer, load_tiny


class SavedTokenizer(CharTokenizer):
    def save_pretrained(self, directory: str) -> None:
        (Path(directory) / "tokenizer.json").write_text("{}")


def tiny() -> Policy:
    policy = load_tiny(0)
    return Policy(policy.model, SavedTokenizer(), policy.config_json)  # type: ignore[arg-type]


def interpreter(folder: Path, answer: str, code: int = 0) -> Path:
    """Something that answers the question about its environment as told."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    path.chmod(0o755)
    return path


# --- arguments --------------------------------------------------------------------------------------------------------


def test_an_environment_without_sglang_or_without_the_plugin_is_refused(tmp_path: Path) -> None:
    assert find_python(interpreter(tmp_path, "1 1")) == tmp_path / "python"
    with pytest.raises(SglangUnavailable, match=r"has no SGLang.*make sglang"):
        find_python(interpreter(tmp_path, "0 0"))
    with pytest.raises(SglangUnavailable, match=r"not this package.*pip install --no-deps"):
        find_python(interpreter(tmp_path, "1 0"))
    with pytest.raises(SglangUnavailable, match="is no Python interpreter"):
        find_python(interpreter(tmp_path, "1 1", code=3))
    with pytest.raises(SglangUnavailable, match="cannot be run"):
        find_python(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is in this very environment")
def test_a_real_interpreter_is_asked_what_it_has() -> None:
    with pytest.raises(SglangUnavailable, match="has no SGLang"):
        find_python(Path(sys.executable))


def demo(cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return dte("demo", *arguments, cwd=cwd, TMPDIR=str(cwd), **variables)


def test_the_command_says_what_is_missing_and_leaves_nothing(tmp_path: Path) -> None:
    done = demo(tmp_path, "--engine", "sglang")
    assert done.returncode == 1
    assert "there is no .venv-sglang/bin/python in the working directory" in done.stderr
    assert "make sglang" in done.stderr
    named = demo(tmp_path, "--engine", "sglang", DTE_SGLANG_PYTHON=str(tmp_path / "nowhere"))
    assert "nowhere does not exist" in named.stderr
    fake = interpreter(tmp_path, "1 1")
    absent = demo(tmp_path, "--engine", "sglang", "--sglang-python", str(fake), "--sglang-url", "http://127.0.0.1:9")
    assert absent.returncode == 1
    assert "no SGLang server answers at http://127.0.0.1:9" in absent.stderr
    assert not list(tmp_path.glob("dte-demo-*"))


@pytest.mark.parametrize(
    "arguments", [("--engine", "sglang", "--receivers", "2"), ("--sglang-url", "http://x"), ("--engine", "vllm")]
)
def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert demo(tmp_path, *arguments).returncode == 2


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def test_the_checkpoint_is_the_masters_cast_to_bf16_and_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = tiny()
    folder = tmp_path / "model"
    write_checkpoint(policy, folder)
    assert compare("it", folder / WEIGHTS, policy.model.named_parameters()).bit_exact
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert (folder / "tokenizer.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(str(folder))
    theirs = dict(loaded.named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert theirs[name].dtype == torch.bfloat16
        assert torch.equal(theirs[name].view(torch.int16), parameter.detach().bfloat16().view(torch.int16))
    with pytest.raises(FileExistsError):
        write_checkpoint(policy, folder)


# --- the server's answers ---------------------------------------------------------------------------------------------


def completion(tokens: list[int], *versions: str) -> dict[str, Any]:
    spans = [{"version": v, "start": n, "end": n + 1} for n, v in enumerate(versions)]
    return {"output_ids": tokens, "meta_info": {"weight_version": versions[-1], "weight_versions": spans}}


def server(answer: Callable[[httpx.Request], httpx.Response]) -> SglangServer:
    return SglangServer("http://127.0.0.1:1", transport=httpx.MockTransport(answer))


def test_token_ids_go_out_and_come_back_with_their_version() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, json=[completion([7, 8], "3"), completion([9, 9], "3")])

    first, second = server(answer).generate([[1], [2, 3]], 2, 1.0)
    assert (first.tokens, first.versions, second.tokens) == ([7, 8], ("3",), [9, 9])
    (body,) = seen
    assert body["input_ids"] == [[1], [2, 3]]
    assert body["sampling_params"] == {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (httpx.Response(200, json=[]), "0 completions of 1"),
        (httpx.Response(200, json=[{"output_ids": [1]}]), "not understood"),
        (httpx.Response(200, text="<html>"), "did not answer"),
        (httpx.Response(400, text="too long"), r"refused /generate \(400\): too long"),
    ],
)
def test_answers_that_are_not_understood_are_errors(response: httpx.Response, says: str) -> None:
    with pytest.raises(ReceiverFailed, match=says):
        server(lambda request: response).generate([[1]], 2, 1.0)


def test_checksums_are_told_apart_by_rank() -> None:
    ranks = {"ranks": [{"checksums": {"a": "1"}}, {"checksums": {"a": "2"}}]}
    assert server(lambda request: httpx.Response(200, json=ranks)).checksums() == {"0/a": "1", "1/a": "2"}
    with pytest.raises(ReceiverFailed, match="not understood"):
        server(lambda request: httpx.Response(200, json={})).checksums()


@contextmanager
def fake_server(answers: list[Any]) -> Iterator[str]:
    """A server that is ready, and completes with what stands in `answers`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(answers)

        def _send(self, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_every_token_must_come_from_one_numbered_version(tmp_path: Path) -> None:
    answers: list[Any] = [completion([1], "4"), completion([2], "4")]
    request = GenerateRequest([[1], [2]], 1, seed=0)
    with fake_server(answers) as url, Stage("demo", keep=False) as stage:
        rollouts = SglangRollouts(stage, python=interpreter(tmp_path, "1 1"), url=url, seed=0)
        sampled = rollouts.generate(request)
        assert sampled.completions == [[1], [2]]
        assert sampled.from_version(4) == {"4": 2}
        with pytest.raises(ReceiverFailed, match="to come from version 5, but 2 from version 4"):
            sampled.from_version(5)
        answers[1] = completion([2, 3], "3", "4")
        with pytest.raises(ReceiverFailed, match="from the weights 3, 4"):
            rollouts.generate(request)
        answers[1] = completion([2], "default")
        with pytest.raises(ReceiverFailed, match="from the weights default"):
            rollouts.generate(request)


def test_two_engines_are_the_same_only_in_everything() -> None:
    seen, before = Seen({"a": "1", "b": "2"}, [[1], [2]]), {"a": "0", "b": "2"}
    good = seen.reload(5, Seen({"a": "1", "b": "2"}, [[1], [2]]), before)
    assert (good.same, good.parameters, good.changed_parameters) == (True, 2, 1)
    assert seen.reload(5, Seen({"a": "1", "b": "3"}, [[1], [2]]), before).differing_parameters == ("b",)
    assert seen.reload(5, Seen({"a": "1", "c": "2"}, [[1], [2]]), before).differing_parameters == ("b", "c")
    other = seen.reload(5, Seen({"a": "1", "b": "2"}, [[1], [3]]), before)
    assert (other.differing_answers, other.same) == (1, False)
    assert not Seen({}, []).reload(5, Seen({}, []), {}).same


# --- the process ------------------------------------------------------------------------------------------------------


def test_a_server_gets_neither_our_python_nor_other_daemons_variables(tmp_path: Path) -> None:
    found = environment(tmp_path)
    assert not [k for k in found if k.startswith("PYTHON")]
    ours = {k: v for k, v in found.items() if k.startswith("DTE_")}
    assert set(ours) == {"DTE_SGLANG_CACHE_DIR"}
    assert all(Path(v).is_relative_to(tmp_path) for v in ours.values())
    line = command(Path("/x/python"), Path("/m"), 5, requests=16, seed=3)
    assert line[:3] == ["/x/python", "-m", "sglang.launch_server"]


SERVER = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen(['sleep', '1000'])\n"
    "print('up', child.pid, flush=True)\n"
    "time.sleep(float(sys.argv[1]))\n"
    "raise SystemExit(7)\n"
)


def gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("how", ["orphaned", "ends by itself"])
def test_a_guarded_server_leaves_nothing(tmp_path: Path, how: str) -> None:
    lasts = "1000" if how == "orphaned" else "0"
    line = [sys.executable, "-c", SERVER, lasts]
    with Children(tmp_path) as children:
        child = children.start("server", line, dict(os.environ), guarded=True)
        deadline = time.monotonic() + 60
        while "up" not in child.log.read_text():
            assert time.monotonic() < deadline
        pid = int(child.log.read_text().split()[1])
        if how == "orphaned":
            assert not gone(pid)
            assert child.process.stdin is not None
            child.process.stdin.close()  # as when this process is killed
        child.process.wait(60)
        while not gone(pid):
            assert time.monotonic() < deadline
        if how != "orphaned":
            assert "ended with code 7" in child.log.read_text()


def test_the_table_shows_pauses_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(0, 0), Row(1, 2, pause_ms=213.0)]
    with DemoTable(pauses=True) as table:
        for row in rows:
            table.add(row)
    head, first, second = capsys.readouterr().out.splitlines()
    assert (head.split()[-1], first.split()[-1], second.split()[-2:]) == ("pause", "-", ["213", "ms"])
    with DemoTable() as table:
        table.add(rows[1])
    assert "pause" not in capsys.readouterr().out


# --- waiting for the receivers ----------------------------------------------------------------------------------------


class Receivers:
    """A control client whose receivers never arrive."""

    def __init__(self, state: ReceiverState, error: str) -> None:
        self.info = ReceiverInfo(
            name="sglang-0", kind="sglang", run="demo", ranks=1, state=state, ready=False, installed=None,
            installed_step=None, lag=None, proof="none", last_error=error,
        )  # fmt: skip

    def wait_for_receivers(self, version: int, timeout_s: float, *, count: int) -> list[ReceiverInfo]:
        raise WaitTimeout("not yet")

    def receivers(self) -> list[ReceiverInfo]:
        return [self.info]


def loop(receivers: Receivers, stage: Stage) -> _Loop:
    nothing: Any = None
    rollouts: Any = SimpleNamespace(names=["sglang-0"])
    clients: Any = receivers
    return _Loop(DemoOptions(), DemoTable(), stage, nothing, nothing, nothing, clients, rollouts, None)


def test_a_receiver_or_a_process_that_is_gone_ends_the_wait_at_once() -> None:
    with Stage("demo", keep=False) as stage:
        failed = loop(Receivers(ReceiverState.FAILED, "its tensors are others"), stage)
        with pytest.raises(ReceiverFailed, match="sglang-0 was given up: its tensors are others"):
            failed.wait_for_receivers(0)
        child = stage.children.start("sglang", [sys.executable, "-c", "print('out of luck')"], dict(os.environ))
        child.process.wait(60)
        with pytest.raises(ChildFailed, match="out of luck"):
            loop(Receivers(ReceiverState.PROVING, ""), stage).wait_for_receivers(0)
