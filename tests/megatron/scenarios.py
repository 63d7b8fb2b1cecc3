"""What each rank of a real Megatron-Core run does under a `MegatronSource`.

After every step that may become a version rank 0 writes the dense gather of the trainer's weights beside it, which
nothing of dte took part in; the test compares it with what a receiver holds.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

from clients.control import ControlClient
from clients.protocol import JobState
from clients.trainer.megatron import MegatronSource
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
        trainer.hf_config,
        run=context.args["run"],
        daemon=daemons[rank % len(daemons)],
        hold_timeout_s=TIMEOUT_S,
        **options,
    )


def dump(trainer: Trainer, context: Context, number: int) -> str | None:
    """Write the dense gather; its file on rank 0. Collective."""
    dense = gather_hf(trainer)
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


def decided(context: Context, trainer: Trainer, version: int = 0) -> None:
    """Wait until this rank's daemon knows a version, so that the next sync makes the next one."""
    daemons = context.args["daemons"]
    with ControlClient(daemons[trainer.coordinates.rank % len(daemons)], run=context.args["run"]) as control:
        control.wait_for_version(version, TIMEOUT_S)


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
        file = dump(trainer, context, 0)
        decided(context, trainer)
        tell(trainer, context, 0, "committed", 0, file)
        steps = []
        for number in range(1, context.args["steps"] + 1):
            result = trainer.step()
            trainer.sync_params()
            steps.append(result.ok)
            ship(trainer, context, source, number, ok=result.ok)
        return {"ok": steps, "shared_bytes": source.stats.shared_bytes}


def train_alone(trainer: Trainer, context: Context) -> dict[str, Any]:
    """The same steps without a source, for the comparison of what training computes."""
    for _ in range(context.args["steps"]):
        trainer.step()
        trainer.sync_params()
    return {"file": dump(trainer, context, context.args["steps"])}
