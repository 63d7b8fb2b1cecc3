"""One trainer rank: real AdamW on its slices of the tiny model, gradients from the real loss, Gloo between the ranks.

Before each sync it writes down the true bits of that step, and a checkpoint of the newest few steps.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from clients.trainer import OwnedSlice, SyncHandle, TorchSource
from engine.errors import DteError
from tests.faults.model import SHAPES, TOTAL, gradient, initial, pieces
from tests.support.processes import PATIENCE_S, Channel

KEPT_CHECKPOINTS = 3


class Rank:
    """`step` trains, `sync` publishes."""

    def __init__(self, *, folder: str, rank: int, world: int, seed: int, checkpoint: str | None, lr: float) -> None:
        self.folder = Path(folder)
        self.rank, self.world = rank, world
        self.pieces = pieces(world, rank)
        self.step_number = 0
        self.launch = ""
        self.handle: SyncHandle | None = None
        flat = initial(seed)
        self.params = [torch.nn.Parameter(flat[p.at : p.at + p.size].clone()) for p in self.pieces]
        self.optimizer = torch.optim.AdamW(self.params, lr=lr, weight_decay=0.01)
        if checkpoint is not None:
            self._load(Path(checkpoint))

    def slices(self) -> list[OwnedSlice]:
        return [
            OwnedSlice(name=p.name, shape=SHAPES[p.name], tensor=q, offset=p.start)
            for p, q in zip(self.pieces, self.params, strict=True)
        ]

    def train(self) -> None:
        """One optimizer step. Every fourth leaves the norm without gradient."""
        whole = torch.zeros(TOTAL)
        for p, q in zip(self.pieces, self.params, strict=True):
            whole[p.at : p.at + p.size] = q.detach()
        if self.world > 1:
            dist.all_reduce(whole)
        self.step_number += 1
        grad = gradient(whole, self.step_number)
        for p, q in zip(self.pieces, self.params, strict=True):
            skipped = p.name == "norm.weight" and self.step_number % 4 == 0
            q.grad = None if skipped else grad[p.at : p.at + p.size].clone()
        self.optimizer.step()
        self.record()

    def record(self) -> None:
        """Write down what a receiver of this step must hold, and a checkpoint."""
        bits = torch.cat([q.detach().bfloat16().view(torch.int16) for q in self.params]).numpy().view(np.uint16)
        self._write(f"truth/{self.launch}/{self.step_number}", bits=bits)
        states = [self.optimizer.state.get(q, {}) for q in self.params]
        zeros = [torch.zeros_like(q) for q in self.params]
        self._write(
            f"checkpoints/{self.launch}/{self.step_number}",
            theta=torch.cat([q.detach() for q in self.params]).numpy(),
            m=torch.cat([s.get("exp_avg", z) for s, z in zip(states, zeros, strict=True)]).numpy(),
            v=torch.cat([s.get("exp_avg_sq", z) for s, z in zip(states, zeros, strict=True)]).numpy(),
            steps=np.array([float(s.get("step", 0.0)) for s in states]),
            names=np.array([p.name for p in self.pieces]),
        )
        old = self.folder / f"checkpoints/{self.launch}/{self.step_number - KEPT_CHECKPOINTS}/{self.rank}.npz"
        old.unlink(missing_ok=True)

    def _write(self, where: str, **arrays: Any) -> None:
        folder = self.folder / where
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{self.rank}.npz"
        np.savez(part, **arrays)
        os.replace(part, folder / f"{self.rank}.npz")

    def _load(self, folder: Path) -> None:
        files = [np.load(folder / f"{r}.npz") for r in range(len(list(folder.glob("*.npz"))))]
        theta, m, v = (torch.from_numpy(np.concatenate([f[k] for f in files])) for k in ("theta", "m", "v"))
        steps = {str(n): float(s) for f in files for n, s in zip(f["names"], f["steps"], strict=True)}
        self.step_number = int(folder.name)
        for p, q in zip(self.pieces, self.params, strict=True):
            here = slice(p.at, p.at + p.size)
            with torch.no_grad():
                q.copy_(theta[here])
            self.optimizer.state[q] = {
                "step": torch.tensor(steps[p.name]),
                "exp_avg": m[here].clone(),
                "exp_avg_sq": v[here].clone(),
            }


def everybody(yes: bool, world: int) -> bool:
    """Whether all ranks say yes."""
    if world == 1:
        return yes
    word = torch.tensor([int(yes)])
    dist.all_reduce(word, op=dist.ReduceOp.MIN)
    return bool(word.item())


def rank(
    channel: Channel,
    *,
    folder: str,
    rank: int,
    world: int,
    run: str,
    daemon: str,
    meeting: str,
    seed: int,
    checkpoint: str | None,
    lr: float = 4e-6,
    on_daemon_down: Any = "continue",
) -> None:
    """Commands `train`, `flush`, `wait`; the first answer is how the registration went."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        patience = datetime.timedelta(seconds=PATIENCE_S)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=patience)
    me = Rank(folder=folder, rank=rank, world=world, seed=seed, checkpoint=checkpoint, lr=lr)
    from clients.trainer.group import new_launch

    me.launch = new_launch()
    me.record()
    source = TorchSource(
        slices=me.slices(),
        optimizer=me.optimizer,
        daemon=daemon,
        run=run,
        rank=rank,
        world=world,
        launch=me.launch,
        on_daemon_down=on_daemon_down,
        register_timeout_s=PATIENCE_S,
    )
    channel.send(_attempt(lambda: {"epoch": source.register(me.step_number), "launch": me.launch}))
    while True:
        try:
            asked = channel.receive()
        except EOFError:
            return
        op = asked.pop("op")
        channel.send(_attempt(lambda op=op, asked=asked: _OPS[op](me, source, **asked)))


def _train(me: Rank, source: TorchSource, *, steps: int, publish: bool = True) -> dict[str, Any]:
    done = []
    for _ in range(steps):
        me.train()
        me.handle = source.sync(me.step_number, publish=publish)
        done.append({"step": me.step_number, "version": me.handle.version, "job": me.handle.job_id})
    return {"syncs": done, "step": me.step_number}


def _wait(me: Rank, source: TorchSource) -> dict[str, Any]:
    """The final state of the newest sync."""
    assert me.handle is not None
    job = me.handle.wait(PATIENCE_S)
    return {"state": job.state.value, "version": job.version, "detail": job.detail, "step": job.step}


def _flush(me: Rank, source: TorchSource) -> dict[str, Any]:
    """Train on until a step has become a version of all ranks."""
    end_s = time.monotonic() + PATIENCE_S
    states = []
    while True:
        me.train()
        handle = me.handle = source.sync(me.step_number)
        state = handle.wait(PATIENCE_S).state.value if handle.posted else "down"
        states.append(state)
        if everybody(state == "committed", me.world):
            return {"step": me.step_number, "version": handle.version, "states": states}
        if everybody(time.monotonic() > end_s, me.world):
            raise AssertionError(f"no version came to be: {states[-20:]}")
        time.sleep(0.05)


def _save(me: Rank, source: TorchSource) -> dict[str, Any]:
    return {"checkpoint": str(me.folder / f"checkpoints/{me.launch}/{me.step_number}")}


def _stats(me: Rank, source: TorchSource) -> dict[str, Any]:
    s = source.stats
    return {"syncs": s.syncs, "down": s.down, "revoked": s.revoked}


def _leave(me: Rank, source: TorchSource) -> dict[str, Any]:
    source.close()
    return {}


_OPS: dict[str, Any] = {
    "train": _train, "wait": _wait, "flush": _flush, "save": _save, "stats": _stats, "leave": _leave,
}  # fmt: skip


def _attempt(work: Any) -> dict[str, Any]:
    try:
        return {"ok": True, **work()}
    except Exception as error:
        logging.exception("failed")
        remedy = error.remedy if isinstance(error, DteError) else ""
        return {"ok": False, "error": type(error).__name__, "text": str(error), "remedy": remedy}
