"""Real Megatron-Core training in every shape that runs on CPUs: each version is the dense gather, bit for bit."""

from __future__ import annotations

import pytest

from tests.megatron.follower import Follower
from tests.support.megatron.job import Job

SHAPES: dict[str, tuple[int, Job]] = {
    "one": (1, Job(family="llama", tied=True)),
    "dp2": (2, Job(family="qwen3")),
    "tp2": (2, Job(family="qwen2", tp=2)),
    "tp2-sp": (2, Job(family="llama", tp=2, sp=True)),
    "pp2-tied": (2, Job(family="llama", pp=2, tied=True)),
    "pp2-vpp2": (2, Job(family="qwen3", pp=2, vpp=2, layers=4)),
    "ep2": (2, Job(family="qwen3_moe", ep=2)),
    "mla": (2, Job(family="deepseek_v3", ep=2)),
    "mixtral": (2, Job(family="mixtral")),
    "float16": (2, Job(family="llama", optimizer="float16")),
    "fp32": (2, Job(family="llama", optimizer="fp32")),
    "mixed": (2, Job(family="qwen3", fp32_params=("q_layernorm", "k_layernorm"))),
    "schedule": (2, Job(family="qwen3", schedule="scheduler", overlap_param_gather=True, bucket_size=4096)),
    "tp2-dp2": (4, Job(family="qwen3", tp=2)),
    "ep2-dp2": (4, Job(family="qwen3_moe", ep=2)),
    "ep2-tp2": (4, Job(family="qwen3_moe", ep=2, tp=2, sp=True)),
    "ep2-tp2-etp1": (4, Job(family="qwen3_moe", ep=2, tp=2, etp=1, sp=True)),
    "tp2-pp2": (4, Job(family="llama", tp=2, pp=2, tied=True)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_version_is_the_dense_gather(follower: Follower, shape: str) -> None:
    world, job = SHAPES[shape]
    follower.train(world, job, 3, nodes=min(2, world))
    assert len(follower.changed()) == 3
    assert all(follower.changed())
    assert not any(follower.dense_tiles())
