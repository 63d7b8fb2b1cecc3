"""What daemons and the coordinator say to each other about groups.

One invariant: every message may be repeated; the coordinator's answers are the present state, never a difference.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from clients.groups import GroupId
from clients.protocol import Model, ReceiverName
from engine.records.models import Count, LaunchId, Sha256, TensorMeta
from transports.p2p.roster import RosterSlice, RosterTensor

MemberId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9:._-]{0,255}$")]
DaemonId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9:._-]{0,255}$")]
Carrier = Literal["gloo", "nccl"]
WHY_CHARS = 1000


class SenderJoin(Model):
    """A trainer rank can send. `device`: UUID of the GPU its worker would send from, "" for none."""

    kind: Literal["sender"] = "sender"
    daemon: DaemonId
    launch: LaunchId
    epoch: Annotated[int, Field(ge=1)]
    rank: Count
    world: Annotated[int, Field(ge=1)]
    tensors: list[TensorMeta]
    slices: list[RosterSlice]
    device: str = ""


class ReceiverJoin(Model):
    """A receiver rank can receive. `life` is new whenever its process or its owner is."""

    kind: Literal["receiver"] = "receiver"
    daemon: DaemonId
    receiver: ReceiverName
    life: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]{1,32}$")]
    rank: Count
    ranks: Annotated[int, Field(ge=1)]
    tensors: list[RosterTensor]
    device: str = ""


Join = Annotated[SenderJoin | ReceiverJoin, Field(discriminator="kind")]


def member_id(join: Join) -> str:
    """What the member is called: one that joins again is called the same."""
    if isinstance(join, SenderJoin):
        return f"trainer:{join.launch}:{join.rank}"
    return f"receiver:{join.receiver}:{join.life}:{join.rank}"


class Joined(Model):
    member: MemberId


class VersionHead(Model):
    """The version that an exchange carries."""

    epoch: Annotated[int, Field(ge=1)]
    version: Count
    base: Count | None
    step: Count


class Offer(Model):
    """A sender has read the version. `bytes`: about what a receiver that holds everything would buffer of it."""

    head: VersionHead
    bytes: Count = 0


class Report(Model):
    """What became of a member's part in a group. `hosting`: its process keeps the group's store at `address`.
    `connected`: with the plan it computed. `done`: its part in the exchange of `version` is complete; a sender says how
    many bytes each receiver got (`pairs`, by the receiver's number). `failed`: it takes no further part in this
    group, because of member `lost` where that is another one."""

    what: Literal["hosting", "connected", "done", "failed"]
    address: Annotated[str, StringConstraints(max_length=512)] = ""
    plan: Sha256 | None = None
    version: Count | None = None
    bytes: Count = 0
    entries: Count = 0
    pairs: dict[int, Count] = Field(default_factory=dict)
    ms: Annotated[float, Field(ge=0)] = 0.0
    why: Annotated[str, StringConstraints(max_length=WHY_CHARS)] = ""
    lost: Count | None = None

    @model_validator(mode="after")
    def _says_enough(self) -> Self:
        if self.what == "connected" and self.plan is None:
            raise ValueError("who has connected says which plan it computed")
        return self


class GroupView(Model):
    """The group as it is now; `bucket_bytes` is the largest message of its exchanges. Member i of `members` has rank i
    in it; the first `senders` of them are trainer ranks. `go`: the version whose exchange has begun last in it, which
    goes on while `exchanging`."""

    id: GroupId
    state: Literal["forming", "open"]
    carrier: Carrier
    bucket_bytes: Annotated[int, Field(ge=1)]
    epoch: int
    members: list[MemberId]
    senders: int
    address: str = ""
    plan: Sha256 | None = None
    go: VersionHead | None = None
    exchanging: bool = False

    def rank_of(self, member: str) -> int | None:
        """The member's rank in the group."""
        return self.members.index(member) if member in self.members else None


class View(Model):
    """`GET /p2p/{run}`. `seq` grows whenever anything else changes, within one life (`instance`) of the coordinator.
    `members`: all that have joined. `last`: the newest version whose exchange has begun in any group, or is skipped.
    `trouble`: why the last group ended, "" if nothing failed. `exchange`: what members reported of the newest one."""

    instance: str
    seq: int
    run: str
    members: list[MemberId]
    group: GroupView | None = None
    last: int | None = None
    trouble: str = ""
    exchange: dict[str, Report] = Field(default_factory=dict)

    @property
    def tag(self) -> str:
        """What a long poll for another view names this one by."""
        return f"{self.instance}-{self.seq}"
