"""Converter units: the smallest groups of canonical tensors and parameters that the engine's loader must see together.

One invariant: a parameter that does not hold its tensors' bits is in exactly one unit, with everything that shares a
parameter, a tensor or a post-processing step with it; so converting a unit writes no other parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clients.rollout.sglang.layouts import Found
from engine.errors import InvalidInput
from engine.records.models import TensorMeta


@dataclass(frozen=True, slots=True)
class Unit:
    """`tensors` go to the loader in one call, which then writes `parameters` and nothing else."""

    tensors: tuple[TensorMeta, ...]
    parameters: tuple[str, ...]


def units_of(found: Found, dtypes: Mapping[str, str], together: Iterable[Sequence[str]] = ()) -> list[Unit]:
    """The units of one rank; none where every parameter holds its tensors' bits.

    `dtypes`: of all parameters. `together`: parameters that the engine post-processes in one step. InvalidInput if
    several tensors share a parameter and the places of some of them are not known: what a conversion does to the others
    could not be checked then.
    """
    tensors = {name: _tensors(found, name) for name in dtypes}
    joined = _Joined(dtypes)
    first: dict[str, str] = {}
    for name, held in tensors.items():
        for meta in held:
            joined.join(name, first.setdefault(meta.name, name))
    for names in together:
        for name in names[1:]:
            joined.join(names[0], name)
    groups: dict[str, list[str]] = {}
    for name in dtypes:
        groups.setdefault(joined.root(name), []).append(name)
    units = []
    for names in groups.values():
        if not any(_converted(found, name, dtypes[name]) for name in names):
            continue
        for name in names:
            if found.mixed.get(name) and len(tensors[name]) > 1:
                raise InvalidInput(
                    f"{name!r} holds {', '.join(t.name for t in tensors[name][:3])} in a form in which they cannot be "
                    "told apart; such a parameter is not served."
                )
        metas = {t.name: t for name in names for t in tensors[name]}
        units.append(Unit(tuple(metas.values()), tuple(names)))
    return units


def _tensors(found: Found, name: str) -> list[TensorMeta]:
    placed = {p.tensor.name: p.tensor for p in found.placements.get(name, ())}
    return list((placed | {t.name: t for t in found.mixed.get(name, ())}).values())


def _converted(found: Found, name: str, dtype: str) -> bool:
    return bool(found.mixed.get(name)) or any(p.tensor.dtype != dtype for p in found.placements.get(name, ()))


class _Joined:
    """Sets of names that were joined."""

    def __init__(self, names: Iterable[str]) -> None:
        self._parent = {name: name for name in names}

    def root(self, name: str) -> str:
        while self._parent[name] != name:
            self._parent[name] = name = self._parent[self._parent[name]]
        return name

    def join(self, a: str, b: str) -> None:
        self._parent[self.root(b)] = self.root(a)
