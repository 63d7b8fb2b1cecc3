"""Tables from Megatron-Core names to checkpoint names against dense conversion of tagged tensors, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import LayoutError
from engine.models.megatron import (
    MegatronShape,
    MegatronTable,
    restrict,
)
from tests.engine.megatron_world import (
    DENSE,
    HIDDEN,
    LATENT_MODEL,
    MOE,
    check_all,
    config,
    ids,
    prove_cover,
    ranks,
    tables,
)
from tests.support.megatron.reference import Experts, Form, Tagged


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("c", DENSE, ids=ids)
def test_dense_models_on_every_rank(c: dict[str, Any], tp: int, te: bool) -> None:
    check_all(c, ranks(tp), Form(te=te))


@pytest.mark.parametrize("experts", ["sequential", "grouped", "legacy"])
@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 4), (1, 8, 1)])
@pytest.mark.parametrize("c", MOE, ids=lambda c: ids(c) + str(c.get("q_lora_rank", "")))
def test_models_with_experts_on_every_rank(c: dict[str, Any], tp: int, ep: int, etp: int, experts: Experts) -> None:
    check_all(c, ranks(tp, ep, etp), Form(te=experts == "grouped", experts=experts))


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_projection_that_compresses_queries_and_keys(tp: int, te: bool) -> None:
    check_all(LATENT_MODEL, ranks(tp), Form(te=te, fused=True))


@pytest.mark.parametrize("stages", [(2, 2), (1, 2, 1), (4, 0), (0, 3, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("c", [DENSE[0], DENSE[1], MOE[0], MOE[3]], ids=ids)
def test_layers_are_counted_through_all_stages(c: dict[str, Any], stages: tuple[int, ...]) -> None:
    """The number in a name counts from the chunk's first layer; a tied output layer is a replica of the embedding."""
    check_all(c, ranks(2, 2, 1, stages), Form())


@given(
    heads_per_group=st.integers(1, 4), groups=st.sampled_from([1, 2, 4]), head=st.integers(1, 3),
    tp=st.sampled_from([1, 2, 4, 8]), vocabulary=st.integers(1, 70), unit=st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_heads_groups_and_vocabulary(
    heads_per_group: int, groups: int, head: int, tp: int, vocabulary: int, unit: int
) -> None:
    """With more ranks than groups a rank's rows begin and end inside a group, even inside a head."""
    heads = heads_per_group * groups
    c = config(
        "Qwen2", num_attention_heads=heads, num_key_value_heads=groups, head_dim=head, vocab_size=vocabulary,
        num_hidden_layers=1,
    )  # fmt: skip
    if (heads + 2 * groups) * head % tp or heads * head % tp:
        return
    check_all(c, ranks(tp, stages=(1,)), Form(unit=unit))


def test_a_missing_rank_is_a_named_gap_and_a_second_owner_an_overlap() -> None:
    c, tag = DENSE[0], Tagged()
    every = list(tables(c, tag, ranks(4), Form()))
    with pytest.raises(LayoutError, match=r"no owner"):
        prove_cover(c, [x for x in every if "tp=(2, 4)" not in x[0]])
    wrong = MegatronTable(c, MegatronShape(1, 2)).placements("decoder.layers.0.mlp.linear_fc2.weight", (8, 8), layer=0)
    with pytest.raises(LayoutError, match=r"belong to both"):
        prove_cover(c, [*every, ("someone", ("", None), tag.arrays["model.norm.weight"], wrong)])


def test_blocks_and_runs_are_few() -> None:
    groups = 128
    c = config("Llama", num_attention_heads=2 * groups, num_key_value_heads=groups, head_dim=2)
    table = MegatronTable(c, MegatronShape())
    qkv = table.placements("decoder.layers.0.self_attention.linear_qkv.weight", (4 * groups * 2, HIDDEN), layer=3)
    assert [len(p.layout.blocks) for p in qkv] == [1, 1, 1]
    assert len(restrict(qkv, 0, 4 * groups * 2 * HIDDEN)) == 3 * groups
    columns = MegatronTable(c, MegatronShape(1, 2)).placements(
        "decoder.layers.0.mlp.linear_fc2.weight", (HIDDEN, 8), layer=0
    )
    assert [len(p.layout.blocks) for p in columns] == [1]
    (run,) = restrict(columns, 3, 61)  # a slice that starts and ends inside a row is one run of three blocks
    assert (run.start, run.numel, len(run.layout.blocks)) == (3, 58, 3)
