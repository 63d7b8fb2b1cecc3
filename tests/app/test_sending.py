"""A worker's end of a group and a receiver rank's, connected to each other in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from app.worker import protocol as p
from app.worker.sending import GroupSender
from clients.groups import GroupPlace
from clients.rollout.p2p import GroupReceiver, Mailbox
from clients.rollout.p2p_protocol import Connect, Receive
from clients.rollout.protocol import TargetBody
from engine.detect.base import tile_count
from engine.errors import StateConflict
from engine.ledger import InFlight, Ledger, SliceLedger
from engine.pending import Level, empty
from engine.records import record_bytes
from engine.records.models import TensorMeta
from transports.p2p.roster import Roster, RosterSlice, RosterTensor

LANES, GROUP = 1000, "0" * 16
LIMITS = {"bucket_bytes": 1 << 12, "timeout_s": 60.0}


def in_flight(version: int) -> Ledger:
    """A ledger whose version `version` changes the lanes that are multiples of it."""
    ranks = np.arange(0, LANES, version)
    bits = np.full(ranks.size, version, np.uint16)
    level = Level(ranks, np.zeros_like(bits), bits, np.zeros(tile_count(LANES), np.bool_))
    one = SliceLedger(0, LANES, 1, None, None, None, None, empty(tile_count(LANES)), level)
    return Ledger("run", "one", 0, 1, 1, 0, InFlight(version=version, step=version, base=version - 1), (one,))


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[GroupSender, GroupReceiver, Mailbox]]:
    """Both in one group; the sender sends slice 0, which is all of tensor w."""
    roster = Roster(
        run="run",
        epoch=1,
        launch="one",
        tensors=[TensorMeta(name="w", shape=(LANES,))],
        senders=[[RosterSlice(slice=0, tensor="w", lanes=LANES, blocks=[([LANES], 0, [1], 0, [1])])]],
        receivers=[[RosterTensor(names=["w"], shape=(LANES,), dtype="bfloat16", held=LANES)]],
    )
    data = record_bytes(roster)
    (tmp_path / "roster").write_bytes(data)
    mailbox = Mailbox()
    sender, receiver = GroupSender(()), GroupReceiver(mailbox)

    def place(rank: int) -> dict[str, object]:
        return GroupPlace(
            group=GROUP, address=address, rank=rank, size=2, side=0, carrier="gloo", bind_host="127.0.0.1",
            roster=str(tmp_path / "roster"), roster_sha256=hashlib.sha256(data).hexdigest(), timeout_s=60.0,
        ).model_dump()  # fmt: skip

    address = sender.host(p.P2PHost(group=GROUP, host="127.0.0.1")).address
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(receiver.connect, Connect(owner="o", fence=0, **place(1)))  # type: ignore[arg-type]
        plan = sender.connect(p.P2PConnect(**place(0)))  # type: ignore[arg-type]
        assert other.result().model_dump() == plan.model_dump()
    yield sender, receiver, mailbox
    receiver.leave()
    sender.leave(p.P2PLeave(group=GROUP))


def exchange(sender: GroupSender, receiver: GroupReceiver, version: int) -> None:
    body = Receive(
        owner="o", fence=0, group=GROUP, epoch=1, version=version, base=version - 1, step=version,
        max_bytes=1 << 20, **LIMITS,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(receiver.receive, body)
        sent = sender.send(p.P2PSend(group=GROUP, version=version, **LIMITS))
        assert got.result().entries == sent.entries == -(-LANES // version)


def test_a_version_can_be_sent_while_the_next_is_pinned(
    ends: tuple[GroupSender, GroupReceiver, Mailbox], tmp_path: Path
) -> None:
    """An exchange may begin just when its version is decided, and the next one read."""
    sender, receiver, mailbox = ends
    for version in (1, 2, 3):
        sender.pin(in_flight(version), tmp_path / "lanes")
    for version in (2, 3):
        exchange(sender, receiver, version)
        body = TargetBody(
            run="run",
            version=version,
            step=version,
            base=version - 1,
            tensors=[],
            base_digests={},
            chunks=[],
            received=GROUP,
        )
        (arrived,) = mailbox.take(body)
        assert arrived.local.tolist() == list(range(0, LANES, version))
        assert set(arrived.bits.tolist()) == {version}
    with pytest.raises(StateConflict, match="version 1 is not kept"):
        sender.send(p.P2PSend(group=GROUP, version=1, **LIMITS))
    sender.leave(p.P2PLeave(group="f" * 16))  # another group's end
    with pytest.raises(StateConflict, match="version 4"):
        sender.send(p.P2PSend(group=GROUP, version=4, **LIMITS))
