"""A small RL loop on Megatron-Core whose rollouts come from an SGLang server that `dte` keeps at the policy's weights.

torchrun --nproc-per-node 2 train.py --checkpoint DIR --rollouts http://rollout-node:30000 --tp 2

The task is two-digit addition, the method REINFORCE with the group's mean as the baseline. What `dte` needs of it is
marked with `dte:`; the rest is any Megatron-Core loop.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoTokenizer

from clients.control import ControlClient
from clients.protocol import JobState
from clients.trainer import MegatronSource

LENGTH = 32
GROUP = 4


def build(config: dict[str, Any], tp: int, lr: float) -> tuple[list[Any], Any, TransformerConfig]:
    """Model chunks, optimizer and configuration of a Qwen3-like model. Weights are random here: a real job loads the
    checkpoint with its own converter before `source.register()`."""
    megatron = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        layernorm_epsilon=config["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config=megatron,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=-(-config["vocab_size"] // (64 * tp)) * 64 * tp,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(config.get("rope_theta", 10000)),
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunks = [DistributedDataParallel(megatron, ddp, Float16Module(megatron, model))]
    options = OptimizerConfig(
        optimizer="adam", lr=lr, weight_decay=0.01, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0,
        use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, chunks)
    megatron.finalize_model_grads_func = finalize_model_grads
    megatron.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer, megatron


def rollouts(url: str, tokenizer: Any, seed: int) -> list[tuple[list[int], int, float, str]]:
    """(tokens, prompt length, reward, version) of a group of samples from the server."""
    dice = random.Random(seed)
    a, b = dice.randint(10, 99), dice.randint(10, 99)
    prompt = tokenizer.encode(f"{a}+{b}=")
    body = {"input_ids": [prompt] * GROUP, "sampling_params": {"max_new_tokens": 6, "temperature": 1.0}}
    answers = httpx.post(f"{url}/generate", json=body, timeout=300.0).raise_for_status().json()
    found = []
    for answer in answers:
        text = tokenizer.decode(answer["output_ids"])
        right = sum(x == y for x, y in zip(text.strip(), str(a + b), strict=False)) / 3
        readable = sum(c.isascii() and c.isprintable() for c in text) / max(1, len(text))
        tokens = (prompt + answer["output_ids"])[:LENGTH]
        found.append((tokens, len(prompt), right + 0.1 * readable, answer["meta_info"]["weight_version"]))
    return found


def batch_of(samples: list[tuple[list[int], int, float, str]]) -> dict[str, torch.Tensor]:
    """Padded tokens and each token's weight in the loss: the sample's advantage over the group's mean."""
    mean = sum(s[2] for s in samples) / len(samples)
    tokens = torch.zeros(len(samples), LENGTH + 1, dtype=torch.int64)
    weight = torch.zeros(len(samples), LENGTH)
    for row, (ids, prompt, reward, _) in enumerate(samples):
        tokens[row, : len(ids)] = torch.tensor(ids)
        weight[row, prompt - 1 : len(ids) - 1] = reward - mean
    return {"tokens": tokens, "weight": weight}


def forward(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    tokens, weight = batch["tokens"], batch["weight"]
    positions = torch.arange(LENGTH).expand(len(tokens), -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool()
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss(per_token: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = (per_token.float() * weight).sum() / weight.abs().sum().clamp(min=1.0)
        return value, {"loss": value.detach()}

    return losses, partial(loss, weight=weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory the rollout engine was started from")
    parser.add_argument("--rollouts", required=True, help="URL of the SGLang server")
    parser.add_argument("--daemon", default="http://127.0.0.1:7411", help="URL of this node's dte daemon")
    parser.add_argument("--rollout-daemon", help="URL of the daemon that drives the server (default: --daemon)")
    parser.add_argument("--run", default="megatron-rl", help="name of the run")
    parser.add_argument("--steps", type=int, default=20, help="policy versions to make")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = json.loads((args.checkpoint / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    chunks, optimizer, _ = build(config, args.tp, args.lr)
    control = ControlClient(args.rollout_daemon or args.daemon, run=args.run)

    # dte: every rank declares what it owns, after the weights are loaded
    source = MegatronSource(chunks, optimizer, config, daemon=args.daemon, run=args.run)
    source.register()

    wanted = 0
    for step in range(1, args.steps + 1):
        # dte: every rollout engine has the newest policy before it generates
        if dist.get_rank() == 0:
            newest = control.wait_for_version(wanted, timeout_s=600.0).version
            control.wait_for_receivers(newest, timeout_s=600.0)
        dist.barrier()
        seed = step * 1000 + parallel_state.get_data_parallel_rank()
        samples = rollouts(args.rollouts, tokenizer, seed)
        batch = batch_of(samples)
        # the ranks of one tensor-parallel group learn from the same samples
        group = parallel_state.get_tensor_model_parallel_group()
        for tensor in batch.values():
            dist.broadcast(tensor, src=parallel_state.get_tensor_model_parallel_src_rank(), group=group)
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([batch]),
            model=chunks[0],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=GROUP,
            forward_only=False,
        )
        optimizer.step()
        # dte: publish; the next step waits only while the state is read
        job = source.sync(step).wait()
        if job.state is JobState.COMMITTED and job.version is not None:
            wanted = job.version  # a step that changed no published bit makes no version
        if dist.get_rank() == 0:
            reward, version = sum(s[2] for s in samples) / len(samples), samples[0][3]
            print(
                f"step {step}: {job.state}, version {job.version}, rollouts of version {version}, reward {reward:.2f}"
            )

    source.close()
    control.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
