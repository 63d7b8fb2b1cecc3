"""What a receiver is asked to become: a version, its base's digests, and what carries the difference: local files, or
deliveries that arrived from the trainer's ranks.

One invariant: nothing in a target is trusted before it is checked: files by what they must hash to, deliveries lane by
lane against the live tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.plan.operations import Delivery
from engine.records.models import TensorDigest


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk in a local file, with the bounds and the SHA-256 its part declares."""

    path: Path
    sha256: str
    size_bytes: int
    raw_bytes: int
    entries: int


@dataclass(frozen=True, slots=True)
class Target:
    """One version of a run.

    `tensors`: every canonical tensor with its digest at this version. `base_digests`: the same of the base, hex by
    name; None where there is no base, or in a resync. A delta (`base` not None) needs the base's weights to be live; a
    version or anchor without base must carry every lane dense, and so must the first target of a resync.
    `received`: what arrived in place of `chunks`, which are not read then; None where nothing did. Not for a resync.
    """

    run: str
    version: int
    step: int
    base: int | None
    tensors: tuple[TensorDigest, ...]
    base_digests: dict[str, str] | None
    chunks: tuple[ChunkFile, ...]
    received: tuple[Delivery, ...] | None = None
