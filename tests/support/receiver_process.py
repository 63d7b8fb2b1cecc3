"""A real receiver in a process of its own, commanded by JSON lines on stdin, answering on stdout.

python -m tests.support.receiver_process '{"seed": 0, "name": "a", "run": "r", "socket": "…", "daemon": null}'
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from clients.rollout.torch import TorchReceiver
from engine.records import TensorMeta
from tests.support.versions import metas_of

State = dict[str, npt.NDArray[np.uint16]]

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "embed.weight": ((50, 16), "bfloat16"),
    "proj.weight": ((24, 16), "bfloat16"),
    "norm.weight": ((16,), "bfloat16"),
    "router_bias": ((5,), "float32"),
    "counter": ((3,), "uint8"),
}


class TinyModel(nn.Module):
    """Tied weights, a transposed parameter, an FP32 buffer, an odd number of bytes, a buffer that no version has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(16, 50, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.embed.weight
        self.proj = nn.Linear(16, 24, bias=False, dtype=torch.bfloat16)
        self.proj.weight = nn.Parameter(torch.zeros(16, 24, dtype=torch.bfloat16).t())
        self.norm = nn.LayerNorm(16, bias=False, dtype=torch.bfloat16)
        self.register_buffer("router_bias", torch.zeros(5))
        self.register_buffer("counter", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def tiny_metas() -> list[TensorMeta]:
    return metas_of(SHAPES)


def tiny_state(seed: int) -> State:
    rng = np.random.default_rng(seed)
    state: State = {}
    for name, (shape, dtype) in SHAPES.items():
        lanes = -(-int(np.prod(shape)) * {"bfloat16": 2, "float32": 4, "uint8": 1}[dtype] // 2)
        state[name] = rng.integers(0, 1 << 16, lanes).astype(np.uint16)
    state["counter"][-1] &= 0xFF
    return state


def load(model: nn.Module, state: State) -> None:
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, (shape, dtype) in SHAPES.items():
        raw = torch.from_numpy(state[name].view(np.uint8)[: named[name].numel() * named[name].element_size()].copy())
        with torch.no_grad():
            named[name].copy_(raw.view(getattr(torch, dtype)).reshape(shape))


def dump(model: nn.Module) -> State:
    """The weights as canonical lanes."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    out: State = {}
    for name in SHAPES:
        raw = named[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        padded = np.zeros(-(-raw.size // 2) * 2, np.uint8)
        padded[: raw.size] = raw
        out[name] = padded.view(np.uint16).copy()
    return out


class Process:
    """The parent's end."""

    def __init__(self, folder: Path, name: str, **config: Any) -> None:
        self.name = name
        self.folder = folder
        self.socket = folder / f"{name}.sock"
        config = {"name": name, "run": "r", "seed": 0, "socket": str(self.socket)} | config
        self._log = (folder / f"{name}.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.receiver_process", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / f"{self.name}.log").read_text()
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, command: str, **values: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **values}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def weights(self) -> State:
        path = self.folder / f"{self.name}.npz"
        self.ask("dump", path=str(path))
        with np.load(path) as found:
            return {n: found[n] for n in found.files}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout, self._log):
            if stream is not None:
                stream.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    config = json.loads(sys.argv[1])
    model = TinyModel()
    load(model, tiny_state(config["seed"]))
    receiver = TorchReceiver(
        model,
        name=config["name"],
        run=config["run"],
        daemon=config.get("daemon"),
        socket_path=config["socket"],
        owner_grace_s=config.get("owner_grace_s", 0.2),
        finalize_timeout_s=config.get("finalize_timeout_s", 60.0),
    )
    leave = threading.Event()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        reply: dict[str, Any] = {}
        if asked["command"] == "dump":
            np.savez(asked["path"], **dump(model))  # type: ignore[arg-type]
        elif asked["command"] == "poke":
            with torch.no_grad():
                model.norm.weight[0] += 1
        elif asked["command"] == "reset":
            load(model, tiny_state(asked["seed"]))
            leave.clear()
        elif asked["command"] == "replace":
            model.norm.weight = nn.Parameter(model.norm.weight.detach().clone())
        elif asked["command"] == "serve":
            entered = threading.Event()

            def hold(entered: threading.Event = entered) -> None:
                with receiver.serving():
                    entered.set()
                    leave.wait()

            threading.Thread(target=hold, daemon=True).start()
            reply["entered"] = entered.wait(asked.get("timeout_s", 30))
        elif asked["command"] == "leave":
            leave.set()
        reply |= {"version": receiver.version, "step": receiver.step, "ready": receiver.ready}
        print(json.dumps(reply), flush=True)
    receiver.close()


if __name__ == "__main__":
    main()
