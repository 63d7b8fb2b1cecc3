"""What the receiver's process runs: a receiver of the trainers' model."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tests.faults.model import SHAPES
from tests.support.processes import Channel


class Served(nn.Module):
    """The trainers' tensors in BF16, as nonsense until the first version is installed."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            owner: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(torch.full(shape, 7.0, dtype=torch.bfloat16)))


def receiver(channel: Channel, *, name: str, run: str, daemon: str, socket: str, folder: str) -> None:
    """Commands: `dump` writes the weights' bits as one flat array."""
    from clients.rollout.torch import TorchReceiver

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    Path(socket).unlink(missing_ok=True)
    model = Served()
    serving = TorchReceiver(model, name=name, run=run, daemon=daemon, socket_path=socket, owner_grace_s=0.5)
    channel.send({"pid": os.getpid()})
    while True:
        asked = channel.receive()
        if asked["op"] == "dump":
            named = dict(model.named_parameters())
            bits = np.concatenate(
                [named[n].detach().reshape(-1).view(torch.int16).numpy().view(np.uint16) for n in SHAPES]
            )
            np.save(Path(folder) / "receiver.npy", bits)
        channel.send({"version": serving.version, "step": serving.step, "ready": serving.ready})
