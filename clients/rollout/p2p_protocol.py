"""The operations of a receiver rank in P2P groups, as messages (see `docs/receiver-contract.md`). Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from clients.groups import GroupId, GroupPlace
from clients.protocol import Model
from clients.rollout.protocol import OwnerId
from engine.records.models import Count, Sha256


class Delegate(Model):
    """An operation that does not touch the weights, for whoever owns the receiver, on any of its connections."""

    owner: OwnerId
    fence: Count


class Connect(Delegate, GroupPlace):
    """Enter a P2P group; the one before is left."""


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
    """Leave the P2P group, if this rank is in it, or is entering it; without `group` whichever it is. What is going on
    in it ends with an error. What was received stays."""

    group: GroupId | None = None
