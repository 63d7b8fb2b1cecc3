"""Who publishes what several ranks hold.

One invariant: of all ranks that hold the same canonical elements, exactly one set of holders publishes them; every rank
comes to the same answer from what all ranks said, whatever the kind of trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Owners:
    """`first`: key → the first rank of the holders that publish it. `shared`: keys that others hold too."""

    first: Mapping[str, int]
    shared: frozenset[str]


def lowest(said: Iterable[Iterable[Sequence[Any]]]) -> Owners:
    """Who publishes what, of all that any rank holds: the lowest first rank of each key over what all ranks said.

    Each says (key, first rank of the holders it belongs to) for all it holds; equal keys are the same elements in the
    same order. Replicas (data parallel without a sharded optimizer, norms on tensor-parallel ranks, tied embeddings on
    two pipeline stages, HSDP) are holders of the same key.
    """
    firsts: dict[str, set[int]] = {}
    for one in said:
        for key, first in one:
            firsts.setdefault(str(key), set()).add(int(first))
    return Owners({k: min(f) for k, f in firsts.items()}, frozenset(k for k, f in firsts.items() if len(f) > 1))
