"""One rank of a real Megatron-Core training run: model, gradient reduction, optimizer and schedule as users have them.

Everything that changes weights is Megatron-Core's own; this module only wires it and makes the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.support.megatron import aware
from tests.support.megatron.job import Job, hf_config
from tests.support.megatron.model import build, param_dtype, transformer_config

OVERFLOWING_SCALE = 2.0**60
SPIKE = 1e6


@dataclass(frozen=True)
class StepResult:
    """What `optimizer.step()` said. `ok` is False for a skipped step; `loss` is known to the last pipeline stage only;
    `lr` and `weight_decay` are those of each live parameter group as the step used them."""

    step: int
    ok: bool
    grad_norm: float | None
    loss: float | None
    lr: tuple[float, ...]
    weight_decay: tuple[float, ...]


@dataclass(frozen=True)
class Coordinates:
    """This rank's place in each kind of parallelism. `dp` is the dense parameters', `edp` the experts'."""

    rank: int
    world: int
    tp: int
    pp: int
    dp: int
    ep: int
    etp: int
    edp: int


class Trainer:
    """Built by every rank of the default process group, in step; `close` frees the parallel groups for the next job.

    `model_chunks` are the wrapped chunks (DistributedDataParallel), `optimizer` what `get_megatron_optimizer` returned,
    `scheduler` is None unless the job asks for one. `step_number` counts calls of `step`, skipped ones too.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.hf_config = hf_config(job)
        shape: dict[str, Any] = {} if job.etp is None else {"expert_tensor_parallel_size": job.etp}
        ps.initialize_model_parallel(
            tensor_model_parallel_size=job.tp,
            pipeline_model_parallel_size=job.pp,
            virtual_pipeline_model_parallel_size=job.vpp,
            expert_model_parallel_size=job.ep,
            **shape,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(job.seed, force_reset_rng=True)
        torch.manual_seed(job.seed + 1000 * ps.get_pipeline_model_parallel_rank())
        self.coordinates = Coordinates(
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            tp=ps.get_tensor_model_parallel_rank(),
            pp=ps.get_pipeline_model_parallel_rank(),
            dp=ps.get_data_parallel_rank(),
            ep=ps.get_expert_model_parallel_rank(),
            etp=ps.get_expert_tensor_parallel_rank(),
            edp=ps.get_expert_data_parallel_rank(),
        )
        self.config = transformer_config(job, self.hf_config)
        self.model_chunks = self._wrap(build(job, self.hf_config, self.config))
        self.optimizer: Any = aware.make(job, self._optimizer_config(), self.model_chunks)
        self.scheduler = self._schedule() if job.schedule == "scheduler" else None
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if job.overlap_grad_reduce or job.overlap_param_gather:
            no_sync = [chunk.no_sync for chunk in self.model_chunks]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.step_number = 0

    def _wrap(self, chunks: list[torch.nn.Module]) -> list[Any]:
        job = self.job
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=job.overlap_grad_reduce or job.overlap_param_gather,
            overlap_param_gather=job.overlap_param_gather,
            use_distributed_optimizer=job.distributed,
            bucket_size=job.bucket_size,
            check_for_nan_in_grad=False,
        )
        wrapped = [DistributedDataParallel(self.config, config, chunk) for chunk in chunks]
        for chunk in wrapped:
            chunk.broadcast_params()
        return wrapped

    def _optimizer_config(self) -> OptimizerConfig:
        job = self.job
        return OptimizerConfig(
            optimizer="adam",
            lr=job.lr,
            min_lr=job.lr / 10,
            weight_decay=job.weight_decay,
            adam_beta1=job.betas[0],
            adam_beta2=job.betas[1],
            adam_eps=job.eps,
            clip_grad=job.clip_grad,
            bf16=param_dtype(job) is torch.bfloat16,
            fp16=job.fp16,
            params_dtype=param_dtype(job),
            use_distributed_optimizer=job.distributed,
            overlap_param_gather=job.overlap_param_gather,
            initial_loss_scale=job.initial_loss_scale,
            grad_norm_skip_threshold=math.inf if job.grad_norm_skip_threshold is None else job.grad_norm_skip_threshold,
        )

    def _schedule(self) -> OptimizerParamScheduler:
        job = self.job
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=job.lr / 2,
            max_lr=job.lr,
            min_lr=job.lr / 10,
            lr_warmup_steps=2,
            lr_decay_steps=10,
            lr_decay_style="cosine",
            start_wd=job.weight_decay,
            end_wd=2 * job.weight_decay,
            wd_incr_steps=10,
            wd_incr_style="linear",
        )

    @property
    def optimizers(self) -> list[Any]:
        """The chained optimizers; the experts' comes last."""
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """One training step on fresh random tokens: forward, backward, reduction, `optimizer.step()`, skips included.

        Collective over all ranks.
        """
        self.step_number += 1
        loss = self.forward_backward()
        return self.optimizer_step(loss)

    def forward_backward(self) -> float | None:
        """Gradients of the coming step (of the number `step_number`). The mean loss on the last stage, else None."""
        job = self.job
        if job.schedule == "manual":
            for group in self.optimizer.param_groups:
                group["lr"] = job.lr * (1 + self.step_number % 3)
        scales = self._loss_scales()
        if self.step_number in job.overflow_steps:
            if not scales:
                raise ValueError("overflow_steps need fp16, which has a loss scale")
            for scale in scales:
                scale.fill_(OVERFLOWING_SCALE)
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._run(self.tokens(self.step_number), forward_only=False)
        return None if losses is None else float(losses.mean())

    def optimizer_step(self, loss: float | None = None) -> StepResult:
        """`optimizer.step()` and the schedule, for a test that puts its own lines around them."""
        groups = self.optimizer.param_groups
        lr, decay = tuple(float(g["lr"]) for g in groups), tuple(float(g["weight_decay"]) for g in groups)
        ok, grad_norm, _ = self.optimizer.step()
        if self.step_number in self.job.overflow_steps:
            # The scale of the other steps stays what it was, so that only the asked for ones overflow.
            for scale in self._loss_scales():
                scale.fill_(self.job.initial_loss_scale)
        if ok and self.scheduler is not None:
            self.scheduler.step(increment=1)
        return StepResult(self.step_number, bool(ok), None if grad_norm is None else float(grad_norm), loss, lr, decay)

    def _loss_scales(self) -> list[torch.Tensor]:
        scalers = [getattr(optimizer, "grad_scaler", None) for optimizer in self.optimizers]
        return [scaler._scale for scaler in scalers if scaler is not None]

    def tokens(self, step: int) -> list[torch.Tensor]:
        """The step's micro-batches: int64 [micro_batch_size, sequence + 1], the same on all ranks but for `dp`."""
        job = self.job
        seed = (job.data_seed * 1_000_003 + step) * 1_009 + self.coordinates.dp
        generator = torch.Generator().manual_seed(seed)
        size = (job.micro_batch_size, job.sequence + 1)
        return [torch.randint(0, job.vocab, size, generator=generator) for _ in range(job.micro_batches)]

    def token_losses(self, tokens: list[torch.Tensor]) -> torch.Tensor | None:
        """Cross entropy of every token without training, FP32 [micro-batches x batch, sequence]; None but on the last
        stage. Collective; `tokens` as from `tokens()`, a multiple of `pp` of them."""
        return self._run(tokens, forward_only=True)

    def _run(self, tokens: list[torch.Tensor], *, forward_only: bool) -> torch.Tensor | None:
        sequence = tokens[0].shape[1] - 1
        positions = torch.arange(sequence).unsqueeze(0)
        mask = torch.triu(torch.ones(1, 1, sequence, sequence), 1).bool()
        spike = SPIKE if not forward_only and self.step_number in self.job.spike_steps else 1.0

        def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            losses = output.float()
            return losses.mean() * spike, {"losses": losses.detach()}

        def forward(batches: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
            batch = next(batches)
            output = chunk(batch[:, :-1], positions.expand(len(batch), -1), mask, labels=batch[:, 1:])
            return output, partial(loss_of)

        batches = [iter(tokens) for _ in self.model_chunks]
        many = len(self.model_chunks) > 1
        with torch.set_grad_enabled(not forward_only):
            outputs = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=batches if many else batches[0],
                model=self.model_chunks if many else self.model_chunks[0],
                num_microbatches=len(tokens),
                seq_length=sequence,
                micro_batch_size=len(tokens[0]),
                forward_only=forward_only,
            )
        return torch.cat([o["losses"] for o in outputs]) if outputs else None

    def sync_params(self) -> None:
        """Bring the 16-bit weights up to date where gathering them overlaps the next forward pass. Collective."""
        if self.job.overlap_param_gather:
            for chunk in self.model_chunks:
                chunk.start_param_sync(force_sync=True)

    # --- weights and checkpoints -----------------------------------------------------------------------------------

    def reload(self, seed: int, *, masters: bool = True) -> None:
        """Overwrite the weights with those of another seed. Without `masters` the optimizer's FP32 copies stay behind,
        as after a checkpoint load that forgets them."""
        other = replace(self.job, seed=seed)
        config = transformer_config(other, self.hf_config)
        torch.manual_seed(seed + 1000 * self.coordinates.pp)
        with torch.no_grad():
            for chunk, fresh in zip(self.model_chunks, build(other, self.hf_config, config), strict=True):
                for mine, new in zip(chunk.parameters(), fresh.parameters(), strict=True):
                    mine.copy_(new)
        for chunk in self.model_chunks:
            chunk.broadcast_params()
        if masters:
            self.optimizer.reload_model_params()

    def save(self, folder: Path) -> None:
        """This rank's part of a checkpoint: weights, optimizer state, schedule, step. Collective."""
        folder.mkdir(parents=True, exist_ok=True)
        self.sync_params()
        state = {
            "model": [chunk.state_dict() for chunk in self.model_chunks],
            "optimizer": self.optimizer.state_dict(),
            "shards": [{"master": master.detach(), **state} for master, state in self._shards()],
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "step": self.step_number,
        }
        torch.save(state, folder / f"rank-{self.coordinates.rank}.pt")
        dist.barrier()

    def load(self, folder: Path, *, optimizer: bool = True) -> None:
        """Go on from a checkpoint of a job of the same shape. Without `optimizer` only weights and step are taken, and
        the FP32 copies stay behind. Collective."""
        state = torch.load(folder / f"rank-{self.coordinates.rank}.pt", weights_only=False)
        for chunk, saved in zip(self.model_chunks, state["model"], strict=True):
            chunk.load_state_dict(saved)
        self.step_number = state["step"]
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
            if self.job.optimizer == "dist":
                self._load_shards(state["shards"])
            if self.scheduler is not None:
                self.scheduler.num_steps = 0  # it adds the loaded steps to those it has taken
                self.scheduler.load_state_dict(state["scheduler"])
        dist.barrier()

    def _shards(self) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """The masters and the optimizer state of what the inner optimizers own here, live."""
        inner = [o.optimizer for o in self.optimizers if o.optimizer is not None]
        return [(p, o.state[p]) for o in inner for group in o.param_groups for p in group["params"]]

    def _load_shards(self, shards: list[dict[str, torch.Tensor]]) -> None:
        """What a distributed optimizer's `state_dict` leaves out. Megatron-Core's own calls for it cannot load torch's
        AdamW: they know no step for each parameter, and `load_state_dict` gives all parameters one step tensor, which
        each of them then advances. Here each gets its own again."""
        with torch.no_grad():
            for (master, state), saved in zip(self._shards(), shards, strict=True):
                master.copy_(saved["master"])
                state["step"] = saved["step"].clone()
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment].copy_(saved[moment])

    def close(self) -> None:
        """Give up the parallel groups; weights and optimizer stay readable."""
        ps.destroy_model_parallel()
