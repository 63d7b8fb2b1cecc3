"""What the other processes run: a trainer rank that goes from job to job, and a receiver that goes from run to run."""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from clients.rollout.torch import TorchReceiver
from clients.trainer import FsdpSource, SyncHandle
from engine.errors import DteError
from tests.fsdp.models import Policy, Spec, build, rollout, shard
from tests.support.processes import PATIENCE_S, Channel

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Trainer:
    """One rank of one job."""

    def __init__(
        self, *, rank: int, world: int, meeting: str, spec: dict[str, Any], seed: int = 0, checkpoint: str | None = None
    ) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=PATIENCE_S),
        )
        self.rank = rank
        self.spec = Spec(**spec)
        self.model: Policy = build(self.spec, seed)
        shards = world // self.spec.replicas
        sizes, names = ((self.spec.replicas, shards), ("replicate", "shard")) if self.spec.replicas > 1 else (
            (shards,), ("shard",),
        )  # fmt: skip
        shard(self.model, self.spec, init_device_mesh("cpu", sizes, mesh_dim_names=names))
        self.optimizer = self._optimizer()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1.0 / (1 + n % 3))
        self.step = 0
        self.source: FsdpSource | None = None
        self.handle: SyncHandle | None = None
        self.seen: list[int] = []
        self.keys: dict[str, Any] = {}
        if checkpoint is not None:
            self._load(checkpoint)

    def _optimizer(self) -> torch.optim.AdamW:
        named = dict(self.model.named_parameters())
        first = [p for n, p in named.items() if "extras" not in n]
        rest = [p for n, p in named.items() if "extras" in n and p.requires_grad]
        groups = [{"params": first}, {"params": rest, "lr": 1e-4, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=4e-6, weight_decay=0.1)

    # --- training --------------------------------------------------------------------------------------------------

    def train(self, *, skip: bool = False) -> None:
        """A step from two microbatches. Every other one leaves a parameter without gradient; `skip` takes no step."""
        self.step += 1
        for part in range(2):
            self.model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            generator = torch.Generator().manual_seed(self.step * 100 + self.rank * 10 + part)
            tokens = torch.randint(0, self.spec.vocab, (2, 8), generator=generator)
            self.model(tokens, few=self.step % 2 == 0).backward()
        grad = self.model.extras.loose.grad
        if grad is not None:  # what FSDP ignores is the user's to keep equal
            dist.all_reduce(grad)
        if not skip:
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad()
        self.model.extras.bias = self.model.extras.bias + 0.25  # a router bias: another object each time

    def digest(self) -> str:
        """Of all bits that training goes on from, on this rank; state that is not there yet is zeros."""
        held = hashlib.sha256()
        for p in self.model.parameters():
            state = self.optimizer.state.get(p, {}) if p.requires_grad else {}
            moments = [state.get(key, torch.zeros_like(p.detach())) for key in ("exp_avg", "exp_avg_sq")]
            for t in (p, *moments):
                held.update(_bits(_local(t)).tobytes())
            held.update(str(float(state.get("step", 0.0))).encode())
        return held.hexdigest()

    def record(self, folder: str) -> None:
        """Write down what a receiver of this step must hold: dense gathers under the checkpoint's names."""
        whole = {}
        for name, t in _published(self.model):
            full = t.full_tensor() if isinstance(t, DTensor) else t
            if isinstance(t, nn.Parameter):
                full = full.detach().bfloat16()
            whole[name.replace("_checkpoint_wrapped_module.", "")] = _bits(full)
        if self.rank == 0:
            _save(Path(folder) / f"step-{self.step}.npz", whole)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def save(self, folder: str) -> None:
        dcp.save(self._state() | {"schedule": self.schedule.state_dict()}, checkpoint_id=folder)

    def _load(self, folder: str) -> None:
        state = self._state() | {"schedule": self.schedule.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),
        )  # fmt: skip
        self.schedule.load_state_dict(state["schedule"])
        self.step = int(state["step"])

    def full(self) -> dict[str, Any]:
        """Whole tensors on all ranks, as other jobs keep them."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))
        return {"model": model, "optimizer": optimizer}


# --- commands ---------------------------------------------------------------------------------------------------------


def _register(t: Trainer, *, run: str, daemon: str, **options: Any) -> dict[str, Any]:
    t.source = FsdpSource(t.model, t.optimizer, run=run, daemon=daemon, register_timeout_s=PATIENCE_S, **options)
    epoch = t.source.register(t.step)
    slices = [p for s in t.source._registered().plan.shards if not s.replica for p in s.pieces]
    return {
        "epoch": epoch,
        "detectors": {p.meta.name: p.detector for p in slices},
        "numel": {p.meta.name: p.numel for p in slices},
        "aliases": dict(t.source.aliases),
    }


def _train(
    t: Trainer, *, steps: int = 1, folder: str | None = None, skip: bool = False, publish: bool = True
) -> dict[str, Any]:
    """Train; with a source, sync every step and wait for what becomes of it."""
    done = []
    for _ in range(steps):
        t.train(skip=skip)
        result: dict[str, Any] = {"step": t.step, "digest": t.digest()}
        if folder is not None:
            t.record(folder)
        if t.source is not None:
            job = t.source.sync(t.step, publish=publish).wait(PATIENCE_S)
            result |= {"state": job.state.value, "version": job.version}
        done.append(result)
    return {"steps": done, "step": t.step}


def _record(t: Trainer, *, folder: str) -> dict[str, Any]:
    t.record(folder)
    return {"step": t.step}


def _save_checkpoint(t: Trainer, *, folder: str) -> dict[str, Any]:
    t.save(folder)
    return {"digest": t.digest()}


def _keep(t: Trainer) -> dict[str, Any]:
    """Remember the present state."""
    t.keys = t.full()
    return {"digest": t.digest()}


def _back(t: Trainer) -> dict[str, Any]:
    """Load the remembered state in the middle of training."""
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        t.model, t.optimizer, model_state_dict=t.keys["model"], optim_state_dict=t.keys["optimizer"], options=options
    )
    return {"digest": t.digest()}


def _write_frozen(t: Trainer) -> dict[str, Any]:
    """Somebody merges into a weight that nothing trains."""
    with torch.no_grad():
        t.model.extras.frozen.mul_(1.5)
    return {}


def _astray(t: Trainer, *, name: str, rank: int | None) -> dict[str, Any]:
    """One bit of what `rank` holds of a parameter flips; None: all ranks have what rank 0 has."""
    assert t.source is not None
    memory = _local(dict(t.model.named_parameters())[name]).detach()
    with torch.no_grad(), t.source.mutating():
        if rank is None:
            dist.broadcast(memory, 0)
        elif rank == t.rank:
            memory.view(-1).view(torch.int32)[0] ^= 1 << 20
    return {"replicas": sorted({s.name for s in t.source._registered().plan.shards if s.replica})}


def _spoil(t: Trainer) -> dict[str, Any]:
    """Make FSDP's record of a parameter look like that of another torch."""
    (group,) = t.model.extras.low._get_fsdp_state()._fsdp_param_groups  # type: ignore[union-attr, operator]
    del group.fsdp_params[0].pin_memory
    return {}


def _stats(t: Trainer) -> dict[str, Any]:
    assert t.source is not None
    s = t.source.stats
    return {"syncs": s.syncs, "down": s.down, "revoked": s.revoked, "moved": s.moved, "bytes": s.shared_bytes}


def _shared(t: Trainer) -> dict[str, Any]:
    """Names of tensors whose memory is a shared file of ours, and how many of those that could be there are."""
    spans = _spans()
    inside = [n for n, p in t.model.named_parameters() if _local(p).numel() and _in(spans, _local(p).data_ptr())]
    gathered = []
    for n, p in t.model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            moment = t.optimizer.state.get(p, {}).get(key)
            if moment is not None and _local(moment).numel() and _in(spans, _local(moment).data_ptr()):
                gathered.append(f"{n}.{key}")
    return {"parameters": inside, "moments": gathered}


def _spans() -> list[tuple[int, int]]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/dte-" in line:
            start, _, end = line.split()[0].partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def _in(spans: list[tuple[int, int]], address: int) -> bool:
    return any(a <= address < b for a, b in spans)


def _close(t: Trainer) -> dict[str, Any]:
    assert t.source is not None
    t.source.close()
    t.source = None
    return {}


_OPS: dict[str, Callable[..., dict[str, Any]]] = {
    "register": _register,
    "train": _train,
    "record": _record,
    "save": _save_checkpoint,
    "keep": _keep,
    "back": _back,
    "write_frozen": _write_frozen,
    "astray": _astray,
    "spoil": _spoil,
    "stats": _stats,
    "shared": _shared,
    "close": _close,
}


def rank(channel: Channel) -> None:
    """Commands: `begin` a job, those of `_OPS`, `end` it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    job: Trainer | None = None
    while True:
        try:
            asked = channel.receive()
        except EOFError:
            return
        op = asked.pop("op")
        try:
            reply: dict[str, Any] = {}
            if op == "begin":
                job = Trainer(**asked)
            elif op == "end":
                if job is not None and job.source is not None:
                    job.source.close()
                job = None
                if dist.is_initialized():
                    dist.destroy_process_group()
            else:
                assert job is not None
                reply = _OPS[op](job, **asked)
            channel.send({"ok": True, **reply})
        except Exception as error:
            logging.exception("%s failed", op)
            remedy = error.remedy if isinstance(error, DteError) else ""
            channel.send({"ok": False, "error": type(error).__name__, "text": str(error), "remedy": remedy})


def receiver(channel: Channel) -> None:
    """Commands: `follow` a run with a model, `dump` its weights, `leave`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    serving: TorchReceiver | None = None
    model: Policy | None = None
    while True:
        try:
            asked = channel.receive()
        except EOFError:
            return
        op = asked["op"]
        if op == "follow":
            model = rollout(Spec(**asked["spec"]))
            serving = TorchReceiver(
                model, name=f"to-{asked['run']}", run=asked["run"], daemon=asked["daemon"], socket_path=asked["socket"]
            )
        assert serving is not None
        assert model is not None
        if op == "dump":
            with serving.serving(PATIENCE_S):
                _save(Path(asked["path"]), {name: _bits(t) for name, t in _published(model)})
        reply = {"version": serving.version, "step": serving.step, "ready": serving.ready}
        if op == "leave":
            serving.close()
            serving = model = None
        channel.send(reply)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _published(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    kept = model.state_dict(keep_vars=True).keys()
    yield from ((n, b) for n, b in model.named_buffers() if n in kept)


def _local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local().detach() if isinstance(t, DTensor) else t.detach()


def _bits(t: torch.Tensor) -> Any:
    return t.detach().contiguous().reshape(-1).view(_WORDS[t.element_size()]).numpy()


def _save(path: Path, arrays: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")
    np.savez(part, **arrays)
    os.replace(part if part.suffix == ".npz" else part.with_suffix(".npz"), path)
