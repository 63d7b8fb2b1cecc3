"""The ways of `dte bench p2p` to bring a version from senders to receivers, from both sides.

Invariants: both sides of a method start from the same (the senders' shards with the list of what changed in them) and
end with the same (local parameters, or local lanes with their bits); and where a baseline could be built in several
ways it gets the faster one: buffers made beforehand, placing while more arrives, nothing checked.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.bench.p2p_case import Case, strided
from app.worker.sending import PinnedVersion
from engine.detect.base import I64, U16
from engine.layout.algebra import invert
from engine.plan.operations import Counts, Delivery, Operation, Part
from engine.plan.selection import select_entries
from transports.p2p import wire
from transports.p2p.base import Carrier, Pending
from transports.p2p.driving import drive
from transports.p2p.rendezvous import Meeting
from transports.p2p.rounds import VersionHead, receive_version, send_version

DEADLINE_S = 300.0
MAX_BYTES = 1 << 40
HEAD = VersionHead(epoch=1, version=1, base=0, step=1)
Lanes = list[tuple[str, npt.NDArray[Any], U16]]
"""(tensor, local lanes, new bits), a tensor perhaps several times."""


@dataclass
class Outcome:
    """One member's part of a transfer. `marks`: times (`time.monotonic`) at which its stages ended, by name. `links`:
    for each stage the bytes that it sent and received, what is broadcast counted once where it is sent. `messages`: to
    or from whom exchanged, at most."""

    marks: dict[str, float] = field(default_factory=dict)
    links: list[tuple[int, int]] = field(default_factory=list)
    messages: int = 0

    def stage(self, name: str, sent: int = 0, received: int = 0) -> None:
        """A stage is over."""
        self.marks[name] = time.monotonic()
        self.links.append((sent, received))


class Sender:
    """A trainer rank's shard, and what changed in it."""

    def __init__(self, case: Case, number: int, shard: U16, changes: Sequence[tuple[int, I64, U16]]) -> None:
        """`shard`: its new bits. `changes`: (slice, ranks, new bits)."""
        self.case, self.number, self.shard = case, number, shard
        first = case.bounds[number]
        self.at = {
            s.slice: max(case.starts[s.tensor], first) - first for s in case.senders[number]
        }  # where each slice lies in the shard
        self.first = first
        self.changes = changes


class Receiver:
    """A receiver rank's landing place. `landing`: local parameters, what dense methods fill. `lanes`: what the others
    found."""

    def __init__(self, case: Case, number: int, landing: dict[str, U16]) -> None:
        self.case, self.number, self.landing = case, number, landing
        self.held = {h.tensor: h for h in case.receivers[number]}
        self.inverses = {h.tensor: Part(0, invert(h.layout)) for h in case.receivers[number]}
        self.lanes: Lanes = []
        self.deliveries: list[Delivery] = []


class Group:
    """All members, and beside it the first sender with the receivers, for broadcasts."""

    def __init__(self, carrier: Carrier, senders: int, address: tuple[str, int], timeout_s: float) -> None:
        from torch.distributed import ProcessGroupGloo

        self.carrier, self.senders = carrier, senders
        self._group: Any = None
        rank = 0 if carrier.rank == 0 else carrier.rank - senders + 1
        if 0 < carrier.rank < senders:
            return
        deadline = time.monotonic() + timeout_s
        meeting = Meeting(address, "broadcast", rank, carrier.size - senders + 1, deadline)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=DEADLINE_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=address[0])]
        self._group = ProcessGroupGloo(meeting.store, meeting.rank, carrier.size - senders + 1, options)

    def broadcast(self, buffer: npt.NDArray[Any]) -> None:
        """Everybody's `buffer` becomes the first sender's."""
        if buffer.size:
            self._group.broadcast(torch.from_numpy(buffer.view(np.uint8)), 0).wait()


class Method(ABC):
    """One way; `send` runs on senders and `receive` on receivers, at once."""

    @abstractmethod
    def send(self, group: Group, sender: Sender) -> Outcome: ...

    @abstractmethod
    def receive(self, group: Group, receiver: Receiver) -> Outcome: ...


def gathered(group: Group, sender: Sender, mine: npt.NDArray[Any], parts: Sequence[npt.NDArray[Any]]) -> None:
    """`mine` of every sender in `parts` of the first one, whose own is there already."""
    deadline = time.monotonic() + DEADLINE_S
    if sender.number:
        group.carrier.send(mine.view(np.uint8), 0).wait(deadline)
        return
    posted = [group.carrier.receive(part.view(np.uint8), s) for s, part in enumerate(parts) if s]
    for pending in posted:
        pending.wait(deadline)


class DenseBroadcast(Method):
    """All weights gathered on one rank and broadcast to everybody, who keeps what it holds."""

    def __init__(self, case: Case, member: int) -> None:
        central = member == 0 or member >= len(case.senders)
        self._model = np.zeros(case.numel if central else 0, np.uint16)
        self._bounds = case.bounds

    def send(self, group: Group, sender: Sender) -> Outcome:
        out = Outcome()
        parts = [self._model[a:b] for a, b in zip(self._bounds[:-1], self._bounds[1:], strict=True)]
        if sender.number == 0:
            parts[0][...] = sender.shard
        gathered(group, sender, sender.shard, parts)
        out.stage("gather", *((sender.shard.nbytes, 0) if sender.number else (0, sum(p.nbytes for p in parts[1:]))))
        if sender.number == 0:
            group.broadcast(self._model)
            out.stage("broadcast", sent=self._model.nbytes)
        return out

    def receive(self, group: Group, receiver: Receiver) -> Outcome:
        out = Outcome(links=[(0, 0)])
        group.broadcast(self._model)
        out.stage("broadcast", received=self._model.nbytes)
        for held in receiver.held.values():
            receiver.case.place(held, self._model, receiver.landing[held.parameter])
        out.marks["place"] = time.monotonic()
        return out


class DenseDirect(Method):
    """Every sender gives every receiver all weights that the one has and the other holds, and nothing else."""

    def __init__(self, case: Case, member: int, message_bytes: int) -> None:
        self._step = message_bytes
        mine = [o for o in case.plan.operations if member in (o.sender, len(case.senders) + o.receiver)]
        lanes: dict[tuple[int, int], int] = {}
        for o in mine:
            lanes[o.sender, o.receiver] = lanes.get((o.sender, o.receiver), 0) + o.lanes
        self._buffers = {pair: np.zeros(n, np.uint16) for pair, n in lanes.items()}

    def send(self, group: Group, sender: Sender) -> Outcome:
        case, deadline = sender.case, time.monotonic() + DEADLINE_S
        pairs = [pair for pair in self._buffers if pair[0] == sender.number]

        def job(pair: tuple[int, int]) -> int:
            buffer, to = self._buffers[pair], group.senders + pair[1]
            raw, posted, done = buffer.view(np.uint8), list[Pending](), 0
            for operation, piece in _pieces(case, pair, buffer):
                at = 0
                for part in operation.parts:
                    for b in part.layout.blocks:
                        source = strided(sender.shard, sender.at[part.slice] + b.src_offset, b.src_strides, b.shape)
                        piece[at : at + b.numel].reshape(b.shape)[...] = source
                        at += b.numel
                ready = piece.ctypes.data + piece.nbytes - buffer.ctypes.data
                while ready - done >= self._step or (ready == raw.size and done < ready):
                    posted.append(group.carrier.send(raw[done : done + self._step], to))
                    done = min(done + self._step, raw.size)
            for pending in posted:
                pending.wait(deadline)
            return len(posted)

        return self._run(group, pairs, lambda p: group.senders + p[1], job, sending=True)

    def receive(self, group: Group, receiver: Receiver) -> Outcome:
        case, deadline = receiver.case, time.monotonic() + DEADLINE_S
        pairs = [pair for pair in self._buffers if pair[1] == receiver.number]

        def job(pair: tuple[int, int]) -> int:
            buffer = self._buffers[pair]
            raw = buffer.view(np.uint8)
            posted = [
                group.carrier.receive(raw[at : at + self._step], pair[0]) for at in range(0, raw.size, self._step)
            ]
            waiting, there = iter(posted), 0
            for operation, piece in _pieces(case, pair, buffer):
                while there < piece.ctypes.data + piece.nbytes - buffer.ctypes.data:
                    next(waiting).wait(deadline)
                    there = min(there + self._step, raw.size)
                into, at = receiver.landing[receiver.held[operation.tensor].parameter], 0
                for part in operation.parts:
                    for b in part.layout.blocks:
                        target = strided(into, b.dst_offset, b.dst_strides, b.shape)
                        target[...] = piece[at : at + b.numel].reshape(b.shape)
                        at += b.numel
            return len(posted)

        return self._run(group, pairs, lambda p: p[0], job, sending=False)

    def _run(
        self,
        group: Group,
        pairs: Sequence[tuple[int, int]],
        other: Callable[[tuple[int, int]], int],
        job: Callable[[tuple[int, int]], int],
        *,
        sending: bool,
    ) -> Outcome:
        jobs = {other(pair): (lambda pair=pair: job(pair)) for pair in pairs}
        messages = drive(group.carrier, jobs, "the dense exchange")
        out, moved = Outcome(messages=max(messages.values(), default=0)), sum(self._buffers[p].nbytes for p in pairs)
        out.stage("exchange", *((moved, 0) if sending else (0, moved)))
        return out


def _pieces(case: Case, pair: tuple[int, int], buffer: U16) -> Iterator[tuple[Operation, U16]]:
    """Each operation's place in the buffer of a pair."""
    at = 0
    for operation in case.plan.of_pair(*pair):
        yield operation, buffer[at : at + operation.lanes]
        at += operation.lanes


class PatchBroadcast(Method):
    """PULSE's layout: int32 indices through all weights and BF16 values, gathered on one rank and broadcast to
    everybody, who finds out what it holds, and where. Nothing is compressed, as in the exchange it is compared with."""

    def __init__(self, senders: int) -> None:
        self._senders = senders

    def send(self, group: Group, sender: Sender) -> Outcome:
        out = Outcome()
        index = np.concatenate(
            [np.empty(0, np.int32)]
            + [(ranks + (sender.first + sender.at[s])).astype(np.int32) for s, ranks, _ in sender.changes]
        )
        bits = np.concatenate([np.empty(0, np.uint16), *(new for _, _, new in sender.changes)])
        count = np.array([index.size], np.int64)
        if sender.number:
            gathered(group, sender, count, ())
            for array in (index, bits):
                gathered(group, sender, array, ())
            out.stage("gather", sent=count.nbytes + index.nbytes + bits.nbytes)
            return out
        counts = np.zeros(self._senders, np.int64)
        gathered(group, sender, count, [counts[s : s + 1] for s in range(self._senders)])
        counts[0] = index.size
        ends = np.cumsum(counts)
        total = ends[-1:].copy()
        all_index, all_bits = np.empty(total[0], np.int32), np.empty(total[0], np.uint16)
        for whole, mine in ((all_index, index), (all_bits, bits)):
            whole[: mine.size] = mine
            gathered(group, sender, mine, np.split(whole, ends[:-1]))
        out.stage("gather", received=8 * (self._senders - 1) + 6 * int(total[0] - counts[0]))
        for array in (total, all_index, all_bits):
            group.broadcast(array)
        out.stage("broadcast", sent=8 + 6 * int(total[0]))
        return out

    def receive(self, group: Group, receiver: Receiver) -> Outcome:
        out = Outcome(links=[(0, 0)])
        total = np.zeros(1, np.int64)
        group.broadcast(total)
        index, bits = np.empty(total[0], np.int32), np.empty(total[0], np.uint16)
        group.broadcast(index)
        group.broadcast(bits)
        out.stage("broadcast", received=8 + index.nbytes + bits.nbytes)
        starts = [receiver.case.starts[tensor] for tensor in receiver.inverses]
        stops = [at + part.layout.src_numel for at, part in zip(starts, receiver.inverses.values(), strict=True)]
        # Looked up all at once and as int32: otherwise the whole index is converted for every tensor.
        bounds = np.searchsorted(index, np.array([starts, stops], np.int32)).T.tolist()
        for (tensor, inverse), start, (lo, hi) in zip(receiver.inverses.items(), starts, bounds, strict=True):
            positions, local = select_entries(inverse, index[lo:hi].astype(np.int64) - start)
            receiver.lanes.append((tensor, local.astype(np.uint32), bits[lo:hi][positions]))
        out.marks["remap"] = time.monotonic()
        return out


class TwoRounds(Method):
    """What the product does: the receiver's own lanes, from each sender to each receiver."""

    def __init__(self, case: Case, pinned: PinnedVersion | None, bucket_bytes: int) -> None:
        self._plan, self._pinned, self._bucket_bytes = case.plan, pinned, bucket_bytes

    def send(self, group: Group, sender: Sender) -> Outcome:
        assert self._pinned is not None
        reports = send_version(
            group.carrier, self._plan, sender.number, HEAD, self._pinned,
            bucket_bytes=self._bucket_bytes, deadline_s=DEADLINE_S,
        )  # fmt: skip
        out = Outcome(messages=max((r.messages for r in reports), default=0))
        out.stage("exchange", sent=sum(r.bytes for r in reports))
        return out

    def receive(self, group: Group, receiver: Receiver) -> Outcome:
        found = receive_version(
            group.carrier, self._plan, receiver.number, HEAD,
            bucket_bytes=self._bucket_bytes, deadline_s=DEADLINE_S, max_bytes=MAX_BYTES,
        )  # fmt: skip
        out = Outcome()
        out.stage("exchange", received=_received(found, len({d.operation.sender for d in found})))
        receiver.deliveries = found
        receiver.lanes = [(d.operation.tensor, d.local, d.bits) for d in found]
        return out


def _received(found: Sequence[Delivery], pairs: int) -> int:
    """Bytes of both rounds."""
    operations = [d.operation for d in found]
    counts = [Counts(d.local.size, len(d.tiles), d.dense.size) for d in found]
    return pairs * wire.HEADER.size + 24 * len(found) + wire.payload_size(operations, counts)
