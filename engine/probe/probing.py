"""Finds where an engine's own loading puts every element of every canonical tensor.

One invariant: a placement is reported only for elements whose place was read from position tags *and* whose bits
arrived unchanged in a second pass with random bits. Everything else is said: no tensor with a doubtful element counts
as identity bits.

The loader is called with tensors whose values spell their position (`engine.probe.tags`), several times. It overwrites
the parameters, so probe before serving, on a copy, or inside `kept`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.detect.base import Bool
from engine.errors import InvalidInput, LayoutError
from engine.layout.placement import Placement, numel_of
from engine.probe.fit import MAX_FITTED_BLOCKS, fit_layouts
from engine.probe.sources import Suspects
from engine.probe.tags import (
    BASE,
    I64,
    U8,
    Numbering,
    Words,
    can_tag,
    cast_words,
    dtype_name,
    pattern_words,
    read_digits,
    read_words,
)
from engine.records.models import TensorMeta

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Parameters = Callable[[], Mapping[str, torch.Tensor]]

_PROOF_SEED = 1


@dataclass(frozen=True)
class Probed:
    """What a probe found.

    `placements`: local parameter → what it holds, in memory order. `aliases`: parameter → another one on the same
    memory, which alone is listed. `not_identity`: canonical tensor → why its bits are not (all) stored as they are.
    `absent`: canonical tensors of which this rank holds nothing. `unwritten`: parameter → its elements that loading
    leaves alone, or whose value is no tensor's element (padding, derived or transformed weights). Where the tensors
    that are not identity bits are: `retyped`, parameter → what it holds as PyTorch casts it to the parameter's dtype;
    `mixed`, parameter → the tensors that its other elements are computed from, or whose place could not be fitted.
    """

    placements: dict[str, list[Placement]]
    aliases: dict[str, str] = field(default_factory=dict)
    not_identity: dict[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    unwritten: dict[str, int] = field(default_factory=dict)
    retyped: dict[str, list[Placement]] = field(default_factory=dict)
    mixed: dict[str, list[str]] = field(default_factory=dict)


def memory_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in memory order, flat, no copy. InvalidInput if they have gaps or repeat."""
    if tensor.layout != torch.strided:
        raise InvalidInput(f"{name!r} is not a strided tensor.")
    n = tensor.numel()
    strides = sorted((st, s) for s, st in zip(tensor.shape, tensor.stride(), strict=True) if s > 1)
    span = 1
    for stride, size in strides:
        if stride != span:
            raise InvalidInput(f"{name!r} does not own a gapless piece of memory (strides {tensor.stride()}).")
        span *= size
    return tensor.detach().as_strided((n,), (1,))


@contextmanager
def kept(parameters: Parameters) -> Iterator[None]:
    """Put the parameters' values back afterwards, in place.

    Meanwhile a copy of them all is in host memory: a device that serves has no room for it.
    """
    before = {name: tensor.detach().to("cpu", copy=True) for name, tensor in parameters().items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in parameters().items():
                if name in before:
                    tensor.detach().copy_(before[name])


def probe(
    tensors: Sequence[TensorMeta],
    load: Load,
    parameters: Parameters,
    *,
    max_bytes: int = 4 << 30,
    max_blocks: int = MAX_FITTED_BLOCKS,
) -> Probed:
    """Fit layouts from position-tagged loading.

    `tensors`: all canonical tensors, in the dtype they are published in. `load`: the engine's loading, with whatever
    it does afterwards; called several times, each time with all tensors, made one by one as it draws them.
    `parameters`: the live tensors by name, asked again after every load. `max_bytes` bounds the digits held at a time;
    more parameters mean more passes. The parameters' values are lost.
    """
    return _Probe(tensors, load, parameters, max_bytes, max_blocks).run()


class _Probe:
    def __init__(
        self, tensors: Sequence[TensorMeta], load: Load, parameters: Parameters, max_bytes: int, max_blocks: int
    ) -> None:
        self._numbering = Numbering([t for t in tensors if can_tag(t)])
        self._load = load
        self._parameters = parameters
        self._max_bytes = max_bytes
        self._max_blocks = max_blocks
        self._why = {t.name: f"{t.dtype} cannot carry position tags" for t in tensors if not can_tag(t)}
        self._placements: dict[str, list[Placement]] = {}
        self._odd: dict[str, I64] = {}  # elements that hold something which is no proven copy
        self._unwritten: dict[str, int] = {}
        self._retyped: dict[str, list[Placement]] = {}
        self._mixed: dict[str, dict[str, None]] = {}

    def run(self) -> Probed:
        aliases = self._aliases()
        names = [n for n in self._memory() if n not in aliases]
        for group in self._groups(names):
            self._probe_group(group)
        self._blame()
        placed = {p.tensor.name for found in self._placements.values() for p in found}
        every = {t.name for t in self._numbering.tensors}
        return Probed(
            {n: self._placements.get(n, []) for n in names},
            aliases,
            self._why,
            frozenset(every - placed - self._why.keys()),
            self._unwritten,
            self._retyped,
            {n: list(found) for n, found in self._mixed.items()},
        )

    def _memory(self) -> dict[str, torch.Tensor]:
        return {n: memory_of(n, t) for n, t in self._parameters().items()}

    def _aliases(self) -> dict[str, str]:
        first: dict[tuple[object, ...], str] = {}
        out = {}
        for name, memory in self._memory().items():
            place = (memory.device, memory.data_ptr(), memory.numel(), memory.dtype)
            other = first.setdefault(place if memory.numel() else (name,), name)
            if other != name:
                out[name] = other
        return out

    def _groups(self, names: list[str]) -> Iterator[list[str]]:
        """Parameters in order, as many at a time as their digits may take."""
        memory = self._memory()
        group: list[str] = []
        size = 0
        for name in names:
            need = memory[name].numel() * (self._numbering.digits + 1)
            if group and size + need > self._max_bytes:
                yield group
                group, size = [], 0
            group.append(name)
            size += need
        if group:
            yield group

    def _pass(self, make: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
        """One load with tensors from `make`, onto zeroed parameters; the memory it leaves."""
        with torch.no_grad():
            for memory in self._memory().values():
                memory.zero_()
            self._load((t.name, make(k)) for k, t in enumerate(self._numbering.tensors))
        return self._memory()

    def _probe_group(self, group: list[str]) -> None:
        numbering = self._numbering
        digits: dict[str, list[U8]] = {n: [] for n in group}
        for d in range(numbering.digits):
            memory = self._pass(lambda k, d=d: numbering.tag(k, d))  # type: ignore[misc]
            for name in group:
                digits[name].append(read_digits(memory[name]))
        memory = self._pass(lambda k: numbering.pattern(k, _PROOF_SEED))
        for name in group:
            self._one(name, digits.pop(name), memory[name])

    def _one(self, name: str, digits: list[U8], proof: torch.Tensor) -> None:
        """Decode, prove and fit one parameter."""
        if any(d.size != proof.numel() for d in digits):
            raise InvalidInput(f"loading changes the size of {name!r} from one pass to the next.")
        number = np.zeros(proof.numel(), np.int64)
        read = np.ones(proof.numel(), np.bool_)
        for d, digit in enumerate(digits):
            read &= digit > 0
            number += (digit.astype(np.int64) - 1) * BASE**d
        read &= (number >= 0) & (number < self._numbering.total)
        words = read_words(proof)
        odd = ~read & ((words != 0) | np.any([d > 0 for d in digits], axis=0))
        local = np.flatnonzero(read)
        owner = np.searchsorted(self._numbering.starts, number[local], side="right") - 1
        placements: list[Placement] = []
        retyped: list[Placement] = []
        for k in np.unique(owner).tolist():
            meta = self._numbering.tensors[k]
            mine = local[owner == k]
            same = self._same_bits(meta, number[mine], words[mine], proof.dtype)
            odd[mine[~same]] = True
            mine = mine[same]
            if not mine.size:
                continue
            fitted = self._fit(meta, mine, number[mine] - self._numbering.starts[k], proof.numel(), name)
            if dtype_name(proof.dtype) == meta.dtype:
                placements += fitted
            else:
                retyped += fitted
                self._why.setdefault(meta.name, f"{name!r} holds it as {dtype_name(proof.dtype)}")
        self._placements[name] = placements
        if retyped:
            self._retyped[name] = retyped
        self._odd[name] = np.flatnonzero(odd)
        written = sum(b.numel for p in (*placements, *retyped) for b in p.layout.blocks)
        if written < proof.numel():
            self._unwritten[name] = proof.numel() - written

    @staticmethod
    def _same_bits(meta: TensorMeta, number: I64, words: Words, dtype: torch.dtype) -> Bool:
        """Which elements hold the pattern's bits, as PyTorch casts them where the dtypes differ."""
        want = pattern_words(number, meta.dtype, _PROOF_SEED)
        if dtype_name(dtype) != meta.dtype:
            want = cast_words(want, meta.dtype, dtype)
        same: Bool = words == want
        return same

    def _fit(self, meta: TensorMeta, local: I64, canonical: I64, numel: int, name: str) -> list[Placement]:
        try:
            layouts = fit_layouts(local, canonical, numel, numel_of(meta), max_blocks=self._max_blocks)
        except LayoutError as error:
            self._why[meta.name] = f"in {name!r}: {error.message}"
            self._mixed.setdefault(name, {})[meta.name] = None
            return []
        return [Placement(meta, layout) for layout in layouts]

    def _blame(self) -> None:
        """Find out which tensors the unexplained elements come from, by altering tensors in coded groups."""
        odd = {n: at for n, at in self._odd.items() if at.size}
        if not odd:
            return
        suspects = Suspects(len(self._numbering.tensors))
        reference = self._values(odd, suspects.reference())
        changes = [
            {n: self._differs(reference[n], now[n]) for n in odd}
            for now in (self._values(odd, altered) for altered in suspects.trials())
        ]
        types = {n: dtype_name(m.dtype) for n, m in self._memory().items()}
        for name in odd:
            for k in suspects.guilty([c[name] for c in changes]):
                meta = self._numbering.tensors[k]
                why = f"{name!r} holds it as {types[name]}" if types[name] != meta.dtype else f"{name!r} transforms it"
                self._why.setdefault(meta.name, why)
                self._mixed.setdefault(name, {})[meta.name] = None

    def _values(self, odd: Mapping[str, I64], altered: frozenset[int]) -> dict[str, Words]:
        memory = self._pass(lambda k: self._numbering.pattern(k, 3 if k in altered else 2))
        return {n: read_words(memory[n])[at] for n, at in odd.items()}

    @staticmethod
    def _differs(a: Words, b: Words) -> Bool:
        return np.ones(b.size, np.bool_) if a.size != b.size else a != b
