"""Converter units of one rank: from proven canonical tensors in files, through the engine's loader, to parameters.

One invariant: until `finalize` or `rollback`, what undoes the conversion is held: of every parameter the lanes that
differ, or all of them where that is less, so O(changed), besides a copy of one unit's parameters. The stored bytes'
digests are recorded after the write, and count only while the bytes still have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from clients.rollout.protocol import NamedTensor, UnitBody
from clients.rollout.sglang.call import StageUnit
from clients.rollout.sglang.layouts import Found
from clients.rollout.sglang.staging import map_unit
from clients.rollout.sglang.units import Unit
from clients.rollout.sglang.weights import dtype_name
from engine.apply import LiveChanged, TensorMismatch, WrongBase
from engine.apply.device import view_of
from engine.apply.lanes import Lanes
from engine.apply.live import Locator
from engine.detect.base import U16
from engine.digest import DigestKey
from engine.errors import InvalidInput, ProofError, StateConflict
from engine.layout.algebra import identity
from engine.layout.blocks import Layout
from engine.records.models import ITEMSIZE, TensorDigest

Named = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[Named, Sequence[str]], None]
Parameters = Callable[[], Mapping[str, torch.Tensor]]


class WrongConversion(ProofError):
    """The loader wrote what it was not given, or left something in another place."""

    code = "wrong-conversion"


@dataclass(frozen=True, slots=True)
class _Old:
    """What undoes one parameter: its lanes `at`, or all of them."""

    parameter: str
    at: npt.NDArray[Any] | None
    lanes: U16


@dataclass
class _Goal:
    """`tensors`: by the name the loader knows. `changed`: those that are not the base's. `units`: that hold such."""

    version: int
    tensors: dict[str, TensorDigest]
    changed: frozenset[str]
    units: list[Unit]
    staged: dict[str, torch.Tensor] = field(default_factory=dict)


class Converter:
    """InvalidInput if a unit's parameter is no plain 16- or 32-bit tensor.

    `load`: the engine's loader and post-processing, for the parameters named. `found`: where in a parameter a
    tensor's elements are, as far as it is known. `aliases`: further names a version may use for a tensor.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        found: Found,
        parameters: Parameters,
        load: Load,
        *,
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.units = tuple(units)
        self._found = found
        self._parameters = parameters
        self._load = load
        more = aliases or {}
        self._names = {t.name: (t.name, *more.get(t.name, ())) for unit in units for t in unit.tensors}
        self._known = {alias: name for name, names in self._names.items() for alias in names}
        self._metas = {t.name: t for unit in units for t in unit.tensors}
        now = parameters()
        for name in (n for unit in units for n in unit.parameters):
            _lanes(name, now[name])
        self._version: int | None = None
        self._digests: dict[str, str] = {}
        self._stored: dict[str, int] = {}
        self._goal: _Goal | None = None
        self._undo: list[_Old] = []
        self._undoable = False
        self._written: dict[str, int] = {}
        self.dirty = False
        """True while parameters may be between two versions."""

    @property
    def names(self) -> frozenset[str]:
        """Every name of a converted tensor."""
        return frozenset(self._known)

    def at(self, version: int | None) -> bool:
        """True if the stored bytes were last seen to be `version`, or there are no units."""
        return not self.units or (version is not None and self._version == version and not self.dirty)

    def describe(self) -> list[UnitBody]:
        return [
            UnitBody(
                tensors=[NamedTensor(names=list(self._names[t.name]), shape=t.shape, dtype=t.dtype) for t in u.tensors],
                parameters=list(u.parameters),
            )
            for u in self.units
        ]

    # --- before the write -------------------------------------------------------------------------------------------

    def is_of(self, digests: Mapping[str, str]) -> bool:
        """True if what was converted last came from tensors with these digests: numbers alone are other runs' too."""
        wanted = {self._known[n]: d for n, d in digests.items() if n in self._known}
        return wanted == self._digests

    def forget(self) -> None:
        """What is stored counts as no version's, until it has been converted again."""
        self._version, self._digests = None, {}

    def check(self, version: int | None, digests: Mapping[str, str]) -> None:
        """WrongBase unless the stored bytes are those recorded for `version`, which has these digests: a full pass."""
        if not self.at(version) or not self.is_of(digests):
            raise WrongBase(f"the converted tensors are not those of version {version}.", ())
        wrong = self.written_by_others()
        if wrong is not None:
            raise WrongBase(f"something else wrote to {wrong!r}, which holds converted tensors.", (wrong,))

    def written_by_others(self) -> str | None:
        """A parameter that does not hold the bytes recorded for it; they then count as no version's."""
        found = self._parameters()
        for name, digest in self._stored.items():
            if name not in found or _digest(name, found[name]) != digest:
                self._version = None
                return name
        return None

    def aim(self, version: int, tensors: Sequence[TensorDigest], base: Mapping[str, str] | None) -> None:
        """What is staged and converted next. `base`: digests of the version that is stored; None: everything counts as
        changed. TensorMismatch if the version's tensors are not those of the units."""
        self.drop()
        wanted: dict[str, TensorDigest] = {}
        for t in tensors:
            name = self._known.get(t.name)
            if name is None:
                continue
            meta = self._metas[name]
            if name in wanted or (tuple(t.shape), t.dtype) != (tuple(meta.shape), meta.dtype):
                raise TensorMismatch(
                    f"the engine's loader takes {name!r} once, as {meta.dtype} {list(meta.shape)}; the version has "
                    f"{t.name!r} as {t.dtype} {list(t.shape)}."
                )
            wanted[name] = t
        missing = sorted(self._metas.keys() - wanted.keys())
        if missing:
            raise TensorMismatch(f"the version has no {missing[0]!r}, which the engine's loader needs.")
        changed = frozenset(n for n, t in wanted.items() if base is None or base.get(t.name) != t.digest)
        units = [u for u in self.units if any(t.name in changed for t in u.tensors)]
        self._goal = _Goal(version, wanted, changed, units)

    def stage(self, body: StageUnit) -> None:
        """Map a file and prove what is in it. Nothing else is ever given to the loader."""
        if self._goal is None and self.at(body.version):
            return  # this rank is there already
        goal = self._need(body.version)
        wanted = {t.name: n for n, t in goal.tensors.items()}
        mine = [t for t in body.tensors if t.name in wanted]
        for t in mine:
            if t.digest != goal.tensors[wanted[t.name]].digest:
                raise ProofError(f"{t.name!r} is staged with a digest that is not version {body.version}'s.")
        goal.staged |= {wanted[name]: tensor for name, tensor in map_unit(body.path, mine).items()}

    def drop(self) -> None:
        """Forget what was aimed at."""
        self._goal = None

    # --- the write --------------------------------------------------------------------------------------------------

    def convert(self, version: int, *, undo: bool = True) -> None:
        """Let the loader write every unit with a changed tensor, one at a time.

        Nothing is written if a tensor is not staged (StateConflict). A unit whose loader fails is put back at once; the
        others by `rollback`, unless `undo` is False.
        """
        if self._goal is None and self.at(version):
            return
        goal = self._need(version)
        for unit in goal.units:
            for t in unit.tensors:
                if t.name not in goal.staged:
                    raise StateConflict(f"{t.name!r} of version {version} is not staged.")
        self.dirty, self._undoable, self._written = True, undo, {}
        if not undo:
            self._version = None
        for unit in goal.units:
            self._one(unit, goal)

    def finalize(self, version: int) -> None:
        """What was converted is `version`."""
        if self._goal is None and self.at(version):
            return
        self._digests = {name: t.digest for name, t in self._need(version).tensors.items()}
        self._version = version
        self._stored |= self._written
        self._end()

    def rollback(self) -> None:
        """Put the old bytes back; LiveChanged if they do not read back, StateConflict if there is no undo."""
        if self.dirty and not self._undoable:
            raise StateConflict("the converted tensors cannot be taken back.", remedy="Resync them.")
        found = self._parameters()
        for old in reversed(self._undo):
            lanes = _lanes(old.parameter, found[old.parameter])
            if old.at is None:
                lanes.write_run(0, old.lanes)
            else:
                lanes.scatter(old.at, old.lanes)
            now = lanes.run(0, lanes.lanes) if old.at is None else lanes.gather(old.at)
            if not np.array_equal(now, old.lanes):
                raise LiveChanged(f"{old.parameter!r} does not read back as it was written.")
        self._end()

    def _end(self) -> None:
        self._undo, self._written, self._goal = [], {}, None
        self.dirty = False

    def _need(self, version: int) -> _Goal:
        if self._goal is None or self._goal.version != version:
            raise StateConflict(f"the converted tensors of version {version} are not prepared.")
        return self._goal

    def _one(self, unit: Unit, goal: _Goal) -> None:
        found = self._parameters()
        before = {name: (found[name].data, _copy(name, found[name])) for name in unit.parameters}
        try:
            with torch.no_grad():
                self._load([(t.name, goal.staged[t.name]) for t in unit.tensors], unit.parameters)
            now = self._parameters()
            kept = []
            for name, (data, lanes) in before.items():
                _require_place(name, now[name], data)
                view = _lanes(name, now[name])
                view.settle()
                at = np.flatnonzero(view.run(0, view.lanes) != lanes)
                self._check_places(name, at, goal)
                kept.append(_sparse(name, at, lanes))
        except BaseException:
            undoable, self._undoable = self._undoable, False
            self._put_back(before)
            self._undoable = undoable
            raise
        if self._undoable:
            self._undo += kept
        self._written |= {name: _digest(name, now[name]) for name in unit.parameters}

    def _put_back(self, before: Mapping[str, tuple[torch.Tensor, U16]]) -> None:
        now = self._parameters()
        for name, (data, lanes) in before.items():
            if now[name].data_ptr() != data.data_ptr():
                now[name].data = data
            _lanes(name, data).write_run(0, lanes)

    def _check_places(self, name: str, at: npt.NDArray[Any], goal: _Goal) -> None:
        """WrongConversion if lanes `at`, which differ now, are not all of changed tensors."""
        if any(t.name in goal.changed for t in self._found.mixed.get(name, ())):
            return  # it holds this one tensor, whose places are not known
        elements = at // (ITEMSIZE[dtype_name(self._parameters()[name].dtype)] // 2)
        explained = np.zeros(at.size, np.bool_)
        for placement in self._found.placements.get(name, ()):
            if at.size and placement.tensor.name in goal.changed:
                layout = placement.layout
                swapped = Layout(tuple(b.swapped() for b in layout.blocks), layout.dst_numel, layout.src_numel)
                explained |= Locator(swapped).locate(elements)[0]
        if not explained.all():
            raise WrongConversion(f"the loader changed elements of {name!r} whose tensors had not changed.")


def _lanes(name: str, tensor: torch.Tensor) -> Lanes:
    """The parameter's memory, not a copy; InvalidInput if it is not a plain one."""
    if not tensor.is_contiguous() or tensor.element_size() < 2:
        raise InvalidInput(f"{name!r} ({tensor.dtype}, strides {tensor.stride()}) is not a plain 16- or 32-bit tensor.")
    return view_of(name, tensor.detach().view(-1))


def _copy(name: str, tensor: torch.Tensor) -> U16:
    """All of its lanes, in host memory."""
    lanes = _lanes(name, tensor)
    lanes.settle()
    return lanes.run(0, lanes.lanes).copy()


def _digest(name: str, tensor: torch.Tensor) -> int:
    """Of the stored bytes, under the parameter's name."""
    lanes = _lanes(name, tensor)
    return lanes.digest(DigestKey.for_tensor(name), identity(lanes.lanes))


def _require_place(name: str, now: torch.Tensor, before: torch.Tensor) -> None:
    a, b = ((t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for t in (now, before))
    if a != b:
        raise WrongConversion(f"the loader replaced {name!r} instead of writing to it.")


def _sparse(name: str, at: npt.NDArray[Any], lanes: U16) -> _Old:
    """The smaller of the two ways to undo: 6 bytes a changed lane, or 2 bytes for each lane."""
    if at.size * 3 > lanes.size:
        return _Old(name, None, lanes)
    return _Old(name, at.astype(np.uint32) if lanes.size <= 1 << 32 else at, lanes[at])
