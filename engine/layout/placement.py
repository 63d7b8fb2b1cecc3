"""`Placement`: a canonical tensor's elements inside one local tensor, as rule tables and probes describe a receiver.

One invariant: within one placement no canonical element appears twice; a local tensor that holds replicas of an
element has a placement for each.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.errors import LayoutError
from engine.layout.algebra import from_json, prove_disjoint, to_json
from engine.layout.blocks import Layout
from engine.records.models import TensorMeta


class Placement(NamedTuple):
    """`layout` maps elements of the local tensor, in memory order, to elements of `tensor`.

    It may cover the local tensor in part (padding, other canonical tensors) and the canonical one too (other ranks).
    """

    tensor: TensorMeta
    layout: Layout

    def to_json(self) -> list[object]:
        """`[name, shape, dtype, local numel, blocks]`."""
        t = self.tensor
        return [t.name, list(t.shape), t.dtype, self.layout.src_numel, to_json(self.layout)]

    @staticmethod
    def from_json(value: object) -> Placement:
        """Inverse of `to_json`; LayoutError or pydantic's ValidationError if it is not well-formed."""
        if not isinstance(value, list) or len(value) != 5:
            raise LayoutError("a placement must be [name, shape, dtype, local numel, blocks].")
        name, shape, dtype, numel, blocks = value
        if type(numel) is not int:
            raise LayoutError("a placement's local size must be an integer.")
        meta = TensorMeta(name=name, shape=shape, dtype=dtype)
        layout = from_json(blocks, numel, numel_of(meta))
        prove_disjoint([("the placement", layout)], tensor=meta.name)
        return Placement(meta, layout)


def numel_of(meta: TensorMeta) -> int:
    """Elements of a canonical tensor."""
    count = 1
    for n in meta.shape:
        count *= n
    return count
