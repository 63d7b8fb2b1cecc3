"""Runs a Megatron-Core job under sources and compares what a real receiver holds with the dense gather, bit for bit."""

from __future__ import annotations

import time
from typing import Any, Literal

import httpx
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from clients.control import ControlClient
from clients.rollout.torch import TorchReceiver
from tests.support.megatron.job import Job, hf_config
from tests.support.megatron.launch import Rig, Task

TIMEOUT_S = 240.0


def rollout_model(config: dict[str, Any], dense: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A rollout engine's model, with weights of nobody's: the transformers model, or for mixtures of experts, which
    transformers keeps under names of its own, a module with one parameter for each tensor of the checkpoint."""
    if "num_experts_per_tok" not in config:
        own = dict(config)
        kind = AutoConfig.for_model(own.pop("model_type"), **own)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(kind, dtype=getattr(torch, config["torch_dtype"]))
        return model
    root = torch.nn.Module()
    for name, tensor in dense.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        # Megatron-Core holds a router's bias in 16 bits until the first forward pass.
        kind = torch.float32 if leaf == "e_score_correction_bias" else tensor.dtype
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(tensor, dtype=kind), requires_grad=False))
    return root


class Follower:
    """One run. `versions` maps a version to the dense gather of its step; `said` is all that rank 0 said. `transport`:
    of the receiver; training goes on only when a receiver with `p2p` can be sent versions."""

    def __init__(self, rig: Rig, daemons: list[str], run: str) -> None:
        self.rig = rig
        self.transport: Literal["store", "p2p"] = "store"
        self.daemons = daemons
        self.run = run
        self.control = ControlClient(daemons[0], run=run)
        self.receiver: TorchReceiver | None = None
        self.said: list[dict[str, Any]] = []

    def train(
        self, world: int, job: Job, steps: int, *, scenario: str = "follow", nodes: int = 1, **args: Any
    ) -> list[Any]:
        """Run `scenario` in every rank; compare every version that comes of it. What the ranks returned."""
        session = self.rig.session(world)
        session.start(
            Task(
                job,
                f"tests.megatron.scenarios:{scenario}",
                {"daemons": self.daemons[:nodes], "run": self.run, "steps": steps, **args},
            ),
            timeout_s=TIMEOUT_S,
        )
        for number in range(steps + 1):
            said = session.hear(0)
            self.said.append(said)
            self.compare(job, said)
            if self.transport == "p2p" and number < steps:
                self._wait_group()
            session.say(None, [0])
        return [r.value for r in session.wait()]

    def compare(self, job: Job, said: dict[str, Any]) -> None:
        """The receiver at the newest version against the gather of this step."""
        dense = load_file(said["file"])
        if self.receiver is None:
            config = hf_config(job) | ({"torch_dtype": "float16"} if job.fp16 else {})
            self.model = rollout_model(config, dense)
            self.receiver = TorchReceiver(
                self.model, name=f"to-{self.run}", run=self.run, daemon=self.daemons[0], transport=self.transport
            )
        if said["version"] is not None and said["state"] == "committed":
            self._wait(said["version"])
        with self.receiver.serving(TIMEOUT_S):
            held = self.model.state_dict()
            names = {n for n in held if not (job.tied and n == "lm_head.weight")}
            assert set(dense) == names, set(dense) ^ names
            wrong = {n: int((bits(held[n]) != bits(dense[n].to(held[n].dtype))).sum()) for n in names}
        assert not any(wrong.values()), {n: w for n, w in wrong.items() if w}

    def _wait_group(self) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while (view := httpx.get(f"{self.daemons[0]}/p2p/{self.run}").json())["group"] is None or (
            view["group"]["state"] != "open"
        ):
            assert time.monotonic() < until_s, view
            time.sleep(0.02)

    def _wait(self, version: int) -> None:
        assert self.receiver is not None
        until_s = time.monotonic() + TIMEOUT_S
        while not self.receiver.ready or (self.receiver.version or 0) < version:
            assert time.monotonic() < until_s, self.control.receivers()
            time.sleep(0.02)

    def same(self, file: str, other: str) -> None:
        """Two dense files have the same bits."""
        a, b = load_file(file), load_file(other)
        assert a.keys() == b.keys()
        assert not [n for n in a if not torch.equal(bits(a[n]), bits(b[n]))]

    def changed(self) -> list[int]:
        """Changed elements of every version after the first."""
        return [v.changed for v in self.control.versions().versions if v.base is not None]

    def dense_tiles(self) -> list[int]:
        """Tiles that went whole, of every version after the first."""
        return [v.dense_tiles for v in self.control.versions().versions if v.base is not None]

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.control.close()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
