"""`GET /versions`, `/versions/{v}`, `/versions/latest`: the chain of a run, for people and control planes.

Invariant: what is answered was read from the store's immutable decisions; an answer never names a version that no
commit decision stands for.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from app.chain import Chain
from app.problems import HttpProblem
from app.roles.base import Node
from clients.protocol import VersionInfo, Versions
from engine.records import CommitDecision, PartRecord

MAX_WAIT_S = 60.0
POLL_END_S = 1.0
"""How often a long poll looks whether the daemon is shutting down."""
ANCHOR_AGE_S = 5.0
RunQuery = Annotated[str | None, Query(description="The run; the daemon's default if left out.")]
VersionPath = Annotated[int, Path(ge=0, le=2**63 - 1)]


def version_info(
    decision: CommitDecision, sha256: str, *, anchor: bool, parts: list[PartRecord] | None = None
) -> VersionInfo:
    """What the API says about a commit. With its parts: timings (the slowest writer's) and counters (summed)."""
    totals = decision.totals
    timings_ms: dict[str, float] = {}
    detail: dict[str, int] = {}
    for part in parts or ():
        for stage, took_ms in part.timings_ms.items():
            timings_ms[stage] = max(took_ms, timings_ms.get(stage, 0.0))
        for name, count in part.detail.items():
            detail[name] = detail.get(name, 0) + count
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
        changed_fraction=totals.changed / totals.elements if totals.elements else 0.0,
        dense_tiles=totals.dense_tiles,
        bytes=totals.bytes,
        bits_per_entry=8 * totals.bytes / totals.changed if totals.changed and not totals.dense_tiles else None,
        created_ms=decision.created_ms,
        timings_ms=timings_ms,
        detail=detail,
        writers=len(decision.parts),
        decision_sha256=sha256,
    )


async def describe(chain: Chain, decision: CommitDecision) -> VersionInfo:
    """A commit with all that its parts tell."""
    parts = [await chain.part(ref) for ref in decision.parts]
    anchors = await chain.anchor_versions(max_age_s=ANCHOR_AGE_S)
    sha256 = chain.decision_sha256(decision.version)
    return version_info(decision, sha256, anchor=decision.version in anchors, parts=parts)


def router(node: Node) -> APIRouter:
    """The routes under `/versions`; any daemon serves them, whatever its roles."""
    api = APIRouter(tags=["versions"])

    @api.get("/versions")
    async def versions(
        run: RunQuery = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="At most so many, the newest.")] = 100,
    ) -> Versions:
        """The run's committed versions, newest last. Stage timings are given by `/versions/{version}`."""
        chain = node.chains.get(node.chains.resolve(run))
        await chain.refresh()
        anchors = await chain.anchor_versions(max_age_s=ANCHOR_AGE_S)
        return Versions(
            run=chain.run,
            head=None if chain.head is None else chain.head.version,
            next=chain.next_version,
            epoch=chain.epoch,
            versions=[
                version_info(d, chain.decision_sha256(d.version), anchor=d.version in anchors)
                for d in chain.commits()[-limit:]
            ],
            degraded=node.degraded.snapshot(),
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
