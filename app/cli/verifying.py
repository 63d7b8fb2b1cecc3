"""`dte verify`: walks a whole run in a store and checks everything its decisions claim, without any daemon.

Invariant: a version counts as proven only when its weights were rebuilt from chunks whose hashes are right and every
tensor's digest came out as the decision says.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from app.chain import Chain
from app.chains import only_run
from app.cli.output import human_bytes, print_json
from app.cli.rebuilt import RebuiltWeights
from engine.codec.chunk import ChunkHeader, ChunkItem, decode
from engine.digest import add, from_hex, to_hex
from engine.errors import DteError, InvalidInput
from engine.records import AnchorRecord, ChunkRef, CommitDecision, PartRecord, sha256_hex
from transports.errors import ObjectNotFound
from transports.store.base import ChunkStore
from transports.store.open import open_store


@dataclass
class Report:
    """What was found. `problems` empty means the run is whole."""

    run: str
    commits: int = 0
    other_decisions: int = 0
    proven: list[int] = field(default_factory=list)
    behind_anchor: list[int] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    chunks: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


def run_verify(url: str, run: str | None, token: str | None, *, workdir: Path | None, as_json: bool) -> int:
    """Verify and print; returns the exit code."""
    report = asyncio.run(_verify(url, run, token, workdir, quiet=as_json))
    if as_json:
        print_json({"ok": not report.problems, **asdict(report)})
    else:
        print(
            f"run {report.run}: {report.commits} versions, {report.other_decisions} other decisions, "
            f"{report.chunks} chunks, {human_bytes(report.bytes)}, anchors at {report.anchors or 'none'}"
        )
        for problem in report.problems:
            print(f"PROBLEM {problem}")
        print("everything is as the decisions say" if not report.problems else f"{len(report.problems)} problems")
    return 1 if report.problems else 0


async def _verify(url: str, run: str | None, token: str | None, workdir: Path | None, *, quiet: bool) -> Report:
    async with open_store(url, token) as store:
        name = run or await only_run(store)
        key = os.environ.get("DTE_SIGNING_KEY")
        chain = Chain(name, store, signing_key=key.encode() if key else None)
        report = Report(name)
        try:
            await chain.refresh()
        except DteError as e:
            # What comes after a decision that cannot be read is unreachable for everybody; check what is before it.
            report.problems.append(str(e))
        commits = chain.commits()
        report.commits = len(commits)
        report.other_decisions = chain.next_version - len(commits)
        if not commits and not report.problems:
            raise InvalidInput(
                f"the store has no committed version of run {name!r}.", remedy="Check --run and the store."
            )
        with RebuiltWeights(workdir) as weights:
            walk = _Walk(chain, store, report, weights)
            for commit in commits:
                line = await walk.version(commit.version)
                if not quiet:
                    print(line, flush=True)
            walk.finish(commits)
        return report


class _Walk:
    """Goes through the commits in order, carrying the rebuilt weights along."""

    def __init__(self, chain: Chain, store: ChunkStore, report: Report, weights: RebuiltWeights) -> None:
        self._chain = chain
        self._store = store
        self._report = report
        self._weights = weights

    async def version(self, number: int) -> str:
        """Check one commit; returns a line that says how it went."""
        report, before = self._report, len(self._report.problems)
        commit = await self._chain.full(number)
        parts = await self._parts(commit)
        chunks = await self._read_all(number, [c for p in parts for c in p.chunks])
        size = sum(c.size_bytes for p in parts for c in p.chunks)
        if chunks is None or len(self._report.problems) > before:
            state = "its chunks are deleted" if chunks is None else "damaged"
            self._weights.at = None
        else:
            state = await asyncio.to_thread(self._apply, commit, chunks)
        del chunks
        await self._anchor(commit)
        if self._weights.at == number:
            report.proven.append(number)
        else:
            report.behind_anchor.append(number)
        if len(report.problems) > before:
            state = "PROBLEM"
        return f"version {number}: {sum(len(p.chunks) for p in parts)} chunks, {human_bytes(size)}: {state}"

    def finish(self, commits: Sequence[CommitDecision]) -> None:
        """Versions that could not be rebuilt are fine only behind a version that could."""
        if commits and self._weights.at != commits[-1].version:
            self._problem(
                commits[-1].version, "the newest version cannot be rebuilt from what the store holds, anchors included"
            )

    def _problem(self, version: int, text: str) -> None:
        self._report.problems.append(f"version {version}: {text}")

    async def _parts(self, commit: CommitDecision) -> list[PartRecord]:
        parts = []
        for ref in commit.parts:
            try:
                part = await self._chain.part(ref)
            except DteError as e:
                self._problem(commit.version, str(e))
                continue
            claimed = (part.version, part.epoch, part.step, part.base, part.writer)
            if claimed != (commit.version, commit.epoch, commit.step, commit.base, ref.writer):
                self._problem(commit.version, f"the part of writer {ref.writer} is of another version, step or base")
            parts.append(part)
        sums: dict[str, int] = defaultdict(int)
        for part in parts:
            for piece in part.slices:
                sums[piece.tensor] = add(sums[piece.tensor], from_hex(piece.digest))
        wrong = [t.name for t in commit.tensors if to_hex(sums.get(t.name, 0)) != t.digest]
        if wrong and len(parts) == len(commit.parts):
            self._problem(commit.version, f"the parts' digests do not add up to the decision's for {_some(wrong)}")
        return parts

    async def _read_all(
        self, version: int, refs: Sequence[ChunkRef]
    ) -> list[tuple[ChunkRef, ChunkHeader, list[ChunkItem]]] | None:
        """All chunks, decoded; None when one is gone. Damaged ones are problems and are left out."""
        out = []
        gone = 0
        for ref in refs:
            try:
                data = await self._store.get(ref.key, max_bytes=ref.size_bytes)
            except ObjectNotFound:
                gone += 1
                continue
            except DteError as e:
                self._problem(version, f"{ref.key}: {e}")
                continue
            self._report.chunks += 1
            self._report.bytes += len(data)
            try:
                header, items = await asyncio.to_thread(_decode_checked, ref, data)
            except DteError as e:
                self._problem(version, f"{ref.key}: {e}")
                continue
            out.append((ref, header, items))
        return None if gone else out

    def _apply(self, commit: CommitDecision, chunks: list[tuple[ChunkRef, ChunkHeader, list[ChunkItem]]]) -> str:
        weights = self._weights
        whole = commit.base is None or (commit.totals.complete and weights.at != commit.base)
        if whole:
            weights.reset(commit.tensors)
        elif weights.at != commit.base:
            return "hashes are right; there is no base to apply it to"
        weights.at = None
        dense = 0
        for ref, header, items in chunks:
            named = (header.run, header.version, header.epoch, header.base)
            if named != (commit.run, commit.version, commit.epoch, commit.base):
                self._problem(commit.version, f"{ref.key} was written for another version")
            try:
                dense += weights.apply(items, dense_only=whole)
            except DteError as e:
                self._problem(commit.version, f"{ref.key}: {e}")
                return "damaged"
        if (commit.base is None or commit.totals.complete) and dense != weights.total_lanes:
            self._problem(commit.version, f"it must be whole and carries {dense} of {weights.total_lanes} lanes")
        wrong = weights.wrong_digests(commit.tensors)
        if wrong:
            self._problem(commit.version, f"the rebuilt weights do not have the decision's digest for {_some(wrong)}")
            return "wrong"
        weights.at = commit.version
        return "proven"

    async def _anchor(self, commit: CommitDecision) -> None:
        try:
            anchor = await self._chain.anchor(commit.version)
        except DteError as e:
            self._problem(commit.version, f"its anchor: {e}")
            return
        if anchor is None:
            return
        if {t.name: t for t in anchor.tensors} != {t.name: t for t in commit.tensors}:
            self._problem(commit.version, "its anchor is of other weights than the decision")
            return
        chunks = await self._read_all(commit.version, anchor.chunks)
        if chunks is None:
            self._problem(commit.version, "chunks of its anchor are missing")
            return
        await asyncio.to_thread(self._apply_anchor, commit, anchor, [items for _, _, items in chunks])

    def _apply_anchor(self, commit: CommitDecision, anchor: AnchorRecord, chunks: list[list[ChunkItem]]) -> None:
        weights = self._weights
        carried = 0
        if weights.at == commit.version:
            different = 0
            for items in chunks:
                more, lanes = weights.differs(items)
                different, carried = different + more, carried + lanes
            if different:
                self._problem(commit.version, f"{different} lanes of its anchor are not what the chain leads to")
        else:
            weights.reset(commit.tensors)
            for items in chunks:
                carried += weights.apply(items, dense_only=True)
            wrong = weights.wrong_digests(commit.tensors)
            if wrong:
                self._problem(commit.version, f"its anchor does not have the decision's digest for {_some(wrong)}")
                return
            weights.at = commit.version
        if carried != weights.total_lanes:
            self._problem(commit.version, f"its anchor carries {carried} of {weights.total_lanes} lanes")
        self._report.anchors.append(anchor.version)


def _decode_checked(ref: ChunkRef, data: bytes) -> tuple[ChunkHeader, list[ChunkItem]]:
    if len(data) != ref.size_bytes or sha256_hex(data) != ref.sha256:
        raise InvalidInput("its size or SHA-256 is not what the part says.", remedy="The object was damaged.")
    header, items = decode(data, max_raw_bytes=ref.raw_bytes)
    entries = sum(int(i.ranks.size) for i in items)
    if entries != ref.entries:
        raise InvalidInput(f"it has {entries} entries, the part says {ref.entries}.")
    return header, items


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
