"""The receiver's weights as the engine sees them: canonical tensors with one or more live copies.

One invariant: every copy of a tensor on one rank holds the same canonical lanes, so one digest speaks for all of them
only after each of them has been read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from engine.apply.errors import TensorMismatch
from engine.apply.lanes import Lanes
from engine.detect.base import I64, Bool
from engine.digest import DigestKey
from engine.errors import LayoutError, ProofError
from engine.layout.blocks import Block, Layout, contiguous_shift
from engine.layout.mapping import map_partial
from engine.records.models import ITEMSIZE, TensorMeta


def lane_count(shape: Sequence[int], dtype: str) -> int:
    """Canonical lanes of a tensor: its bytes in 16-bit words, the last one padded."""
    return -(-prod(shape) * ITEMSIZE[dtype] // 2)


def _nested(block: Block) -> tuple[tuple[int, int, int], ...]:
    """(size, destination stride, source stride), outermost first; destinations must not overlap."""
    dims = sorted(
        ((n, d, s) for n, s, d in zip(block.shape, block.src_strides, block.dst_strides, strict=True) if n > 1),
        key=lambda dim: -dim[1],
    )
    span = 0
    for n, d, _ in reversed(dims):
        if d <= span:
            raise LayoutError(f"block maps two elements to one place, or is not a nested rectangle: {block}")
        span += (n - 1) * d
    return tuple(dims)


class Locator:
    """Finds canonical lanes in one copy's local memory."""

    def __init__(self, layout: Layout) -> None:
        self.shift = contiguous_shift(layout)
        self._numel = layout.src_numel
        self._blocks = tuple((b, _nested(b)) for b in layout.blocks)

    def locate(self, canonical: I64) -> tuple[Bool, I64]:
        """(which of `canonical` are here, local lane of each of those, in the same order)."""
        if self.shift is not None:
            local = canonical - self.shift
            hit: Bool = (local >= 0) & (local < self._numel)
            return hit, local if bool(hit.all()) else local[hit]
        place = np.full(canonical.size, -1, np.int64)
        for block, dims in self._blocks:
            rest = canonical - block.dst_offset
            local = np.full(canonical.size, block.src_offset, np.int64)
            inside = rest >= 0
            for n, d, s in dims:
                k = rest // d
                inside &= k < n
                rest = rest - k * d
                local += k * s
            inside &= rest == 0
            place[inside] = local[inside]
        hit = place >= 0
        return hit, place[hit]


@dataclass(frozen=True)
class LiveCopy:
    """One place where (a part of) a canonical tensor lives.

    `layout`: local lane → canonical lane. It may leave out lanes of `lanes`, such as padding: those are never touched.
    """

    lanes: Lanes
    layout: Layout
    locator: Locator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.layout.src_numel != self.lanes.lanes:
            raise LayoutError(f"layout covers {self.layout.src_numel} lanes, the memory has {self.lanes.lanes}.")
        object.__setattr__(self, "locator", Locator(self.layout))

    @property
    def held(self) -> int:
        """Canonical lanes in this copy."""
        return sum(block.numel for block in self.layout.blocks)

    def canonical(self, local: I64) -> I64:
        """The canonical lane of each local lane, −1 for one out of range or without one, such as padding."""
        shift = self.locator.shift
        if shift is None:
            return map_partial(self.layout, local)
        return np.where((local >= 0) & (local < self.lanes.lanes), local + shift, -1)

    def window(self, start: int, count: int) -> tuple[int, int, int] | None:
        """Where canonical lanes [start, start + count) lie here if this copy is one run of them, else None.

        (lo, hi, local): of the `count` lanes those in [lo, hi) are here, from local lane `local` on; lo = hi if none.
        """
        shift = self.locator.shift
        if shift is None:
            return None
        lo = min(max(shift - start, 0), count)
        hi = max(min(shift + self.lanes.lanes - start, count), lo)
        return lo, hi, start + lo - shift if lo < hi else 0

    def digest(self, key: DigestKey) -> int:
        """Digest of what is in memory now: one full pass."""
        return self.lanes.digest(key, self.layout)


@dataclass(frozen=True)
class LiveTensor:
    """A canonical tensor on this rank.

    `names` are the names it may have in a version (tied parameters have several; a version may use one of them).
    `shape` and `dtype` are canonical. Every copy holds the same `held` canonical lanes.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    copies: tuple[LiveCopy, ...]

    def __post_init__(self) -> None:
        if not self.names or not self.copies:
            raise LayoutError("a live tensor needs a name and a copy.")
        for copy in self.copies:
            if copy.layout.dst_numel != self.lanes or copy.held != self.held:
                raise LayoutError(
                    f"the copies of {self.names[0]!r} do not hold the same {self.held} of {self.lanes} lanes."
                )

    @property
    def lanes(self) -> int:
        """Canonical lanes of the whole tensor."""
        return lane_count(self.shape, self.dtype)

    @property
    def held(self) -> int:
        """Canonical lanes this rank holds."""
        return self.copies[0].held

    @property
    def whole(self) -> bool:
        """True when this rank holds the whole tensor, so that its digest is the tensor's."""
        return self.held == self.lanes

    def digest(self, name: str) -> int:
        """Digest of the live lanes under the canonical `name`; ProofError if the copies differ."""
        key = DigestKey.for_tensor(name)
        digests = {copy.digest(key) for copy in self.copies}
        if len(digests) > 1:
            raise ProofError(
                f"the {len(self.copies)} live copies of {name!r} hold different weights.",
                remedy="Something else wrote to one of them; resync the receiver.",
            )
        return digests.pop()


class LiveSet:
    """All tensors of one rank. `partial`: tensors of a version may live on other ranks only. `elsewhere`: tensors of a
    version that are kept, but not by their bits."""

    def __init__(self, tensors: Iterable[LiveTensor], *, partial: bool = False, elsewhere: Iterable[str] = ()) -> None:
        self.tensors = tuple(tensors)
        self.partial = partial
        self._elsewhere = frozenset(elsewhere)
        self._by_name: dict[str, LiveTensor] = {}
        for tensor in self.tensors:
            for name in tensor.names:
                if name in self._by_name:
                    raise TensorMismatch(f"two live tensors are called {name!r}.")
                self._by_name[name] = tensor

    def select(self, wanted: Sequence[TensorMeta]) -> dict[str, LiveTensor]:
        """Canonical name → live tensor for a version's tensors; TensorMismatch unless they fit one to one."""
        chosen: dict[str, LiveTensor] = {}
        taken: dict[int, str] = {}
        for meta in wanted:
            live = self._by_name.get(meta.name)
            if live is None:
                if self.partial or meta.name in self._elsewhere:
                    continue
                raise TensorMismatch(
                    f"the version has a tensor {meta.name!r} that the receiver has not.",
                    remedy="Register the model that is being trained.",
                )
            if (tuple(meta.shape), meta.dtype) != (live.shape, live.dtype):
                raise TensorMismatch(
                    f"{meta.name!r} is {meta.dtype} {list(meta.shape)} in the version and "
                    f"{live.dtype} {list(live.shape)} in the receiver.",
                    remedy="Load the receiver with the dtype and configuration that the trainer publishes.",
                )
            if id(live) in taken:
                raise TensorMismatch(
                    f"{meta.name!r} and {taken[id(live)]!r} are one tied tensor in the receiver, two in the version.",
                    remedy="Untie them in the receiver's model.",
                )
            taken[id(live)] = meta.name
            chosen[meta.name] = live
        for live in self.tensors:
            if id(live) not in taken:
                raise TensorMismatch(
                    f"the receiver has a tensor {live.names[0]!r} that the version does not carry.",
                    remedy="Let the trainer publish it, or declare it ignored (or a copy of another) in the receiver.",
                )
        return chosen

    @staticmethod
    def digests(selected: Mapping[str, LiveTensor]) -> dict[str, int]:
        """Digest of every selected tensor's live lanes: one full pass over this rank's weights."""
        for lanes in {c.lanes.device: c.lanes for live in selected.values() for c in live.copies}.values():
            lanes.settle()
        return {name: live.digest(name) for name, live in selected.items()}
