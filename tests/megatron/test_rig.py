"""The rig trains for real, and its dense reference is what the job computes with."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.megatron.job import Job
from tests.support.megatron.launch import Rig, RigError, Session, Task

pytestmark = [pytest.mark.megatron, pytest.mark.slow]
SCENARIOS = "tests.support.megatron.scenarios"


def hf_model(answer: dict[str, Any]) -> Any:
    """The transformers model of a gathered checkpoint, in FP32. Every name must be taken and none be missing."""
    folder = Path(answer["folder"])
    (folder / "config.json").write_text(json.dumps(answer["hf_config"]))
    model, said = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(said.get(k) for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), said
    return model.eval()


def assert_same_function(answer: dict[str, Any]) -> None:
    """transformers computes from the gathered weights what the job computed from its own, to FP32 rounding."""
    folder = Path(answer["folder"])
    batch = load_file(folder / "batch.safetensors")
    tokens, padding = batch["tokens"], batch["padding"]
    assert len(padding) > 0
    found = load_file(folder / "losses.safetensors")
    model = hf_model(answer)
    with torch.no_grad():
        hidden = model.model(tokens[:, :-1]).last_hidden_state
        logits = model.lm_head(hidden)
        # Megatron's cross entropy counts the rows that pad the vocabulary.
        losses = torch.nn.functional.cross_entropy(
            torch.cat([logits, hidden @ padding.T], dim=-1).transpose(1, 2), tokens[:, 1:], reduction="none"
        )
    # A wrong order of anything moves some loss by more than a hundredth.
    torch.testing.assert_close(found["losses"], losses, atol=2e-4, rtol=0)
    if "logits" in found:
        torch.testing.assert_close(found["logits"], logits, atol=2e-4, rtol=1e-4)


FP32 = Job(optimizer="fp32", lr=1e-2)
MOE = replace(FP32, family="qwen3_moe")
MLA = replace(FP32, family="deepseek_v3")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_one_rank_computes_what_transformers_does(rig: Rig, family: Any) -> None:
    assert_same_function(rig.run(1, replace(FP32, family=family), f"{SCENARIOS}:losses")[0])


@pytest.mark.parametrize(
    ("world", "job"),
    [
        pytest.param(2, replace(FP32, family="qwen2", tp=2, sp=True), id="qwen2-tp2-sp"),
        pytest.param(2, replace(FP32, pp=2, tied=True), id="pp2-tied"),
        pytest.param(4, replace(FP32, tp=2, pp=2, vpp=2, layers=4, tied=True), id="tp2-pp2-vpp2-tied"),
        pytest.param(4, replace(MOE, ep=2, tp=2, sp=True, etp=1), id="ep2-tp2-etp1"),
        pytest.param(4, replace(MOE, ep=2, tp=2, sp=True, etp=2), id="ep2-tp2-etp2"),
        pytest.param(4, replace(MLA, ep=2, pp=2, layers=4), id="deepseek-ep2-pp2"),
    ],
)
def test_the_gathered_weights_are_what_the_ranks_compute_with(rig: Rig, world: int, job: Job) -> None:
    assert_same_function(rig.run(world, job, f"{SCENARIOS}:losses")[0])


DENSE = Job()
SPARSE = Job(family="qwen3_moe")


@pytest.mark.parametrize(
    ("world", "job", "skipped"),
    [
        pytest.param(2, replace(DENSE, overlap_param_gather=True, bucket_size=4096), (), id="dp2-overlap"),
        pytest.param(2, replace(DENSE, fp16=True, overflow_steps=(2,)), (2,), id="dp2-fp16-overflow"),
        pytest.param(2, replace(DENSE, grad_norm_skip_threshold=100.0, spike_steps=(2,)), (2,), id="dp2-skip"),
        pytest.param(2, replace(SPARSE, fp32_params=("router",), ep=2), (), id="ep2-router-fp32"),
        pytest.param(2, replace(DENSE, schedule="manual"), (), id="dp2-manual"),
        pytest.param(4, replace(SPARSE, family="deepseek_v3", ep=2, tp=2, sp=True, etp=1), (), id="deepseek-ep2-tp2"),
    ],
)
def test_other_ways_of_training(rig: Rig, world: int, job: Job, skipped: tuple[int, ...]) -> None:
    """What the tests that follow a run do not train anyway. Steps change the gathered weights, skipped ones do not, and
    replicas hold equal bits after each."""
    for answer in rig.run(world, job, f"{SCENARIOS}:changes"):
        assert [s["step"] for s in answer["steps"] if not s["ok"]] == list(skipped)
        if job.schedule != "constant":
            assert len({tuple(s["lr"]) for s in answer["steps"]}) > 1
        if answer["rank"] == 0:
            assert [n > 0 for n in answer["changed"]] == [s["ok"] for s in answer["steps"]]


@pytest.mark.parametrize(
    ("world", "job"),
    [
        pytest.param(2, replace(DENSE, schedule="scheduler"), id="dp2"),
        pytest.param(2, replace(SPARSE, optimizer="float16", ep=2), id="ep2-float16"),
        pytest.param(4, replace(SPARSE, ep=2), id="ep2-dp2"),
    ],
)
def test_a_job_goes_on_from_its_checkpoint_as_if_never_stopped(rig: Rig, world: int, job: Job) -> None:
    straight, resumed, stale = rig.run(world, job, f"{SCENARIOS}:checkpoint")[0]
    assert resumed == straight
    assert stale != straight


def test_another_seed_gives_other_weights_and_data(rig: Rig) -> None:
    one, same, other, fresh = (
        rig.run(2, job, f"{SCENARIOS}:changes")[0]["digest"]
        for job in (DENSE, DENSE, replace(DENSE, seed=2), replace(DENSE, data_seed=2))
    )
    assert one == same
    assert len({one, other, fresh}) == 3


def test_a_rank_that_fails_ends_the_session_and_shows_its_log(rig: Rig) -> None:
    session = rig.session(2)
    with pytest.raises(RigError, match=r"rank 1 failed: ZeroDivisionError(.|\n)*a word in the log"):
        session.run(DENSE, f"{SCENARIOS}:fail")
    assert_ended(session)
    assert rig.session(2) is not session


def test_a_task_that_takes_too_long_ends_the_session(rig: Rig) -> None:
    session = rig.session(2)
    with pytest.raises(RigError, match="the task took more than 3 s"):
        session.run(DENSE, f"{SCENARIOS}:talk", timeout_s=3)
    assert_ended(session)


def test_a_test_can_talk_with_a_task_and_kill_a_rank(rig: Rig) -> None:
    session = rig.session(2)
    session.start(Task(DENSE, f"{SCENARIOS}:talk"))
    assert [session.hear(rank) for rank in (1, 0)] == ["hello", "hello"]
    session.kill(0)
    session.say("go on")
    assert [result.value for result in session.wait()] == ["go on"]
    session.close()
    assert_ended(session)


def assert_ended(session: Session) -> None:
    assert not session.alive
    assert len(session.pids) == session.world
    for pid in session.pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
