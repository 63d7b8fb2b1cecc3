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


def spread(said: Iterable[Iterable[Sequence[Any]]]) -> Owners:
    """Who publishes what, of all that any rank holds, so that the ranks have about as many elements each to look
    through and to send.

    Each says (key, first rank of the holders it belongs to, elements) for all it holds; equal keys are the same elements
    in the same order. Replicas (data parallel without a sharded optimizer, norms on tensor-parallel ranks, tied
    embeddings on two pipeline stages, HSDP) are holders of the same key. What only one set holds is that set's; of the
    rest the largest come first, each to the holders that have the least so far, the lowest of them where several have.
    """
    firsts: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for one in said:
        for key, first, elements in one:
            firsts.setdefault(str(key), set()).add(int(first))
            sizes[str(key)] = max(sizes.get(str(key), 0), int(elements))
    load: dict[int, int] = {}
    owner: dict[str, int] = {}
    for key in sorted(firsts, key=lambda k: (len(firsts[k]) > 1, -sizes[k], k)):
        chosen = min(firsts[key], key=lambda first: (load.get(first, 0), first))
        owner[key] = chosen
        load[chosen] = load.get(chosen, 0) + sizes[key]
    return Owners(owner, frozenset(k for k, f in firsts.items() if len(f) > 1))
