"""`Roster`: the layouts of all members of one group, from which each of them computes the same plan.

One invariant: a roster is all that a plan depends on, and it is checked like any input before a layout is used.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError

from engine.errors import CodecError
from engine.records.models import BlockJson, Count, DType, LaunchId, Record, RunId, TensorMeta, TensorName


class RosterSlice(Record):
    """A slice that a trainer rank owns: `blocks` map its `lanes` lanes (ranks) to canonical lanes of `tensor`."""

    slice: Count
    tensor: TensorName
    lanes: Count
    blocks: list[BlockJson]


class RosterTensor(Record):
    """A tensor of a receiver rank: the names a version may use for it, and which canonical lanes are where in its
    `held` local lanes (`blocks` null: all of them, in order)."""

    names: list[TensorName]
    shape: tuple[Count, ...]
    dtype: DType
    held: Count
    blocks: list[BlockJson] | None = None


class Roster(Record):
    """Senders in the order of the trainer's ranks, receiver ranks in the order of the group."""

    run: RunId
    epoch: Annotated[int, Field(ge=1)]
    launch: LaunchId
    tensors: list[TensorMeta]
    senders: list[list[RosterSlice]]
    receivers: list[list[RosterTensor]]


def parse(data: bytes) -> Roster:
    """The roster in `data`; CodecError if it is none."""
    try:
        return Roster.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        raise CodecError(f"the group's roster is malformed at {where}: {first['msg']}.") from None
