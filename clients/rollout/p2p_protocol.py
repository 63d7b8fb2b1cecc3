"""The operations of a receiver rank in P2P groups, as messages (see `docs/receiver-contract.md`). Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from clients.protocol import Model
from clients.rollout.protocol import AbsolutePath, GroupId, OwnerId
from engine.records.models import Count, Sha256


class Delegate(Model):
    """An operation that does not touch the weights, for whoever owns the receiver, on any of its connections."""

    owner: OwnerId
    fence: Count


class Connect(Delegate):
    """Enter a P2P group as rank `rank` of `size`, receiver `side` of its plan, which follows from the file `roster`."""

    group: GroupId
    address: Annotated[str, StringConstraints(max_length=512)]
    rank: Count
    size: Annotated[int, Field(ge=2)]
    side: Count
    carrier: Literal["gloo", "nccl"]
    bind_host: Annotated[str, StringConstraints(max_length=255)]
    roster: AbsolutePath
    roster_sha256: Sha256
    timeout_s: Annotated[float, Field(gt=0, le=86400)]


class Connected(Model):
    plan: Sha256
    operations: Count


class Receive(Delegate):
    """Take part in the exchange of a version; what arrives is kept in host memory until it is installed or replaced."""

    group: GroupId
    epoch: Annotated[int, Field(ge=1)]
    version: Count
    base: Count | None
    step: Count
    bucket_bytes: Annotated[int, Field(ge=1)]
    max_bytes: Count
    timeout_s: Annotated[float, Field(gt=0, le=86400)]


class Received(Model):
    """`entries`: sparse entries and dense lanes."""

    entries: Count
    bytes: Count
    ms: Annotated[float, Field(ge=0)]


class Leave(Delegate):
    """Leave the P2P group; what is going on in it ends with an error. What was received stays."""
