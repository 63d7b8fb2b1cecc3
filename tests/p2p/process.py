"""A receiver rank in a process of its own: it can be stopped, killed, started again and asked what it holds open."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from clients.rollout.torch import TorchReceiver
from tests.p2p.rig import Holder, Rect
from tests.support.processes import Channel, Child


class Rank:
    """The parent's end. `socket` stays the same over its lives."""

    def __init__(self, folder: Path, rects: Sequence[Rect], *, socket: Path, **config: Any) -> None:
        self.rects = rects
        self._dump = folder / f"{socket.stem}.npz"
        self.child = Child(
            socket.stem,
            "tests.p2p.process:receiver",
            folder,
            rects=[asdict(r) for r in rects],
            socket=str(socket),
            **config,
        )
        self.ask = self.child.ask

    def held(self) -> dict[str, npt.NDArray[np.int16]]:
        """Its weights' bits, by rectangle number."""
        self.ask("dump", path=str(self._dump))
        with np.load(self._dump) as found:
            return {n: found[n] for n in found.files}


def open_things() -> dict[str, int]:
    """File descriptors and threads of this process."""
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}


def receiver(
    channel: Channel,
    *,
    name: str,
    run: str,
    daemon: str | None,
    model: dict[str, list[int]],
    rects: list[dict[str, Any]],
    socket: str,
    sockets: list[str],
    rank: int,
    transport: Any,
) -> None:
    """Commands `dump`, `serve` and `leave` (hold the weights still), `open` (descriptors and threads), `stacks`
    (into its log)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    holder = Holder({n: tuple(s) for n, s in model.items()}, [Rect(**r) for r in rects], {})
    serving = TorchReceiver(
        holder,
        name=name,
        run=run,
        daemon=daemon,
        socket_path=socket,
        sockets=sockets if len(sockets) > 1 else (),
        rank=rank,
        shards=holder.shards,
        transport=transport,
        owner_grace_s=0.5,
    )
    leave = threading.Event()
    channel.send({"pid": os.getpid()})
    while True:
        asked = channel.receive()
        reply: dict[str, Any] = {}
        if asked["op"] == "dump":
            np.savez(asked["path"], **{str(n): bits for n, (_, bits) in enumerate(holder.held())})
        elif asked["op"] == "serve":
            entered = threading.Event()
            leave.clear()

            def hold(entered: threading.Event = entered) -> None:
                with serving.serving():
                    entered.set()
                    leave.wait()

            threading.Thread(target=hold, daemon=True).start()
            reply["entered"] = entered.wait(60)
        elif asked["op"] == "leave":
            leave.set()
        elif asked["op"] == "open":
            reply |= open_things() | {"kept": len(serving._core.mailbox._kept)}
        elif asked["op"] == "stacks":
            faulthandler.dump_traceback()
        channel.send(reply | {"version": serving.version, "ready": serving.ready})
