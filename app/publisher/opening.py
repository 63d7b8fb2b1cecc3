"""From a rank's first read to its open epoch: announce, wait for the other ranks, find out what the first version is.

One invariant: the number of an epoch's first version follows from the decision that opened the epoch, never from how
far this daemon happens to have read, so all ranks mean the same number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from app.chain import Chain
from app.committer import Committer, OpenEpoch
from app.publisher.retry import until_stored
from app.roles.base import Node
from app.worker.protocol import InitialDone
from clients.protocol import RankRegistration
from engine.errors import StateConflict
from engine.records import MAX_RECORD_BYTES, LaunchRecord, ReplicaDecl, SliceDecl, keys, parse_record


@dataclass(frozen=True)
class Base:
    """The newest commit and the digests (hex) of this rank's slices there; None where they are not known."""

    version: int | None
    digests: list[str | None]


@dataclass(frozen=True)
class Opening:
    """An open epoch for one rank. `first` is the number of its first version, if it needs one (else None); `publish`
    says whether it can still be published. `differs` as in OpenEpoch. `moved`: the rank has a history under this launch
    that its spool does not know, so it starts over from the newest commit."""

    epoch: int
    first: int | None
    publish: bool
    base: int | None
    differs: frozenset[str] | None
    moved: bool


def launch_record(r: RankRegistration, slices: list[SliceDecl], replicas: list[ReplicaDecl]) -> LaunchRecord:
    """What a registration says for good."""
    return LaunchRecord(
        run=r.run,
        launch=r.launch,
        rank=r.rank,
        world=r.world,
        step=r.step,
        tensors=r.tensors,
        slices=slices,
        replicas=replicas,
    )


async def open_epoch(
    node: Node,
    chain: Chain,
    committer: Committer,
    registration: RankRegistration,
    initial: InitialDone,
    check_ended: Callable[[], None],
) -> Opening:
    """Announce the rank and wait until the epoch is open. LayoutError, StateConflict: it never will be. `check_ended`
    raises when nobody waits for it any more."""
    r = registration
    record = launch_record(r, initial.slices, initial.replicas)
    standing = await until_stored(node.degraded, "launch record", lambda: committer.announce(record))
    while True:
        opened = await until_stored(node.degraded, "epoch", lambda: committer.try_open(r.launch))
        if opened is not None:
            return _opening(chain, opened, same=standing == record)
        check_ended()
        await asyncio.sleep(node.settings.poll_interval_s)


def _opening(chain: Chain, opened: OpenEpoch, *, same: bool) -> Opening:
    state = chain.state
    if state.epoch != opened.epoch:
        raise StateConflict(
            f"epoch {opened.epoch} of launch {opened.launch!r} is superseded by epoch {state.epoch}.",
            remedy="Start the job again as a new launch.",
        )
    number = 0 if state.start is None else state.start.version + 1
    needed = opened.differs is None or bool(opened.differs)
    return Opening(
        epoch=opened.epoch,
        first=number if needed else None,
        publish=needed and state.next_version == number,
        base=None if opened.base is None else opened.base.version,
        differs=opened.differs,
        moved=not same or not state.first,
    )


async def base_at_head(chain: Chain, registration: RankRegistration, epoch: int) -> Base:
    """What the newest commit says of this rank's slices, for a rank whose ledger is lost."""
    r = registration
    head = chain.head
    if head is not None and head.epoch == epoch:
        ref = next(p for p in head.parts if p.writer == r.rank)
        part = await chain.part(ref)
        known = {s.slice: s.digest for s in part.slices}
        return Base(head.version, [known.get(s.slice) for s in r.slices])
    start = chain.state.start
    if head is None or start is None or start.epoch != epoch:
        return Base(None if head is None else head.version, [None] * len(r.slices))
    data = await chain.store.get(keys.launch(r.run, r.launch, r.rank), max_bytes=MAX_RECORD_BYTES)
    record = await asyncio.to_thread(parse_record, LaunchRecord, data)
    differs = frozenset(start.differs)
    at_launch = {s.slice: s.digest for s in record.slices if s.tensor not in differs}
    return Base(head.version, [at_launch.get(s.slice) for s in r.slices])
