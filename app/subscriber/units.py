"""The canonical tensors of converter units, rebuilt from the chain into files that an engine's ranks map.

One invariant: a file holds exactly one version's bits of each of its tensors, proven against the version's decision,
and exists only while the ranks are told of it; at most one tensor and a bounded cache of chunks are in memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from app.rebuilding import Rebuilder, Source
from app.subscriber.targets import NoSource, Step, Targets
from clients.rollout.sglang.call import StageUnit, UnitTensor
from engine.commit.launch import tensor_lanes
from engine.errors import CodecError, DteError, ProofError
from engine.records.models import CommitDecision, TensorDigest
from transports.errors import StoreError

log = logging.getLogger(__name__)

ALIGN = 64


class NoRoom(DteError):
    """The converted tensors do not fit on this node's disk. Nothing that the trainer could send would change that."""

    code = "no-room"


class UnitFiles:
    """Files below `folder`, a private directory of one receiver. `max_bytes`: what one version may take on the disk,
    where the files stay, nameless, until the ranks have let go of them."""

    def __init__(self, targets: Targets, folder: Path, *, max_bytes: int) -> None:
        self._targets = targets
        self._folder = folder
        self._max_bytes = max_bytes

    async def written(self, version: int, units: Sequence[Sequence[str]]) -> AsyncGenerator[StageUnit]:
        """Every unit in a file of its own, which is gone when the next one is asked for.

        A start that is missing or damaged is passed over for an older one; NoSource if none is left. NoRoom if
        it would take more than `max_bytes`, or the disk is full.
        """
        if not units:
            return
        commit = await self._targets.chain.full(version)
        metas = {t.name: t for t in commit.tensors}
        need = sum(_place([metas[name] for name in unit])[1] for unit in units)
        if need > self._max_bytes:
            raise NoRoom(
                f"the tensors that the engine converts take {need} bytes on the disk, {self._max_bytes} are allowed.",
                remedy="Raise cache_bytes, or serve the policy in the dtype in which it is trained.",
            )
        left = [list(unit) for unit in units]
        reasons: list[DteError] = []
        async for plan in self._targets.resync_plans(commit, failures=reasons):
            try:
                async with self._targets.local(plan):
                    rebuilt = await asyncio.to_thread(self._rebuilder, commit, plan)
                    place = {name: n for n, name in enumerate(rebuilt.order)}
                    left.sort(key=lambda unit: min(place[name] for name in unit), reverse=True)
                    while left:
                        path = self._folder / f"{version}-{len(left)}"
                        try:
                            body = await asyncio.to_thread(_write, rebuilt, left[-1], path)
                            yield body
                        finally:
                            path.unlink(missing_ok=True)
                        left.pop()
                    return
            except (StoreError, CodecError, ProofError) as error:
                log.warning("version %d cannot be rebuilt from version %d: %s", version, plan[0].version, error)
                reasons.append(error)
                if not isinstance(error, StoreError):
                    # A local file that went bad is downloaded again at the next try.
                    await self._targets.cache.discard([ref for step in plan for ref in step.chunks])
        raise NoSource(
            f"nothing intact leads to the converted tensors of version {version}: "
            + "; ".join(reason.message for reason in reasons)
        )

    def _rebuilder(self, commit: CommitDecision, plan: Sequence[Step]) -> Rebuilder:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        run = self._targets.chain.run
        return Rebuilder(
            commit,
            [
                Source((run, step.version, None, None), ref, self._targets.cache.path(ref))
                for step in plan
                for ref in step.chunks
            ],
        )


def _place(tensors: Sequence[TensorDigest]) -> tuple[list[int], int]:
    """(offset of each tensor in a file, bytes of the file)."""
    offsets, end = [], 0
    for t in tensors:
        end = -(-end // ALIGN) * ALIGN
        offsets.append(end)
        end += 2 * tensor_lanes(t)
    return offsets, max(end, 1)


def _write(rebuilt: Rebuilder, names: Sequence[str], path: Path) -> StageUnit:
    """The unit's tensors in a new file; ProofError if one does not come out as the decision says."""
    tensors = [rebuilt.meta(name) for name in names]
    offsets, size = _place(tensors)
    try:
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            path.chmod(0o600)
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows here, not in a rank that reads a hole
            for t, offset in zip(tensors, offsets, strict=True):
                file.seek(offset)
                file.write(rebuilt.tensor(t.name).data)
    except OSError as error:
        raise NoRoom(f"{path} cannot be written: {error.strerror}.", remedy="Make room in data_dir.") from None
    placed = [
        UnitTensor(name=t.name, shape=t.shape, dtype=t.dtype, digest=t.digest, offset=offset)
        for t, offset in zip(tensors, offsets, strict=True)
    ]
    return StageUnit(version=rebuilt.decision.version, path=str(path.absolute()), tensors=placed)
