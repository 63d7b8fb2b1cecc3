"""Deletes chunks nobody needs to catch up any more. Off unless asked for.

One invariant: a chunk goes only when `keep_anchors` anchors of effective commits stand at or after its version and the
version has been superseded for N hours, so a receiver always finds an anchor and every delta behind the newest two.
Decisions, epochs, launches and parts are never deleted: the chain stays readable from number 0.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

from app.aio import gather_bounded
from app.chain import Chain
from engine.errors import StateConflict
from engine.records import keys

MIN_ANCHORS = 2
MAX_VERSIONS_A_PASS = 256


@dataclass(frozen=True)
class RetentionPlan:
    """What would be deleted: first the manifests of old anchors, then chunks; `size_bytes` is what that frees."""

    manifests: tuple[str, ...]
    chunks: tuple[str, ...]
    size_bytes: int
    versions: tuple[int, ...] = ()


class Retention:
    """Retention of one run. `plan` only reads; `apply` deletes what a plan names."""

    def __init__(self, chain: Chain, *, keep_anchors: int, hours: float) -> None:
        if keep_anchors < MIN_ANCHORS:
            raise StateConflict(f"at least {MIN_ANCHORS} anchors must be kept, not {keep_anchors}.")
        self._chain = chain
        self._keep_anchors = keep_anchors
        self._hours = hours
        self._done: set[int] = set()

    async def plan(self, *, now_ms: int | None = None) -> RetentionPlan:
        """A dry run: what `apply` would delete, at most MAX_VERSIONS_A_PASS versions at a time, oldest first."""
        chain = self._chain
        await chain.refresh()
        anchored = await chain.anchor_versions()
        if len(anchored) < self._keep_anchors:
            return RetentionPlan((), (), 0)
        keep_from = anchored[-self._keep_anchors]
        limit_ms = (time.time_ns() // 1_000_000 if now_ms is None else now_ms) - round(self._hours * 3_600_000)
        manifests: list[str] = []
        chunks: dict[str, int] = {}
        commits = chain.commits()
        # The deltas up to and including the oldest kept anchor are contained in it.
        behind = [
            old
            for old, newer in pairwise(commits)
            if old.version <= keep_from and newer.created_ms <= limit_ms and old.version not in self._done
        ][:MAX_VERSIONS_A_PASS]
        for commit in behind:
            for ref in commit.parts:
                chunks.update((c.key, c.size_bytes) for c in (await chain.part(ref)).chunks)
            if commit.version < keep_from and commit.version in anchored:
                anchor = await chain.anchor(commit.version)
                if anchor is not None:
                    manifests.append(keys.anchor_manifest(chain.run, commit.version))
                    chunks.update((c.key, c.size_bytes) for c in anchor.chunks)
        prefix = keys.run_prefix(chain.run)
        own = {key: size for key, size in chunks.items() if key.startswith(prefix)}
        return RetentionPlan(tuple(manifests), tuple(own), sum(own.values()), tuple(c.version for c in behind))

    async def apply(self, plan: RetentionPlan) -> int:
        """Delete what the plan names; returns how many objects there were. A manifest goes before its chunks, so
        that no anchor is ever shown whose data is gone."""
        store = self._chain.store
        removed = 0
        for keys_ in (plan.manifests, plan.chunks):
            removed += sum(await gather_bounded(store.delete, keys_))
        if plan.manifests:
            self._chain.forget_anchors()
        self._done.update(plan.versions)
        return removed
