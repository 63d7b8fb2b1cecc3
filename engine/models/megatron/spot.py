"""One parameter of one rank while a rule describes it.

One invariant: every error raised from here names the parameter, the sizes that do not fit and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from engine.errors import InvalidInput, LayoutError
from engine.layout.blocks import Block, Layout
from engine.layout.placement import Placement, numel_of
from engine.models.boxes import Local, Range
from engine.models.megatron.dimensions import Dimensions
from engine.models.megatron.shape import MegatronShape
from engine.records.models import ITEMSIZE, TensorMeta

CHECK_SIZES = "Check that hf_config describes this model and that the parallel shape is this rank's."


@dataclass(frozen=True)
class Spot:
    """What a rule works with. `local`: the parameter; `layer`: global layer number, 0-based, −1 outside the decoder's
    layers; `expert`: the number in an expert's name, counted from this rank's first, −1 if there is none."""

    local: Local
    dims: Dimensions
    shape: MegatronShape
    dtypes: Mapping[str, str]
    layer: int = -1
    expert: int = -1

    @property
    def at(self) -> str:
        """Prefix of this layer's canonical names."""
        return f"model.layers.{self.layer}"

    @property
    def moe(self) -> str:
        """Prefix of the canonical names of this layer's router and experts."""
        return f"{self.at}.{self.dims.family.block}"

    def meta(self, name: str, *shape: int, dtype: str = "") -> TensorMeta:
        """A canonical tensor."""
        kind = self.dtypes.get(name) or dtype or self.dims.dtype
        if kind not in ITEMSIZE:
            raise InvalidInput(f"{name!r} cannot have dtype {kind!r}.", remedy=f"Use one of {', '.join(ITEMSIZE)}.")
        return TensorMeta(name=name, shape=shape, dtype=kind)  # type: ignore[arg-type]

    def split(self, n: int, what: str, by: tuple[int, int] | None = None) -> Range:
        """This rank's equal share of `n`; of the tensor-parallel group, or `by` (rank, size)."""
        rank, size = by or self.shape.share
        if n % size:
            raise LayoutError(
                f"{self.local.name!r}: {n} {what} cannot be split evenly among {size} ranks.", remedy=CHECK_SIZES
            )
        return rank * (n // size), (rank + 1) * (n // size)

    def expect(self, *shape: int) -> None:
        """LayoutError unless the local parameter has this shape."""
        if self.local.shape != shape:
            raise LayoutError(
                f"{self.local.name!r} has shape {list(self.local.shape)}; the table for {self.shape} expects "
                f"{list(shape)}.",
                remedy=CHECK_SIZES,
            )

    def refuse(self, why: str, remedy: str) -> InvalidInput:
        """The error for what these tables cannot express; for the caller to raise."""
        return InvalidInput(f"{self.local.name!r}: {why}", remedy=remedy)

    # --- what lies where -----------------------------------------------------------------------------------------

    def rows(self, meta: TensorMeta, mine: Range, at: int) -> None:
        """Rows `mine` of a canonical tensor lie from local row `at` on."""
        rest = meta.shape[1:]
        self.local.put(meta, (mine, *((0, n) for n in rest)), (at, *(0 for _ in rest)))

    def columns(self, meta: TensorMeta, mine: Range) -> None:
        """The local matrix is columns `mine` of a canonical one."""
        self.local.put(meta, ((0, meta.shape[0]), mine), (0, 0))

    def block(
        self,
        meta: TensorMeta,
        shape: tuple[int, ...],
        at: int,
        strides: tuple[int, ...],
        to: int,
        onto: tuple[int, ...],
    ) -> None:
        """A rectangle of `shape` elements, from flat local element `at` to flat canonical element `to`."""
        block = Block(shape, at, strides, to, onto).normalised()
        self.local.placements.append(Placement(meta, Layout((block,), prod(self.local.shape), numel_of(meta))))

    def done(self, *, padded: int = 0) -> list[Placement]:
        """The placements; LayoutError if an element belongs to two tensors, or to none but for `padded` ones."""
        out = self.local.done()
        held = sum(b.numel for p in out for b in p.layout.blocks)
        if held + padded != prod(self.local.shape):
            raise LayoutError(
                f"{self.local.name!r}: {held} of {prod(self.local.shape)} elements have a canonical place.",
                remedy=CHECK_SIZES,
            )
        return out
