"""Who is to be in a group, and what its members are told of each other. Functions of what members said alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Literal

from app.p2p.messages import Carrier, Join, ReceiverJoin, SenderJoin
from transports.p2p.roster import Roster

CarrierChoice = Literal["auto", "gloo", "nccl"]


def choose(joins: Iterable[Join], ready: Callable[[str], bool]) -> tuple[list[SenderJoin], list[ReceiverJoin]] | None:
    """All ranks of the newest launch, and every receiver all of whose ranks are there; None if one side is missing.

    A launch of a higher epoch takes the place of the one before as soon as one of its ranks is here. `ready`: whether
    the receiver of this name may be in a group now; if none is, all are.
    """
    joins = list(joins)
    epoch = max((j.epoch for j in joins if isinstance(j, SenderJoin)), default=0)
    ranks = {j.rank: j for j in joins if isinstance(j, SenderJoin) and j.epoch == epoch}
    if not ranks or len(ranks) < next(iter(ranks.values())).world:
        return None
    engines: dict[str, dict[int, ReceiverJoin]] = {}
    for j in joins:
        if isinstance(j, ReceiverJoin):
            engines.setdefault(j.receiver, {})[j.rank] = j
    found = {name: e for name, e in sorted(engines.items()) if len(e) == next(iter(e.values())).ranks}
    if not found:
        return None
    whole = [e for name, e in found.items() if ready(name)] or list(found.values())
    return [ranks[r] for r in sorted(ranks)], [e[r] for e in whole for r in sorted(e)]


def roster_of(run: str, sending: Sequence[SenderJoin], receiving: Sequence[ReceiverJoin]) -> Roster:
    """The layouts of all members."""
    tensors = {t.name: t for j in sending for t in j.tensors}
    return Roster(
        run=run,
        epoch=sending[0].epoch,
        launch=sending[0].launch,
        tensors=[tensors[n] for n in sorted(tensors)],
        senders=[j.slices for j in sending],
        receivers=[j.tensors for j in receiving],
    )


def carrier_for(choice: CarrierChoice, members: Sequence[Join]) -> Carrier:
    """NCCL refuses two ranks on one GPU, and has no use for a rank without one."""
    devices = [j.device for j in members]
    distinct = all(devices) and len(set(devices)) == len(devices)
    return "nccl" if choice == "nccl" or (choice == "auto" and distinct) else "gloo"


def largest_share(roster: Roster) -> float:
    """Of all lanes, what the receiver rank with the most of them holds: at most 1."""
    lanes = sum(prod(t.shape) for t in roster.tensors)
    most = max((sum(t.held for t in mine) for mine in roster.receivers), default=0)
    return min(1.0, most / lanes) if lanes else 0.0
