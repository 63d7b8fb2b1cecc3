"""Who publishes a parameter that several ranks hold.

One invariant: of all ranks that hold the same canonical elements, exactly one set of holders publishes them; every rank
comes to the same answer from what all ranks said.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.layout.placement import Placement


def content_key(placements: Sequence[Placement]) -> str:
    """The same for two local parameters exactly if they hold the same canonical elements in the same order."""
    text = json.dumps([p.to_json() for p in placements], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Owners:
    """`first`: content key → the first rank of the holders that publish it. `shared`: keys that others hold too."""

    first: Mapping[str, int]
    shared: frozenset[str]


def lowest(said: Iterable[Iterable[Sequence[Any]]]) -> Owners:
    """Who publishes what, of all that any rank holds: the lowest first rank of each key over what all ranks said.

    Each says (content key, first rank of the holders it belongs to) for all it holds. Replicas (data parallel without a
    distributed optimizer, norms on tensor-parallel ranks, tied embeddings on two pipeline stages) are holders of the
    same key.
    """
    firsts: dict[str, set[int]] = {}
    for one in said:
        for key, first in one:
            firsts.setdefault(str(key), set()).add(int(first))
    return Owners({k: min(f) for k, f in firsts.items()}, frozenset(k for k, f in firsts.items() if len(f) > 1))
