"""`GET /versions`, `/versions/{v}`, `/versions/latest`: the chain of a run, for people and control planes.

Invariant: what is answered was read from the store's immutable decisions; an answer never names a version that no
commit decision stands for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from app.aio import gather_bounded
from app.chain import Chain
from app.decision_events import DIVERGED
from app.problems import HttpProblem
from app.roles.base import Node
from clients.protocol import VersionInfo, Versions
from engine.errors import CodecError
from engine.records import CommitDecision
from transports.errors import StoreError

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
POLL_END_S = 1.0
"""How often a long poll looks whether the daemon is shutting down."""
ANCHOR_AGE_S = 5.0
PARTS_READ = 256
"""Parts that one list of versions may read from the store."""
TOLD_CACHE = 1000
RunQuery = Annotated[str | None, Query(description="The run; the daemon's default if left out.")]
VersionPath = Annotated[int, Path(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, slots=True)
class Told:
    """What the parts of a version tell beyond its decision: stage timings (the slowest writer's), counters (summed)."""

    timings_ms: dict[str, float] = field(default_factory=dict)
    detail: dict[str, int] = field(default_factory=dict)


class PartsTold:
    """What parts tell, of the versions somebody asked for. Bounded: parts are immutable, so it is a cache."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], Told] = OrderedDict()

    async def of(self, chain: Chain, decision: CommitDecision) -> Told:
        """What the parts of `decision` tell. StoreError or CodecError if one cannot be read."""
        at = (chain.run, decision.version)
        told = self._known.get(at)
        if told is None:
            told = Told()
            for part in await gather_bounded(chain.part, decision.parts):
                for stage, took_ms in part.timings_ms.items():
                    told.timings_ms[stage] = max(took_ms, told.timings_ms.get(stage, 0.0))
                for name, count in part.detail.items():
                    told.detail[name] = told.detail.get(name, 0) + count
            self._known[at] = told
            while len(self._known) > TOLD_CACHE:
                self._known.popitem(last=False)
        return told

    async def newest(self, chain: Chain, decisions: Sequence[CommitDecision]) -> dict[int, Told]:
        """The same of several, the newest first, until PARTS_READ parts had to be read. What cannot be read is left
        out: a list of versions must not fail for one damaged part."""
        found: dict[int, Told] = {}
        left = PARTS_READ
        for decision in reversed(decisions):
            if (chain.run, decision.version) not in self._known:
                left -= len(decision.parts)
                if left < 0:
                    break
            try:
                found[decision.version] = await self.of(chain, decision)
            except (StoreError, CodecError) as error:
                log.info("run %s: no timings of version %d: %s", chain.run, decision.version, error)
        return found


def version_info(decision: CommitDecision, sha256: str, *, anchor: bool, told: Told | None = None) -> VersionInfo:
    """What the API says about a commit."""
    totals = decision.totals
    told = told or Told()
    return VersionInfo(
        run=decision.run,
        version=decision.version,
        epoch=decision.epoch,
        step=decision.step,
        base=decision.base,
        rewound=decision.rewound,
        anchor=anchor,
        elements=totals.elements,
        changed=totals.changed,
        changed_fraction=totals.changed_fraction,
        dense_tiles=totals.dense_tiles,
        bytes=totals.bytes,
        bits_per_entry=8 * totals.bytes / totals.changed if totals.changed and not totals.dense_tiles else None,
        created_ms=decision.created_ms,
        timings_ms=told.timings_ms,
        detail={**told.detail, **({"diverged_replicas": len(decision.diverged)} if decision.diverged else {})},
        writers=len(decision.parts),
        decision_sha256=sha256,
    )


def router(node: Node) -> APIRouter:
    """The routes under `/versions`; any daemon serves them, whatever its roles."""
    api = APIRouter(tags=["versions"])
    parts = PartsTold()

    async def describe(chain: Chain, decision: CommitDecision) -> VersionInfo:
        anchors = await chain.anchor_versions(max_age_s=ANCHOR_AGE_S)
        sha256 = chain.decision_sha256(decision.version)
        told = await parts.of(chain, decision)
        return version_info(decision, sha256, anchor=decision.version in anchors, told=told)

    def degraded(chain: Chain) -> dict[str, int]:
        diverged = 0 if chain.head is None else len(chain.head.diverged)
        return node.degraded.snapshot() | ({DIVERGED: diverged} if diverged else {})

    @api.get("/versions")
    async def versions(
        run: RunQuery = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="At most so many, the newest.")] = 100,
    ) -> Versions:
        """The run's committed versions, newest last. `timings_ms` and `detail` are those of `/versions/{version}`; for
        older versions of a run with many writers they may be left empty here."""
        chain = node.chains.get(node.chains.resolve(run))
        await chain.refresh()
        anchors = await chain.anchor_versions(max_age_s=ANCHOR_AGE_S)
        listed = chain.commits()[-limit:]
        told = await parts.newest(chain, listed)
        return Versions(
            run=chain.run,
            head=None if chain.head is None else chain.head.version,
            next=chain.next_version,
            epoch=chain.epoch,
            versions=[
                version_info(d, chain.decision_sha256(d.version), anchor=d.version in anchors, told=told.get(d.version))
                for d in listed
            ],
            degraded=degraded(chain),
        )

    @api.get("/versions/latest", response_model=VersionInfo, responses={204: {"description": "None is newer (yet)."}})
    async def latest(
        run: RunQuery = None,
        after: Annotated[int | None, Query(ge=0, description="Only a version newer than this one.")] = None,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for one.")] = 0.0,
    ) -> VersionInfo | Response:
        """The newest version, waiting up to `wait` seconds for one newer than `after`; 204 if there is none."""
        chain = node.chains.get(node.chains.resolve(run))
        await chain.refresh()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait
        while chain.head is None or (after is not None and chain.head.version <= after):
            left_s = deadline_s - loop.time()
            if left_s <= 0 or node.events.closed:
                return Response(status_code=204)
            await chain.wait(chain.next_version, min(left_s, POLL_END_S))
        return await describe(chain, chain.head)

    @api.get("/versions/{version}")
    async def version(version: VersionPath, run: RunQuery = None) -> VersionInfo:
        """One committed version with its stage timings."""
        chain = node.chains.get(node.chains.resolve(run))
        if chain.standing(version) is None:
            await chain.refresh()
        decision = chain.standing(version)
        if not isinstance(decision, CommitDecision):
            raise HttpProblem(404, "no-such-version", _why_not(chain, version), remedy="GET /versions lists them.")
        return await describe(chain, decision)

    return api


def _why_not(chain: Chain, version: int) -> str:
    decision = chain.standing(version)
    if decision is None:
        return f"number {version} of run {chain.run!r} is not decided; the next number is {chain.next_version}."
    reason = f" ({decision.reason})" if decision.kind == "abort" else ""
    return f"number {version} of run {chain.run!r} is no version: it was spent on an {decision.kind}{reason}."
