"""Plans and versions made from a seed, so that every process of a test knows what must arrive."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.layout.blocks import TILE_LANES, Block, Layout
from engine.plan.operations import I64, U16, Counts, Delivery, Index, Operation, Part
from engine.plan.planning import Plan
from transports.p2p.base import Carrier
from transports.p2p.rounds import VersionHead

WIDE = 1 << 33
"""A tensor of more lanes than 32 bits can number."""


def make_plan(seed: int, senders: int, receivers: int, operations: int, pairs: float = 0.8) -> Plan:
    """So many operations between some of the pairs; slices cross tile borders, some tensors are wide."""
    rng = random.Random(f"plan {seed}")
    used = [(s, r) for s in range(senders) for r in range(receivers) if rng.random() < pairs] or [(0, 0)]
    numbers = sorted((rng.choice(used), n) for n in range(operations))
    made = [_operation(rng, s, r, f"t{n:06}") for (s, r), n in numbers]
    digest = hashlib.sha256(repr((seed, senders, receivers, made)).encode()).hexdigest()
    return Plan(senders, receivers, tuple(made), digest)


def _operation(rng: random.Random, sender: int, receiver: int, tensor: str) -> Operation:
    parts, at = [], rng.choice([0, 0, 7])
    wide = rng.random() < 0.2
    for number in range(rng.choice([1, 1, 2, 3])):
        length = rng.choice([1, 3, 50, 400, 3000])
        start = rng.choice([0, max(0, TILE_LANES - length // 2), 3 * TILE_LANES - 1])
        block = Block((length,), start, (1,), at + (WIDE if wide else 0), (1,))
        parts.append(Part(number, Layout((block,), start + length + rng.choice([0, 10]), at + length + 2 * WIDE)))
        at += length
    lanes = sum(p.layout.blocks[0].numel for p in parts)
    return Operation(sender, receiver, tensor, lanes, at + (2 * WIDE if wide else 5), tuple(parts))


@dataclass
class Change:
    local: Index
    bits: U16
    tiles: I64
    dense: list[U16]

    @property
    def counts(self) -> Counts:
        return Counts(self.local.size, len(self.tiles), sum(d.size for d in self.dense))


@dataclass
class Version:
    """What changes in every operation of a plan. An `Outgoing`, and what `matches` compares deliveries with."""

    head: VersionHead
    changes: dict[Operation, Change]
    before: Callable[[str, Operation], None] = field(default=lambda verb, operation: None)
    """Called with the name of the method, before it answers."""

    def counts(self, operation: Operation) -> Counts:
        self.before("counts", operation)
        return self.changes[operation].counts

    def entries(self, operation: Operation) -> tuple[Index, U16]:
        self.before("entries", operation)
        return self.changes[operation].local, self.changes[operation].bits

    def tiles(self, operation: Operation) -> I64:
        self.before("tiles", operation)
        return self.changes[operation].tiles

    def dense(self, operation: Operation) -> Iterator[U16]:
        self.before("dense", operation)
        yield from self.changes[operation].dense

    def matches(self, deliveries: Sequence[Delivery], plan: Plan, receiver: int) -> bool:
        """Whether these are all of the receiver's operations in plan order, and exactly this version."""
        if [d.operation for d in deliveries] != [o for o in plan.operations if o.receiver == receiver]:
            return False
        for d in deliveries:
            c = self.changes[d.operation]
            dense = np.concatenate([np.empty(0, np.uint16), *c.dense])
            for got, wanted in ((d.local, c.local), (d.bits, c.bits), (d.tiles, c.tiles), (d.dense, dense)):
                if got.dtype != wanted.dtype or got.shape != wanted.shape or not np.array_equal(got, wanted):
                    return False
        return True


def make_version(seed: int, plan: Plan, number: int, changed: float | None = None) -> Version:
    """Version `number` of a run. `changed`: share of the operations that carry anything; drawn from the seed if None,
    nothing at all and everything among them."""
    rng = random.Random(f"version {seed} {number}")
    share = rng.choice([0.0, 0.0, 0.02, 0.3, 1.0]) if changed is None else changed
    # Whole pairs that are empty while others are not.
    silent = {pair for pair in plan.pairs if rng.random() < 0.3} if changed is None else set()
    changes = {}
    for o in plan.operations:
        full = rng.random() < share and (o.sender, o.receiver) not in silent
        changes[o] = _change(rng, o) if full else _change(rng, o, nothing=True)
    return Version(VersionHead(1, number, number - 1 if number else None, 10 * number), changes)


def _change(rng: random.Random, operation: Operation, *, nothing: bool = False) -> Change:
    draw = np.random.default_rng(rng.getrandbits(32))
    local: list[int] = []
    tiles: list[tuple[int, int]] = []
    dense: list[U16] = []
    for place, part in enumerate([] if nothing else operation.parts):
        block = part.layout.blocks[0]
        stop = block.src_offset + block.numel
        for tile in range(block.src_offset // TILE_LANES, -(-stop // TILE_LANES)):
            lo, hi = max(block.src_offset, tile * TILE_LANES), min(stop, (tile + 1) * TILE_LANES)
            if rng.random() < 0.2:
                tiles.append((place, tile))
                dense.append(draw.integers(0, 1 << 16, hi - lo, np.uint16))
            else:
                picked = rng.sample(range(lo, hi), rng.choice([0, 1, min(hi - lo, 9), hi - lo]))
                local += [r - block.src_offset + block.dst_offset for r in picked]
    return Change(
        np.array(local, operation.index_dtype),
        draw.integers(0, 1 << 16, len(local), np.uint16),
        np.array(tiles, np.int64).reshape(-1, 2),
        dense,
    )


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Results of all calls, each made in a thread of its own; an exception is its own result."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def closing(carriers: Sequence[Carrier]) -> None:
    for carrier in carriers:
        carrier.close()
