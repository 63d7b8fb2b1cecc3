"""One sender or receiver process of `dte bench p2p`: JSON commands on standard input, one answer a line.

Invariant: a receiver's result is compared with what it must be after every transfer, and spoilt before every one, so
that no method lives on what another left behind. Ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, cast

import numpy as np

from app.bench.p2p_case import Case, Held, Shapes, equal, make_case
from app.bench.p2p_members import MODEL
from app.bench.p2p_methods import (
    DenseBroadcast,
    DenseDirect,
    Group,
    Method,
    PatchBroadcast,
    Receiver,
    Sender,
    TwoRounds,
)
from app.worker.sending import PinnedVersion
from engine.apply import Applier, LiveCopy, LiveSet, LiveTensor, Target
from engine.apply.lanes import LaneView
from engine.detect.base import I64, U16, tile_count
from engine.errors import DteError, ProofError
from engine.ledger import InFlight, Ledger, SliceLedger
from engine.pending import Level, empty
from engine.records.models import TensorDigest
from transports.p2p.process_group import connect, host_store
from transports.p2p.rounds import agree

HOST = "127.0.0.1"
CONNECT_TIMEOUT_S = 120.0


class Member:
    """`number`: in the group, senders first. `cases`: the model's, and the same parameters as so many equal pieces."""

    def __init__(self, folder: Path, number: int, senders: int, receivers: int) -> None:
        given = json.loads((folder / "case.json").read_text())
        self._shapes: Shapes = [(name, tuple(shape)) for name, shape in given["tensors"]]
        self._digests: dict[str, list[str]] = given["digests"]
        self._message_bytes = int(given["message_bytes"])
        self.number, self.senders, self.receivers = number, senders, receivers
        self._store: Any = None
        self._group: Group | None = None
        self._old: U16 = np.memmap(folder / "old", np.uint16, "r")
        self._new: U16 = np.memmap(folder / "new", np.uint16, "r")
        self._sides: dict[str, Side] = {}
        for pieces in (MODEL, *map(str, given["pieces"])):
            shapes = self._shapes if pieces == MODEL else equal(self._old.size, int(pieces))
            case = make_case(shapes, senders, receivers)
            make = SendingSide if number < senders else ReceivingSide
            self._sides[pieces] = make(case, number, self._old, self._new)
        self._methods: dict[str, Method] = {}

    def host(self) -> dict[str, Any]:
        """Keep the group's store."""
        self._store, port = host_store(HOST)
        return {"port": port}

    def connect(self, port: int) -> dict[str, Any]:
        """Join, and agree on all plans."""
        address, size = (HOST, port), self.senders + self.receivers
        carrier = connect(address, "bench", self.number, size, bind_host=HOST, timeout_s=CONNECT_TIMEOUT_S)
        self._group = Group(carrier, self.senders, address, CONNECT_TIMEOUT_S)
        for side in self._sides.values():
            agree(carrier, side.case.plan, CONNECT_TIMEOUT_S)
        case = self._sides[MODEL].case
        self._methods = {
            "dense-broadcast": DenseBroadcast(case, self.number),
            "dense-direct": DenseDirect(case, self.number, self._message_bytes),
            "patch-broadcast": PatchBroadcast(self.senders),
        }
        return {"operations": {name: len(side.case.plan.operations) for name, side in self._sides.items()}}

    def transfer(self, method: str, bucket_bytes: int, pieces: str) -> dict[str, Any]:
        """One transfer, timed."""
        side, group = self._sides[pieces], self._group
        assert group is not None
        way = self._methods.get(method) or TwoRounds(side.case, side.pinned, bucket_bytes)
        started = time.monotonic()
        out = side.run(way, group)
        ended = time.monotonic()
        return {
            "started": started, "ended": ended, "marks": out.marks, "links": out.links, "messages": out.messages,
        }  # fmt: skip

    def check(self, method: str, pieces: str) -> dict[str, Any]:
        """ProofError unless what arrived is right to the bit; then it is spoilt."""
        self._sides[pieces].check(dense=method.startswith("dense"))
        return {}

    def prepare(self) -> dict[str, Any]:
        """Phase one with what arrived last."""
        side = self._sides[MODEL]
        if not isinstance(side, ReceivingSide):
            return {}
        target = Target(
            run="bench",
            version=1,
            step=1,
            base=0,
            tensors=tuple(
                TensorDigest(name=m.name, shape=m.shape, dtype=m.dtype, digest=self._digests[m.name][1])
                for m in side.case.metas
            ),
            base_digests={name: before for name, (before, _) in self._digests.items()},
            chunks=(),
            received=tuple(side.receiver.deliveries),
        )
        applier = side.applier()
        started = time.monotonic()
        verdict = applier.prepare(target)
        return {"started": started, "ended": time.monotonic(), "live": verdict.live, "after": verdict.after}

    def commit(self) -> dict[str, Any]:
        """Phase two."""
        side = self._sides[MODEL]
        if not isinstance(side, ReceivingSide):
            return {}
        started = time.monotonic()
        side.applier().commit(1)
        side.applier().finalize(1)
        return {"started": started, "ended": time.monotonic()}

    def reset(self) -> dict[str, Any]:
        """ProofError unless the live weights are the new version; then they are the old one again."""
        side = self._sides[MODEL]
        if isinstance(side, ReceivingSide):
            side.reset()
        return {}


class Side(ABC):
    """One case from one member's place."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.pinned: PinnedVersion | None = None

    @abstractmethod
    def run(self, way: Method, group: Group) -> Any:
        """This member's part in one transfer."""

    @abstractmethod
    def check(self, *, dense: bool) -> None:
        """ProofError unless what has arrived here is right."""


class SendingSide(Side):
    def __init__(self, case: Case, number: int, old: U16, new: U16) -> None:
        super().__init__(case)
        lo, hi = case.bounds[number], case.bounds[number + 1]
        before, shard = np.array(old[lo:hi]), np.array(new[lo:hi])
        levels: dict[int, tuple[int, Level]] = {}
        for s in case.senders[number]:
            at = max(case.starts[s.tensor], lo) - lo
            a, b = before[at : at + s.layout.src_numel], shard[at : at + s.layout.src_numel]
            ranks: I64 = np.flatnonzero(a != b)
            levels[s.slice] = (a.size, Level(ranks, a[ranks], b[ranks], np.zeros(tile_count(a.size), np.bool_)))
        self._sender = Sender(case, number, shard, [(n, level.ranks, level.cur) for n, (_, level) in levels.items()])
        self.pinned = _pinned(number, levels)

    def check(self, *, dense: bool) -> None:
        """Nothing arrives at a sender."""

    def run(self, way: Method, group: Group) -> Any:
        return way.send(group, self._sender)


def _pinned(number: int, levels: dict[int, tuple[int, Level]]) -> PinnedVersion:
    slices = tuple(
        SliceLedger(n, lanes, 1, None, None, None, None, empty(tile_count(lanes)), level)
        for n, (lanes, level) in levels.items()
    )
    ledger = Ledger("bench", "one", number, 1, 1, 0, InFlight(version=1, step=1, base=0), slices)
    # No tile is dense, so that there are neither shapes nor a file of lanes to look into.
    return PinnedVersion(ledger, (), Path())


class ReceivingSide(Side):
    def __init__(self, case: Case, number: int, old: U16, new: U16) -> None:
        super().__init__(case)
        self._number = number - len(case.senders)
        self._expected = case.expected(self._number, old, new)
        self._right = case.cut(self._number, new)
        self._live = case.cut(self._number, old)
        self._old = old
        self.receiver = Receiver(case, self._number, {name: np.invert(a) for name, a in self._right.items()})
        self._applier: Applier | None = None

    def run(self, way: Method, group: Group) -> Any:
        return way.receive(group, self.receiver)

    def check(self, *, dense: bool) -> None:
        if dense:
            for name, right in self._right.items():
                if not np.array_equal(self.receiver.landing[name], right):
                    raise ProofError(f"{name} did not arrive as it was sent.")
                np.invert(right, out=self.receiver.landing[name])
        else:
            compare(self._expected, self.receiver.lanes)
        self.receiver.lanes = []

    def applier(self) -> Applier:
        """Over live memory that holds the old version."""
        if self._applier is None:
            tensors = {m.name: m for m in self.case.metas}
            views = {name: LaneView(raw) for name, raw in self._live.items()}

            def live(held: Held) -> LiveTensor:
                copy = LiveCopy(views[held.parameter], held.layout)
                return LiveTensor((held.tensor,), tensors[held.tensor].shape, "bfloat16", (copy,))

            held = self.case.receivers[self._number]
            self._applier = Applier(LiveSet([live(h) for h in held], partial=len(self.case.receivers) > 1))
        return self._applier

    def reset(self) -> None:
        for name, live in self._live.items():
            if not np.array_equal(live, self._right[name]):
                raise ProofError(f"{name} does not hold the new version.")
        for held in self.case.receivers[self._number]:
            self.case.place(held, self._old, self._live[held.parameter])
        self.receiver.deliveries = []
        self._applier = None


def compare(expected: dict[str, tuple[I64, U16]], lanes: list[tuple[str, Any, U16]]) -> None:
    """ProofError unless `lanes` are exactly the expected ones, each once, with their bits."""
    found: dict[str, list[tuple[Any, U16]]] = {name: [] for name in expected}
    for tensor, local, bits in lanes:
        if tensor not in found:
            raise ProofError(f"{tensor} arrived, which is not held here.")
        found[tensor].append((local, bits))
    for tensor, (right, right_bits) in expected.items():
        local = np.concatenate([np.empty(0, np.int64), *(a.astype(np.int64) for a, _ in found[tensor])])
        bits = np.concatenate([np.empty(0, np.uint16), *(b for _, b in found[tensor])])
        order = np.argsort(local, kind="stable")
        if not (np.array_equal(local[order], right) and np.array_equal(bits[order], right_bits)):
            raise ProofError(f"what changed in {tensor} did not arrive as it was sent.")


def main() -> None:
    """Serve commands until standard input ends."""
    import torch

    torch.set_num_threads(1)
    member: Member | None = None
    for line in sys.stdin:
        command = json.loads(line)
        verb = command.pop("do")
        try:
            if verb == "begin":
                member = Member(Path(command["folder"]), command["number"], command["senders"], command["receivers"])
                answer: dict[str, Any] = {}
            else:
                answer = cast(dict[str, Any], getattr(member, verb)(**command))
        except DteError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
