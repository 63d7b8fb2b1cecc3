"""Ranks of a Megatron-Core job that hold the same weights: they agree, and the one that does not is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.follower import TIMEOUT_S, Follower
from tests.support.megatron.job import Job
from tests.support.megatron.launch import Task

SHAPES: dict[str, tuple[int, Job]] = {
    "norms-of-tp2": (2, Job(family="llama", tp=2, optimizer="float16")),
    "dp2": (2, Job(family="qwen3", optimizer="float16")),
    "tied-pp2": (2, Job(family="llama", pp=2, tied=True)),
}


def astray(follower: Follower, shape: str, *, digests: bool) -> tuple[list[Any], list[int]]:
    """What the ranks declared as replicas, and how many of them each version says diverged."""
    world, job = SHAPES[shape]
    session = follower.rig.session(world)
    args = {"daemons": follower.daemons[:world], "run": follower.run, "digests": digests}
    session.start(Task(job, "tests.megatron.replicas:astray", args), timeout_s=TIMEOUT_S)
    declared = [r.value for r in session.wait()]
    return declared, [v.detail.get("diverged_replicas", 0) for v in follower.control.versions().versions]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_that_goes_astray_is_seen_in_that_version(follower: Follower, shape: str) -> None:
    declared, diverged = astray(follower, shape, digests=True)
    names = [{name for name, _ in said} for said in declared]
    assert [{holders for _, holders in said} <= {rank} for rank, said in enumerate(declared)] == [True, True]
    assert not names[0] & names[1]
    if shape == "tied-pp2":
        assert names[0] | names[1] == {"model.embed_tokens.weight"}
    else:
        assert "model.norm.weight" in names[0] | names[1]
        assert all(names), "one rank publishes all that both hold"
    assert diverged == [0, 0, 1, 0]


def test_replicas_are_compared_only_if_that_is_wanted(follower: Follower) -> None:
    declared, diverged = astray(follower, "dp2", digests=False)
    assert declared == [[], []]
    assert diverged == [0, 0, 0, 0]
