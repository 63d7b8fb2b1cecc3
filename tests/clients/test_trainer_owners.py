"""Who publishes what several ranks hold: one each, the same answer for all, and about the same work for everybody."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from clients.trainer.owners import spread

HELD = st.lists(
    st.tuples(st.sets(st.integers(0, 7), min_size=1, max_size=8), st.integers(1, 10_000)), min_size=1, max_size=60
)


@given(HELD, st.randoms(use_true_random=False))
def test_every_key_has_one_publisher_among_its_holders_and_order_does_not_matter(
    held: list[tuple[set[int], int]], rng: random.Random
) -> None:
    said = [[(f"k{n}", first, size) for n, (firsts, size) in enumerate(held) if first in firsts] for first in range(8)]
    owners = spread(said)
    assert owners.first.keys() == {f"k{n}" for n in range(len(held))}
    for n, (firsts, _) in enumerate(held):
        assert owners.first[f"k{n}"] in firsts
        assert (f"k{n}" in owners.shared) == (len(firsts) > 1)
    for one in said:
        rng.shuffle(one)
    rng.shuffle(said)
    assert spread(said) == owners


@given(st.lists(st.integers(1, 1000), min_size=8, max_size=80), st.integers(2, 6))
def test_replicas_share_the_work(sizes: list[int], ranks: int) -> None:
    owners = spread([[(f"k{n}", rank, size) for n, size in enumerate(sizes)] for rank in range(ranks)])
    load = [sum(s for n, s in enumerate(sizes) if owners.first[f"k{n}"] == rank) for rank in range(ranks)]
    assert max(load) - min(load) <= max(sizes)


def test_what_one_rank_must_publish_anyway_counts() -> None:
    said = [[("own", 0, 100), ("a", 0, 30), ("b", 0, 20)], [("a", 1, 30), ("b", 1, 20)]]
    assert spread(said).first == {"own": 0, "a": 1, "b": 1}


def test_equal_loads_go_to_the_lowest() -> None:
    assert spread([[("a", 0, 5)], [("a", 1, 5)]]).first == {"a": 0}
