"""A rank that registers again under its launch, after a daemon's spool was lost: its epoch is found without a read.

One invariant: only a rank whose launch record stands in the store, with the very slices it declares now, is let in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.committer import Committer
from app.publisher.opening import launch_record
from app.publisher.retry import until_stored
from app.roles.base import Node
from app.worker.replicas import check_replicas, declarations
from app.worker.source import check_registration, declaration
from clients.protocol import RankRegistration

_NOT_READ = "0" * 16


async def epoch_joined_before(
    node: Node, committer: Committer, registration: RankRegistration, check_ended: Callable[[], None]
) -> int | None:
    """The open epoch of a rank that announced itself in a life that no spool remembers; None if it never did.

    StateConflict if it declares something else now, or if the epoch is over. `check_ended` raises when nobody waits for
    it any more.
    """
    r = registration
    shapes = await asyncio.to_thread(check_registration, r)
    replicas = await asyncio.to_thread(lambda: declarations(check_replicas(r)))
    record = launch_record(r, [declaration(s, _NOT_READ) for s in shapes], replicas)
    if not await until_stored(node.degraded, "launch record", lambda: committer.announced(record)):
        return None
    while True:
        opened = await until_stored(node.degraded, "epoch", lambda: committer.try_open(r.launch))
        if opened is not None:
            return opened.epoch
        check_ended()
        await asyncio.sleep(node.settings.poll_interval_s)
