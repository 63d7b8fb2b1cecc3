"""What each rank of a real Megatron-Core run does under a `MegatronSource`.

After every step that may become a version rank 0 writes the dense gather of the trainer's weights beside it, which
nothing of dte took part in; the test compares it with what a receiver holds.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from clients.control import ControlClient
from clients.protocol import JobState
from clients.trainer.megatron import MegatronSource
from clients.trainer.megatron.model import parameters, unwrap
from clients.trainer.megatron.source import current_shape
from clients.trainer.megatron.state import masters
from engine.errors import InvalidInput
from engine.models.megatron import MegatronTable
from tests.support.megatron.gather import gather_hf
from tests.support.megatron.train import Trainer
from tests.support.megatron.worker import Context

TIMEOUT_S = 120.0


def source_of(trainer: Trainer, context: Context, **options: Any) -> MegatronSource:
    """This rank's source at its node's daemon: the daemons take turns over the ranks."""
    daemons = context.args["daemons"]
    rank = trainer.coordinates.rank
    return MegatronSource(
        trainer.model_chunks,
        trainer.optimizer,
        trainer.hf_config | ({"torch_dtype": "float16"} if trainer.job.fp16 else {}),
        run=context.args["run"],
        daemon=daemons[rank % len(daemons)],
        hold_timeout_s=TIMEOUT_S,
        **options,
    )


def dump(trainer: Trainer, context: Context, number: int) -> str | None:
    """Write the dense gather; its file on rank 0. Collective."""
    dense = gather_hf(trainer, dtype=torch.float16 if trainer.job.fp16 else torch.bfloat16)
    if dense is None:
        return None
    file = context.folder / f"dense-{number}.safetensors"
    save_file({name: t.contiguous().clone() for name, t in dense.items()}, file)
    return str(file)


def tell(
    trainer: Trainer, context: Context, step: int, state: str, version: int | None, file: str | None, **more: Any
) -> None:
    """Rank 0 tells the test, and waits until it has compared: until then the receiver must not move on."""
    if trainer.coordinates.rank == 0:
        context.say({"step": step, "state": state, "version": version, "file": file} | more)
        context.hear()


def begun(trainer: Trainer, context: Context, source: MegatronSource) -> None:
    """Wait until this rank's daemon has decided what the registration brought, and tell what there is."""
    file = dump(trainer, context, 0)
    until_s = time.monotonic() + TIMEOUT_S
    while source._daemon.cut(source.run, source.rank).version is None:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    with ControlClient(source._daemon.url, run=source.run) as control:
        tell(trainer, context, 0, "committed", control.versions().head, file)


def ship(trainer: Trainer, context: Context, source: MegatronSource, number: int, **more: Any) -> None:
    """Sync, wait for the end, and let rank 0 tell the test what the weights are and what became of them."""
    dist.barrier()  # every rank's daemon knows what became of the last version
    handle = source.sync(number)
    file = dump(trainer, context, number)
    job = handle.wait(TIMEOUT_S)
    tell(trainer, context, number, job.state.value, job.version, file, detail=job.detail, **more)
    assert job.state in (JobState.COMMITTED, JobState.UNCHANGED), job


def follow(trainer: Trainer, context: Context) -> dict[str, Any]:
    """Argument `steps`: so many training steps, each synced. Returns what this rank declared."""
    with source_of(trainer, context) as source:
        begun(trainer, context, source)
        steps = []
        for number in range(1, context.args["steps"] + 1):
            result = trainer.step()
            trainer.sync_params()
            steps.append(result.ok)
            ship(trainer, context, source, number, ok=result.ok)
        return {"ok": steps, "shared_bytes": source.stats.shared_bytes}


def train_alone(trainer: Trainer, context: Context) -> str | None:
    """The same steps without a source: the file with what they end in."""
    for _ in range(context.args["steps"]):
        trainer.step()
    return dump(trainer, context, context.args["steps"])


def written(trainer: Trainer, context: Context) -> None:
    """Writes outside the formula after each step, as QK clipping does: announced at the first, unannounced at the
    second, together with an offload and reload of the optimizer at the third."""
    with source_of(trainer, context) as source:
        begun(trainer, context, source)
        for number in (1, 2, 3):
            trainer.step()
            with source.mutating() if number != 2 else contextlib.nullcontext():
                for m in masters(trainer.optimizer):
                    m.master.data.mul_(0.9)
                    m.param.data.view(-1)[m.start : m.stop].copy_(m.master.data.reshape(-1))
                if number == 3:
                    trainer.optimizer.offload_to_cpu()
                    trainer.optimizer.restore_from_cpu()
            for chunk in trainer.model_chunks:
                if trainer.job.optimizer == "dist":
                    chunk.start_param_sync(force_sync=True)
            ship(trainer, context, source, number)


def stale(trainer: Trainer, context: Context) -> list[str]:
    """Masters that do not belong to the weights: at the registration, and after a load in the middle, of all ranks or
    of the argument `alone` only, which then tries again alone. What was said."""
    said = []
    trainer.reload(trainer.job.seed + 1, masters=False)
    source = source_of(trainer, context)
    try:
        source.register()
    except InvalidInput as error:
        said.append(f"{error.message} {error.remedy}")
    trainer.optimizer.reload_model_params()
    with source:
        begun(trainer, context, source)
        trainer.step()
        ship(trainer, context, source, 1)
        alone = context.args.get("alone")
        if alone is None or alone == trainer.coordinates.rank:
            for chunk in trainer.model_chunks:
                # Matrices only, of which every rank has its own.
                own = {k: v for k, v in chunk.state_dict().items() if torch.is_tensor(v) and v.dim() == 2}
                chunk.load_state_dict({k: v * 0.5 for k, v in own.items()}, strict=False)
        dist.barrier()
        try:
            source.sync(2)
        except InvalidInput as error:
            said.append(f"{error.message} {error.remedy}")
            with source.mutating():
                trainer.optimizer.reload_model_params()
            again = source.sync(2)
            assert again.version is None
            assert again.wait(TIMEOUT_S).state is JobState.ACCUMULATED
        ship(trainer, context, source, 3)
    return said


def resumed(trainer: Trainer, context: Context) -> None:
    """Take the weights of a dense file, whatever shape wrote it, and follow from there."""
    if context.args.get("weights"):
        fill(trainer, load_file(context.args["weights"]))
    follow(trainer, context)


def fill(trainer: Trainer, dense: dict[str, torch.Tensor]) -> None:
    """Give every rank its part of full tensors, and the optimizer its masters."""
    table = MegatronTable(trainer.hf_config, current_shape())
    chunks = [unwrap(chunk) for chunk in trainer.model_chunks]
    with torch.no_grad():
        for n in parameters(chunks):
            flat = n.tensor.data.view(-1)
            for placement in table.placements(n.name, n.tensor.shape, layer=n.layer):
                for block in placement.layout.blocks:
                    whole = dense[placement.tensor.name].reshape(-1)
                    shape = block.shape
                    taken = whole.as_strided(shape, block.dst_strides, block.dst_offset)
                    flat.as_strided(shape, block.src_strides, flat.storage_offset() + block.src_offset).copy_(taken)
    trainer.optimizer.reload_model_params()
