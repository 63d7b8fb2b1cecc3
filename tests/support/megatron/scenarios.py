"""Scenarios of the rig's own tests; others name theirs as `module:function` in a task."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.support.megatron.gather import gather_hf, gather_megatron
from tests.support.megatron.train import Trainer
from tests.support.megatron.worker import Context


def train(trainer: Trainer, context: Context) -> dict[str, Any]:
    """A number of steps (argument `steps`, 3): what each said, and where this rank is."""
    steps = [asdict(trainer.step()) for _ in range(context.args.get("steps", 3))]
    return {"steps": steps, "coordinates": asdict(trainer.coordinates)}


def losses(trainer: Trainer, context: Context) -> dict[str, Any]:
    """Two steps, then the full weights, and what the job computes from them for one more batch.

    Leaves `model.safetensors` (as the job holds them: FP32 where it trains so), `batch.safetensors` with `tokens` and
    `padding`, the rows that pad the output layer, and from the last stage `losses.safetensors` with `losses`, one per
    token, and `logits` where one rank has all.
    """
    ok = [trainer.step().ok for _ in range(2)]
    weights = gather_hf(trainer, dtype=None)
    tokens = [
        torch.randint(0, trainer.job.vocab, (2, 17), generator=torch.Generator().manual_seed(n)) for n in range(4)
    ]
    padded = gather_megatron(trainer, padding=True)
    if weights is not None and padded is not None:
        save_file(weights, context.folder / "model.safetensors", metadata={"format": "pt"})
        output = padded["embedding.word_embeddings.weight" if trainer.job.tied else "output_layer.weight"]
        inputs = {"tokens": torch.cat(tokens), "padding": output[trainer.job.vocab :].clone()}
        save_file(inputs, context.folder / "batch.safetensors")
    found = trainer.token_losses(tokens)
    at = trainer.coordinates
    if found is not None and (at.tp, at.dp) == (0, 0):
        result = {"losses": found}
        if at.world == 1:
            batch = torch.cat(tokens)[:, :-1]
            positions = torch.arange(batch.shape[1]).expand(len(batch), -1)
            mask = torch.triu(torch.ones(1, 1, batch.shape[1], batch.shape[1]), 1).bool()
            with torch.no_grad():
                result["logits"] = trainer.model_chunks[0](batch, positions, mask)[
                    ..., : trainer.job.vocab
                ].contiguous()
        save_file(result, context.folder / "losses.safetensors")
    return {"ok": ok, "hf_config": trainer.hf_config, "folder": str(context.folder)}


def changes(trainer: Trainer, context: Context) -> dict[str, Any]:
    """Three steps; on rank 0 how many BF16 elements each changed, and the digest of the last weights."""
    before = gather_hf(trainer)
    steps, changed = [], []
    for _ in range(3):
        steps.append(asdict(trainer.step()))
        after = gather_hf(trainer)
        if before is not None and after is not None:
            changed.append(sum(int((after[name] != before[name]).sum()) for name in after))
        before = after
    return {"rank": trainer.coordinates.rank, "steps": steps, "changed": changed, "digest": digest(before)}


def digest(weights: dict[str, torch.Tensor] | None) -> str | None:
    """SHA-256 over names and bits."""
    if weights is None:
        return None
    sha = hashlib.sha256()
    for name in sorted(weights):
        sha.update(name.encode())
        sha.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def checkpoint(trainer: Trainer, context: Context) -> list[str | None]:
    """Digests after: two steps past a checkpoint; the same two once more from it; and two after a load that leaves the
    optimizer's FP32 copies behind, of a job that went on with other weights."""
    trainer.step()
    trainer.save(context.folder / "checkpoint")
    digests = []
    for optimizer in (None, True, False):
        if optimizer is not None:
            trainer.reload(seed=9)
            trainer.step()
            trainer.load(context.folder / "checkpoint", optimizer=optimizer)
        for _ in range(2):
            trainer.step()
        digests.append(digest(gather_hf(trainer)))
    return digests


def fail(trainer: Trainer, context: Context) -> int:
    """Rank 1 fails while the others wait for it."""
    print("a word in the log", file=sys.stderr)
    if trainer.coordinates.rank == 1:
        return 1 // 0
    dist.barrier()
    return 0


def talk(trainer: Trainer, context: Context) -> Any:
    """Say hello and return what is said back."""
    context.say("hello")
    return context.hear()
