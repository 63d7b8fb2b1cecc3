"""From a roster to the plan. Apart from the roster, so that who only passes it on loads no tensor work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from engine.commit.launch import tensor_lanes
from engine.errors import CodecError, InvalidInput
from engine.layout.algebra import from_json, identity, validate_slice
from engine.plan.operations import ReceiverTensor, SenderSlice
from engine.plan.planning import Plan, make_plan
from engine.records.models import TensorMeta
from transports.p2p.roster import Roster, RosterSlice, RosterTensor, parse

MAX_ROSTER_BYTES = 1 << 30


def read_roster(path: Path, sha256: str) -> Roster:
    """The roster in a file; CodecError unless it has this SHA-256 and is one."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ROSTER_BYTES + 1)
    except OSError as error:
        raise CodecError(f"the group's roster cannot be read: {error.strerror or error}.") from None
    if len(data) > MAX_ROSTER_BYTES or hashlib.sha256(data).hexdigest() != sha256:
        raise CodecError("the group's roster is not the one that was announced.")
    return parse(data)


def plan_of(roster: Roster) -> Plan:
    """The group's plan. LayoutError or InvalidInput, naming tensor and member, where layouts do not fit together."""
    metas = {t.name: t for t in roster.tensors}
    if len(metas) != len(roster.tensors):
        raise InvalidInput("the group's roster names a tensor twice.")
    lanes = {name: tensor_lanes(meta) for name, meta in metas.items()}
    return make_plan(
        roster.tensors,
        [_slices(number, slices, lanes) for number, slices in enumerate(roster.senders)],
        [_tensors(number, tensors, metas, lanes) for number, tensors in enumerate(roster.receivers)],
    )


def _slices(number: int, slices: Sequence[RosterSlice], lanes: dict[str, int]) -> list[SenderSlice]:
    out = []
    for item in slices:
        if item.tensor not in lanes:
            raise InvalidInput(f"trainer rank {number} sends {item.tensor!r}, which no rank declares.")
        layout = from_json(item.blocks, item.lanes, lanes[item.tensor])
        validate_slice(layout, item.lanes, tensor=item.tensor)
        out.append(SenderSlice(item.slice, item.tensor, layout))
    return out


def _tensors(
    number: int, tensors: Sequence[RosterTensor], metas: dict[str, TensorMeta], lanes: dict[str, int]
) -> list[ReceiverTensor]:
    out = []
    for item in tensors:
        name = next((n for n in item.names if n in metas), None)
        if name is None:
            raise InvalidInput(
                f"receiver rank {number} holds {item.names[0] if item.names else '?'!r}, which the trainer has not.",
                remedy="Register the model that is being trained.",
            )
        meta = metas[name]
        if (tuple(meta.shape), meta.dtype) != (tuple(item.shape), item.dtype):
            raise InvalidInput(
                f"receiver rank {number} holds {name!r} as {item.dtype} {list(item.shape)}, the trainer has "
                f"{meta.dtype} {list(meta.shape)}.",
                remedy="Load the receiver with the dtype and configuration that the trainer publishes.",
            )
        layout = identity(lanes[name]) if item.blocks is None else from_json(item.blocks, item.held, lanes[name])
        out.append(ReceiverTensor(name, layout))
    return out
