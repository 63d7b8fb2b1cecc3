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
    "aware-split": (2, Job(family="qwen3", optimizer="aware-split", fp32_params=("q_layernorm",), lr=1e-5)),
    "aware-whole": (2, Job(family="llama", optimizer="aware-whole", tied=True, lr=1e-5)),
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
    # A router's bias is a side tensor: what changed of it goes as a tile.
    # What 16-bit moments leave open is sent whole where it is more than the proof can sort out.
    assert shape == "mla" or shape.startswith("aware") or not any(follower.dense_tiles())


@pytest.mark.p2p
@pytest.mark.parametrize("shape", ["tp2-pp2", "ep2-dp2"])
def test_every_version_arrives_rank_to_rank(follower: Follower, shape: str) -> None:
    """Four ranks at two nodes, one of which knows the other's coordinator only."""
    world, job = SHAPES[shape]
    follower.transport = "p2p"
    follower.train(world, job, 3, nodes=2)
    (receiver,) = [r for r in follower.control.receivers() if r.run == follower.run]
    assert (receiver.path, receiver.proof, receiver.resyncs) == ("p2p", "proven", 1)
    assert follower.control.versions().degraded.get("p2p-missed", 0) == 0


@pytest.mark.parametrize("shape", ["mixed", "tp2", "float16", "fp32", "aware-split", "aware-whole"])
def test_training_computes_the_same_without_a_source(follower: Follower, shape: str) -> None:
    world, job = SHAPES[shape]
    follower.train(world, job, 3)
    alone = follower.rig.run(world, job, "tests.megatron.scenarios:train_alone", steps=3)[0]
    follower.same(follower.said[-1]["file"], alone)


def test_a_step_that_overflows_changes_nothing(follower: Follower) -> None:
    values = follower.train(2, Job(family="llama", fp16=True, overflow_steps=(2,)), 3)
    assert values[0]["ok"] == [True, False, True]
    assert [s["state"] for s in follower.said] == ["committed", "committed", "unchanged", "committed"]


@pytest.mark.parametrize("optimizer", ["dist", "float16", "fp32"])
def test_what_is_written_outside_the_formula_arrives(follower: Follower, optimizer: str) -> None:
    follower.train(2, Job(family="llama", optimizer=optimizer), 3, scenario="written")
    assert all(follower.dense_tiles())


@pytest.mark.parametrize("alone", [None, 1])
def test_stale_masters_are_refused_with_the_remedy(follower: Follower, alone: int | None) -> None:
    """After it the same step may be synced again, and the next one arrives with what the remedy changed."""
    said = follower.train(2, Job(family="qwen3", tp=2), 2, scenario="stale", alone=alone)
    assert [len(words) for words in said] == ([2, 2] if alone is None else [1, 2])
    assert all("reload_model_params" in word for words in said for word in words), said


def test_a_resume_in_another_parallel_shape_goes_on_with_the_chain(follower: Follower) -> None:
    follower.train(2, Job(family="qwen3_moe", ep=2), 2)
    weights = follower.said[-1]["file"]
    follower.train(4, Job(family="qwen3_moe", tp=2, ep=2, sp=True), 2, scenario="resumed", weights=weights)
    chain = follower.control.versions().versions
    assert [v.rewound for v in chain] == [False] * len(chain)
    assert not any(follower.dense_tiles())
    # Other weights: the chain goes on too, but says so.
    follower.train(1, Job(family="qwen3_moe", seed=9), 1)
    assert [v.rewound for v in follower.control.versions().versions][-2:] == [True, False]
