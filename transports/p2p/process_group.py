"""Groups of ranks over torch.distributed, without its default group: whoever embeds us may have one already.

One invariant: `connect` gives every member a usable carrier within the deadline, or every member an error.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from transports.p2p.base import Carrier
from transports.p2p.gloo import connect_gloo
from transports.p2p.nccl import connect_nccl
from transports.p2p.rendezvous import Meeting, host_store

if TYPE_CHECKING:
    import torch

__all__ = ["Kind", "connect", "host_store"]

Kind = Literal["gloo", "nccl"]


def connect(
    address: tuple[str, int],
    group: str,
    rank: int,
    size: int,
    *,
    kind: Kind = "gloo",
    bind_host: str = "127.0.0.1",
    timeout_s: float = 60.0,
    device: torch.device | None = None,
    peers: tuple[int, ...] | None = None,
) -> Carrier:
    """This process as member `rank` of `size` of `group`, meeting at the store at `address` (host, port).

    `group` is used once: a new group, also of the same members, has a new name. `bind_host`: name or address of this
    machine that the others can reach (Gloo listens there). `device`: the GPU that NCCL uses. `peers`: the members this
    one exchanges with, None for all; NCCL connects only these, and both sides must name each other.
    Raises `ExchangeTimeout` naming who did not come, `PeerLost`, `DeviceShared`, `CarrierUnavailable`.
    """
    deadline = time.monotonic() + timeout_s
    meeting = Meeting(address, group, rank, size, deadline)
    meeting.gather(b"", deadline)
    carrier: Carrier
    if kind == "nccl":
        carrier = connect_nccl(meeting, device, peers, deadline)
    else:
        carrier = connect_gloo(meeting, bind_host, deadline)
    try:
        # A member that is lost meanwhile can leave connections behind that look good: hear once more from all.
        carrier.gather(b"", deadline)
    except BaseException:
        carrier.close()
        raise
    return carrier
