"""A real receiver in a process of its own, commanded over a channel."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from clients.rollout.torch import TorchReceiver
from engine.records import TensorMeta
from tests.support.processes import Channel, Child
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
        config = {"run": "r", "seed": 0, "socket": str(self.socket)} | config
        self._child = Child(name, "tests.support.receiver_process:receiver", folder, called=name, **config)
        self._child.started()

    def ask(self, command: str, **values: Any) -> dict[str, Any]:
        return self._child.ask(command, **values)

    def weights(self) -> State:
        path = self.folder / f"{self.name}.npz"
        self.ask("dump", path=str(path))
        with np.load(path) as found:
            return {n: found[n] for n in found.files}

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._child.kill()

    def end(self) -> None:
        self._child.end()


def receiver(
    channel: Channel,
    *,
    called: str,
    run: str,
    seed: int,
    socket: str,
    daemon: str | None = None,
    owner_grace_s: float = 0.2,
    finalize_timeout_s: float = 60.0,
) -> None:
    """Serve the tiny model with the weights of `seed`; the first answer says that it does."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    model = TinyModel()
    load(model, tiny_state(seed))
    receiver = TorchReceiver(
        model,
        name=called,
        run=run,
        daemon=daemon,
        socket_path=socket,
        owner_grace_s=owner_grace_s,
        finalize_timeout_s=finalize_timeout_s,
    )
    leave = threading.Event()
    channel.send({"ready": True})
    while True:
        asked = channel.receive()
        reply: dict[str, Any] = {}
        if asked["op"] == "dump":
            np.savez(asked["path"], **dump(model))  # type: ignore[arg-type]
        elif asked["op"] == "poke":
            with torch.no_grad():
                model.norm.weight[0] += 1
        elif asked["op"] == "reset":
            load(model, tiny_state(asked["seed"]))
            leave.clear()
        elif asked["op"] == "replace":
            model.norm.weight = nn.Parameter(model.norm.weight.detach().clone())
        elif asked["op"] == "serve":
            entered = threading.Event()

            def hold(entered: threading.Event = entered) -> None:
                with receiver.serving():
                    entered.set()
                    leave.wait()

            threading.Thread(target=hold, daemon=True).start()
            reply["entered"] = entered.wait(asked.get("timeout_s", 30))
        elif asked["op"] == "leave":
            leave.set()
        reply |= {"version": receiver.version, "step": receiver.step, "ready": receiver.ready}
        channel.send(reply)
