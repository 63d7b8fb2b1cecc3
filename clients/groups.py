"""A rank's place in a P2P group, as a daemon tells it to the process that takes it: a worker or a receiver rank."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from clients.protocol import AbsolutePath, Model
from engine.records.models import Count, Sha256

GroupId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]


class GroupPlace(Model):
    """Rank `rank` of `size`, in the plan number `side` of the senders or of the receivers. `address`: HOST:PORT of the
    group's store. `bind_host`: where this node is reached. `roster`: a file with all members' layouts, from which the
    plan follows, and its SHA-256."""

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
