"""`GroupEnd`: one process's end of at most one group, and of nothing when it has left.

One invariant: after `leave` returns, no carrier of an earlier `connect` stays open, also not of one that was still
connecting.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.errors import InvalidInput, StateConflict
from engine.plan.planning import Plan
from transports.p2p.base import Carrier
from transports.p2p.bounded import within
from transports.p2p.planning import plan_of, read_roster
from transports.p2p.process_group import connect
from transports.p2p.rounds import agree

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Place:
    """A seat in a group. `address`: HOST:PORT of its store. `side`: this rank's number among the senders, or among the
    receivers. `device`: UUID of the GPU that NCCL uses, "" for none."""

    group: str
    address: str
    rank: int
    size: int
    side: int
    carrier: Literal["gloo", "nccl"]
    bind_host: str
    roster: Path
    roster_sha256: str
    timeout_s: float
    device: str = ""


@dataclass(frozen=True, slots=True)
class Seated:
    """A group that is connected and agreed upon."""

    place: Place
    carrier: Carrier
    plan: Plan


def host_port(address: str) -> tuple[str, int]:
    """HOST:PORT (also [V6]:PORT) in two; InvalidInput if it is none."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise InvalidInput(f"not an address: {address[:200]!r}.", remedy="HOST:PORT is needed.")
    return host.strip("[]"), int(port)


def peers_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The members with which `rank` exchanges anything, senders being numbered first."""
    pairs = [(s, plan.senders + r) for s, r in plan.pairs]
    return tuple(sorted({b if a == rank else a for a, b in pairs if rank in (a, b)}))


def _device(place: Place) -> torch.device | None:
    """The GPU to use; InvalidInput if it is not one of this process's."""
    if place.carrier != "nccl" or not place.device:
        return None
    import torch

    from transports.memory.cuda_ipc import TorchCuda

    index = TorchCuda().find(place.device)
    if index is None:
        raise InvalidInput(
            f"GPU {place.device} is not visible to this process.", remedy="Check CUDA_VISIBLE_DEVICES, or use gloo."
        )
    return torch.device("cuda", index)


def _connected(place: Place, plan: Plan, device: torch.device | None, deadline: float) -> Carrier:
    """A carrier whose members all have this plan."""
    carrier = connect(
        host_port(place.address),
        place.group,
        place.rank,
        place.size,
        kind=place.carrier,
        bind_host=place.bind_host,
        timeout_s=max(0.1, deadline - time.monotonic()),
        device=device,
        peers=peers_of(plan, place.rank),
    )
    try:
        agree(carrier, plan, max(0.1, deadline - time.monotonic()))
    except BaseException:
        carrier.close()
        raise
    return carrier


class GroupEnd:
    """`leave` may be called from any thread and ends what another one is doing here; the rest from one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: str | None = None
        """The group that was entered last, or is being entered; None after leaving it."""
        self._seated: Seated | None = None
        self._stopped = threading.Event()
        """Set when what is going on now is given up."""

    def connect(self, place: Place) -> Plan:
        """Connect to all members, compute the plan, and agree on it with all of them.

        CodecError, LayoutError or InvalidInput where the roster makes no plan; P2PError where members cannot be reached
        or have another plan; StateConflict if `leave` came in between.
        """
        self.leave()
        with self._lock:
            stopped, self._group = self._stopped, place.group
        deadline = time.monotonic() + place.timeout_s
        plan = plan_of(read_roster(place.roster, place.roster_sha256))
        device = _device(place)
        # In a thread of its own, so that `leave` need not wait for as long as members may be missing.
        carrier = within(
            deadline,
            lambda: _connected(place, plan, device, deadline),
            lambda late: late.close(),
            "the members could not be connected in time.",
            stopped,
        )
        with self._lock:
            if not stopped.is_set():
                self._seated = Seated(place, carrier, plan)
                return plan
        carrier.close()
        raise StateConflict("the group ended while this rank was connecting to it.")

    def seated(self, group: str) -> Seated:
        """The group as it is connected; StateConflict if it is another one, or none."""
        with self._lock:
            seated = self._seated
        if seated is None or seated.place.group != group:
            raise StateConflict(f"this rank is not in group {group}.", remedy="The group is formed anew.")
        return seated

    def leave(self, group: str | None = None) -> None:
        """Close what is open of `group`, None for whichever it is. Idempotent."""
        with self._lock:
            if group is not None and group != self._group:
                return
            self._stopped.set()
            self._stopped = threading.Event()
            seated, self._seated, self._group = self._seated, None, None
        if seated is not None:
            seated.carrier.close()
