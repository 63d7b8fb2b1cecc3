"""The vocabulary of a plan: members, operations, and what one operation carries of one version.

One invariant: a plan is a function of the members' layouts alone, so whoever knows these computes the same operations
in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.layout.blocks import Layout
from engine.plan.routes import Route

I64 = npt.NDArray[np.int64]
U16 = npt.NDArray[np.uint16]
Index = npt.NDArray[Any]
"""Lanes: uint32 where the tensor allows it (`index_dtype`), else int64."""


@dataclass(frozen=True, slots=True)
class SenderSlice:
    """One slice that a trainer rank can send: `layout` maps rank (lane of the slice) to canonical lane of `tensor`."""

    slice: int
    tensor: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class ReceiverTensor:
    """One tensor of a receiver rank: `layout` maps local lane to canonical lane of `tensor`, padding left out."""

    tensor: str
    layout: Layout


@dataclass(frozen=True)
class Part:
    """A slice's share of an operation: `layout` maps rank (lane of the slice) to lane of the receiver's tensor."""

    slice: int
    layout: Layout

    @cached_property
    def route(self) -> Route:
        """The layout, ready to be followed; made when it is asked for first, as a member needs few of a plan's."""
        return Route(self.layout)


@dataclass(frozen=True, slots=True)
class Operation:
    """What `sender` sends to `receiver` of `tensor` (numbers count each side from 0), in every version.

    `lanes`: how many lanes of the receiver it can reach. `span`: lanes of the receiver's local tensor, so that a local
    index is below it.
    """

    sender: int
    receiver: int
    tensor: str
    lanes: int
    span: int
    parts: tuple[Part, ...]

    @property
    def index_dtype(self) -> type[np.uint32] | type[np.int64]:
        """How local lanes travel."""
        return np.uint32 if self.span <= 1 << 32 else np.int64


@dataclass(frozen=True, slots=True)
class Counts:
    """What an operation carries of one version: sparse entries, dense tiles, and lanes in these that it reaches."""

    entries: int
    tiles: int
    dense_lanes: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One operation of one version, as it arrived.

    `local`, `bits` [entries]: receiver-local lanes and their new bits. `tiles` I64 [tiles, 2]: (place in
    `operation.parts`, tile of that slice), ascending. `dense` [dense_lanes]: the new bits of the lanes that the
    receiver has of those tiles, tile by tile in rank order.
    """

    operation: Operation
    local: Index
    bits: U16
    tiles: I64
    dense: U16
