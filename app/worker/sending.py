"""The worker's end of P2P: hosts the group's store if asked, connects, and sends versions from the ledger.

Invariants: a version is sent from what was pinned when it was offered, so that its decision may come at any time; and
nothing here changes what the rank knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.worker import protocol as p
from app.worker.source import SliceShape
from clients.protocol import CudaRef
from engine.detect.base import I64, TILE, U16
from engine.errors import InvalidInput, StateConflict
from engine.ledger import Ledger
from engine.pending import Level
from engine.plan.operations import Counts, Index, Operation
from engine.plan.selection import SliceChanges, count, dense_ranks, dense_tiles, select_entries
from transports.p2p.end import GroupEnd, Place
from transports.p2p.rendezvous import host_store
from transports.p2p.rounds import VersionHead, send_version

KEPT = 2
"""Versions kept for sending at most."""


class PinnedVersion:
    """A version in flight, kept for sending: its sparse lists, and its dense lanes in a file that stays readable after
    its name is gone. Implements `transports.p2p.rounds.Outgoing`."""

    def __init__(self, ledger: Ledger, shapes: Sequence[SliceShape], lanes_file: Path) -> None:
        assert ledger.in_flight is not None
        assert ledger.epoch is not None
        flight = ledger.in_flight
        self.head = VersionHead(epoch=ledger.epoch, version=flight.version, base=flight.base, step=flight.step)
        self._levels: dict[int, Level] = {s.slice: s.in_flight for s in ledger.slices if s.in_flight is not None}
        self._changes = {
            number: SliceChanges(level.ranks, np.flatnonzero(level.dense)) for number, level in self._levels.items()
        }
        self._starts: dict[tuple[int, int], int] = {}
        at = 0
        for shape in shapes:  # the order in which the lanes were spooled
            for tile in self._changes[shape.spec.slice].tiles.tolist():
                self._starts[shape.spec.slice, tile] = at
                at += min((tile + 1) * TILE, shape.lanes) - tile * TILE
        self._dense: U16 = np.memmap(lanes_file, "<u2", "r", shape=(at,)) if at else np.empty(0, np.uint16)

    @property
    def nbytes(self) -> int:
        """Upper estimate of what one receiver that holds everything would buffer."""
        return 6 * sum(level.ranks.size for level in self._levels.values()) + 2 * int(self._dense.size)

    def counts(self, operation: Operation) -> Counts:
        """What the operation carries of this version."""
        return count(operation, self._changes)

    def entries(self, operation: Operation) -> tuple[Index, U16]:
        """Receiver-local lanes and new bits of its sparse entries, part by part in rank order."""
        local: list[Any] = []
        bits: list[U16] = []
        for part in operation.parts:
            level = self._levels[part.slice]
            positions, lanes = select_entries(part, level.ranks)
            local.append(lanes.astype(operation.index_dtype))
            bits.append(level.cur[positions])
        if len(local) == 1:
            return local[0], bits[0]
        return np.concatenate(local), np.concatenate(bits)

    def tiles(self, operation: Operation) -> I64:
        """Its dense tiles as (place in `operation.parts`, tile), I64 [T, 2]."""
        found = [
            (number, tile)
            for number, part in enumerate(operation.parts)
            for tile in dense_tiles(part, self._changes[part.slice].tiles).tolist()
        ]
        return np.array(found, np.int64).reshape(-1, 2)

    def dense(self, operation: Operation) -> Iterator[U16]:
        """New bits of the lanes that the receiver has of each of these tiles, in rank order."""
        for number, tile in self.tiles(operation).tolist():
            part = operation.parts[number]
            start = self._starts[part.slice, tile] - tile * TILE
            yield np.asarray(self._dense[start + dense_ranks(part, tile)], np.uint16)


class GroupSender:
    """At most one group at a time. `leave` may be called from another thread than everything else."""

    def __init__(self, shapes: Sequence[SliceShape]) -> None:
        self._shapes = shapes
        self._device = device_of(shapes)
        self._end = GroupEnd()
        self._stores: dict[str, Any] = {}
        """By group: the one it hosts, if any."""
        self._pinned: dict[int, PinnedVersion] = {}

    def slices(self) -> p.P2PSlicesDone:
        """What this rank can send."""
        slices = [
            p.P2PSlice(slice=s.spec.slice, tensor=s.meta.name, lanes=s.lanes, blocks=s.blocks) for s in self._shapes
        ]
        return p.P2PSlicesDone(slices=slices, device=self._device)

    def pin(self, ledger: Ledger, lanes_file: Path) -> p.P2PPinned:
        """Keep the version in flight for sending, and the one before, whose exchange may just begin."""
        pinned = PinnedVersion(ledger, self._shapes, lanes_file)
        head = pinned.head
        known = {v: p for v, p in self._pinned.items() if p.head.epoch == head.epoch and v < head.version}
        self._pinned = dict(sorted([*known.items(), (head.version, pinned)])[-KEPT:])
        return p.P2PPinned(epoch=head.epoch, version=head.version, base=head.base, step=head.step, bytes=pinned.nbytes)

    def host(self, request: p.P2PHost) -> p.P2PHosted:
        """Keep the group's store until it is left, or another one's is wanted."""
        try:
            store, port = host_store(request.host)
        except OSError as error:
            raise InvalidInput(
                f"{request.host!r} is no address of this node: {error}.", remedy="Set DTE_P2P_HOST to one that is."
            ) from None
        self._stores = {request.group: store}
        host = f"[{request.host}]" if ":" in request.host else request.host
        return p.P2PHosted(address=f"{host}:{port}")

    def connect(self, request: p.P2PConnect) -> p.P2PConnected:
        """Connect to the group's other members and agree on the plan."""
        fields = request.model_dump(exclude={"op", "roster"})
        plan = self._end.connect(Place(roster=Path(request.roster), device=self._device, **fields))
        return p.P2PConnected(plan=plan.digest, operations=len(plan.operations))

    def send(self, request: p.P2PSend) -> p.P2PSent:
        """Send the pinned version to every receiver."""
        seated, pinned = self._end.seated(request.group), self._pinned.get(request.version)
        if pinned is None:
            raise StateConflict(f"version {request.version} is not kept for sending.")
        started = time.perf_counter()
        sent = send_version(
            seated.carrier,
            seated.plan,
            seated.place.side,
            pinned.head,
            pinned,
            bucket_bytes=request.bucket_bytes,
            deadline_s=request.timeout_s,
        )
        return p.P2PSent(
            entries=sum(r.entries for r in sent),
            bytes=sum(r.bytes for r in sent),
            ms=(time.perf_counter() - started) * 1e3,
            pairs={r.receiver: r.bytes for r in sent},
        )

    def leave(self, request: p.P2PLeave) -> p.Done:
        """Give up the group if it is this one; what another thread is doing in it ends with an error."""
        self._end.leave(request.group)
        self._stores.pop(request.group, None)
        return p.Done()


def device_of(shapes: Sequence[SliceShape]) -> str:
    """UUID of the GPU that all slices' weights are on; "" where there is none, or several."""
    devices = {ref.device if isinstance(ref := s.spec.theta, CudaRef) else "" for s in shapes}
    return devices.pop() if len(devices) == 1 else ""
