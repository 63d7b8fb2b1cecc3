"""Megatron-Core ranks publish, a real SGLang server at TP2 follows: nothing in between is gathered or converted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.megatron.job import Job, hf_config
from tests.support.megatron.launch import ROOT, Rig, Task
from tests.support.ports import free_port
from tests.support.sglang.checkpoints import make
from tests.support.sglang.server import Server, needs_sglang

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(1200)]
PATIENCE_S = 240.0
STEPS = 3


def checkpoint(job: Job, weights: str, tokenizer: Path, folder: Path) -> Path:
    """A checkpoint of the job's model with these weights."""
    folder.mkdir()
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens")):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(hf_config(job) | {"max_position_embeddings": 512}))
    shutil.copy(weights, folder / "model.safetensors")
    return folder


def wait_for(url: str, run: str, version: int) -> dict[str, Any]:
    """The receiver once it has the version and serves it."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        found: dict[str, Any] = httpx.get(f"{url}/receivers/actor", params={"run": run}, timeout=60.0).json()
        if found.get("installed") == version and found.get("ready"):
            return found
        assert time.monotonic() < until_s, found
        time.sleep(0.05)


def example(server: Server, base: Path, daemon: str, folder: Path) -> list[str]:
    """What `examples/megatron_rl` prints in two steps on two ranks, with Megatron-Core's CUDA calls redirected."""
    options = ["--checkpoint", str(base), "--rollouts", server.url, "--daemon", daemon, "--steps", "2", "--tp", "2"]
    code = (
        "import runpy, sys; from tests.support.megatron import shim; shim.install(); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "examples/megatron_rl/train.py", *options]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    files = [folder / f"example-{rank}.log" for rank in range(2)]
    ranks = []
    for rank, file in enumerate(files):
        with file.open("w") as log:
            env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "\n".join(file.read_text()[-3000:] for file in files)
    return files[0].read_text().splitlines()


def test_an_sglang_server_follows_tensor_parallel_training(rig: Rig, daemons: list[str], tmp_path: Path) -> None:
    job = Job(family="qwen3", tp=2, vocab=300)
    run = "megatron-sglang"
    tokenizer = make("qwen3", tmp_path)
    session = rig.session(2)
    args = {"daemons": daemons, "run": run, "steps": STEPS}
    session.start(Task(job, "tests.megatron.scenarios:follow", args), timeout_s=600)
    server = None
    try:
        for number in range(STEPS + 1):
            said = session.hear(0)
            if server is None:
                base = checkpoint(job, said["file"], tokenizer, tmp_path / "base")
                server = Server(base, tmp_path, tp=2).wait_ready()
                body = {"name": "actor", "kind": "sglang", "run": run, "url": server.url}
                assert httpx.post(f"{daemons[0]}/receivers", json=body, timeout=60.0).status_code == 200
            assert said["version"] == number
            found = wait_for(daemons[0], run, number)
            assert (found["proof"], found["resyncs"]) == ("proven", 0)
            assert server.weight_version == str(number)
            session.say(None, [0])
        session.wait()
        answer = server.generate()
        sums = server.checksums()
        last = checkpoint(job, said["file"], tokenizer, tmp_path / "last")
        assert server.post("/update_weights_from_disk", model_path=str(last)).status_code == 200
        assert server.checksums() == sums
        assert server.generate()["output_ids"] == answer["output_ids"]
        httpx.delete(f"{daemons[0]}/receivers/actor", params={"run": run}, timeout=60.0)
        run = "megatron-rl"
        body = {"name": "actor", "kind": "sglang", "run": run, "url": server.url}
        assert httpx.post(f"{daemons[0]}/receivers", json=body, timeout=60.0).status_code == 200
        made = [line for line in example(server, base, daemons[0], tmp_path) if ": committed, version" in line]
        assert made
        newest = int(made[-1].split("version ")[1].split(",")[0])
        wait_for(daemons[0], run, newest)
        assert server.weight_version == str(newest)
    finally:
        httpx.delete(f"{daemons[0]}/receivers/actor", params={"run": run}, timeout=60.0)
        if server is not None:
            server.end()
