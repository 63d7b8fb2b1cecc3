"""The tables hold for the parameters of real Megatron-Core models, on every rank of every kind of parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from engine.layout.blocks import Layout
from engine.layout.cover import prove_exact_cover
from engine.layout.placement import Placement, numel_of
from engine.models.megatron import canonical_tensors
from tests.support.megatron.job import Job
from tests.support.megatron.launch import Rig


@pytest.mark.parametrize(
    ("world", "job"),
    [
        pytest.param(1, Job(family="llama"), id="llama"),
        pytest.param(1, Job(family="mixtral"), id="mixtral"),
        pytest.param(2, Job(family="qwen2", tp=2, sp=True), id="qwen2-tp2-sp"),
        pytest.param(2, Job(family="deepseek_v3", tp=2, sp=True), id="deepseek-tp2-sp"),
        pytest.param(2, Job(family="qwen3", pp=2, tied=True), id="qwen3-pp2-tied"),
        pytest.param(2, Job(family="qwen3", pp=2, vpp=2, layers=4), id="qwen3-pp2-vpp2"),
        pytest.param(2, Job(family="qwen3_moe", ep=2), id="moe-ep2"),
        pytest.param(4, Job(family="qwen3", tp=4), id="qwen3-tp4"),
        pytest.param(4, Job(family="deepseek_v3", tp=2, ep=2, etp=1, sp=True), id="deepseek-tp2-ep2"),
        pytest.param(4, Job(family="qwen3_moe", tp=2, ep=2, etp=2, sp=True), id="moe-tp2-ep2-etp2"),
    ],
)
def test_every_parameter_lies_where_the_table_says(rig: Rig, world: int, job: Job) -> None:
    answers: list[dict[str, Any]] = rig.run(world, job, "tests.support.megatron.layouts:held")
    assert [a["wrong"] for a in answers] == [[]] * world
    owners: dict[str, list[tuple[str, Layout]]] = {}
    seen = set()
    for rank, answer in enumerate(answers):
        for parameter in answer["placements"]:
            placements = [Placement.from_json(p) for p in parameter]
            blocks = [
                (p.tensor.name, b.dst_offset, b.shape, b.dst_strides) for p in placements for b in p.layout.blocks
            ]
            elements = str(sorted(blocks))
            if elements in seen:
                continue  # a replica
            seen.add(elements)
            for p in placements:
                owners.setdefault(p.tensor.name, []).append((f"rank {rank}", p.layout))
    wanted = {t.name: t for t in canonical_tensors(answers[0]["hf_config"])}
    assert owners.keys() == wanted.keys()
    for name, pieces in owners.items():
        prove_exact_cover(numel_of(wanted[name]), pieces, tensor=name)
