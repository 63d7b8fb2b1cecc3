"""What the daemon asks a worker, and what it answers. Both sides parse every message with these models.

A request is `{"id": n, "op": name, …}`; the answer has the same id and is `{"id", "ok": …}` or `{"id", "error": …}`.
Between them an `encode` sends `{"id", "chunk": …}` for every chunk that is complete on disk.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from clients.groups import GroupId, GroupPlace
from clients.protocol import Model, RankRegistration, SliceSpec, SyncRequest
from engine.errors import CodecError, DteError, InvalidInput, LayoutError, StateConflict, UnsupportedOptimizer
from engine.records.models import (
    BlockJson,
    Count,
    ReplicaDecl,
    ReplicaDigest,
    Sha256,
    SliceDecl,
    SliceResult,
    TensorName,
)
from transports.memory.cuda_ipc import DeviceMemoryError
from transports.memory.shm import SharedMemoryError, SharedMemoryInvalid
from transports.p2p.errors import P2PError


class SpoolFull(DteError):
    """The spool's disk has no room. What was read is dropped whole; nothing half-written stays."""

    code = "spool-full"


class SpoolLost(DteError):
    """A version that was promised can no longer be encoded: its spool is gone or damaged."""

    code = "spool-lost"


class BaseMoved(StateConflict):
    """The chain's head is not the version that the ledger starts from."""

    code = "base-moved"


class HoldTimeout(DteError):
    """A read held the trainer for too long and was given up. Nothing of it is remembered: the step counts as unread."""

    code = "hold-timeout"


class WorkerFailed(DteError):
    """An error nobody foresaw in the worker. The request had no effect."""

    code = "worker-failed"


SEE_LOG = "The daemon's log has the details; report it. The next version carries what was missed dense."


class WorkerOptions(Model):
    """Settings a worker needs. `group_tiles`: tiles detected at once, which bounds its extra memory."""

    backend: str = "cpu"
    threads: Annotated[int, Field(ge=1)] = 1
    dense_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    chunk_bytes: Annotated[int, Field(ge=1 << 16)] = 8 << 20
    group_tiles: Annotated[int, Field(ge=1)] = 64


class Open(Model):
    """Map the trainer's memory and load the ledger, if there is one. The first request of every worker."""

    op: Literal["open"] = "open"
    registration: RankRegistration
    spool: str
    options: WorkerOptions


class Opened(Model):
    """`attached`: the trainer's memory is mapped; else `why` not (a dead trainer's spool can still be encoded).
    `unmappable`: because memory of a device cannot be opened by another process here; copies could be read.
    `exact_replay` names the formulas that passed the self-test. The rest mirrors the ledger; `read` is False when there
    is none."""

    attached: bool
    why: str = ""
    unmappable: bool = False
    exact_replay: dict[str, bool] = Field(default_factory=dict)
    read: bool = False
    epoch: int | None = None
    step: int | None = None
    base: int | None = None
    in_flight: int | None = None
    in_flight_step: int | None = None
    ledger_damaged: bool = False


class Initial(Model):
    """Read every slice under the registration's hold and remember its tile digests."""

    op: Literal["initial"] = "initial"
    generation: Count
    hold: Count


class InitialDone(Model):
    revoked: bool = False
    slices: list[SliceDecl] = Field(default_factory=list)
    replicas: list[ReplicaDecl] = Field(default_factory=list)


class Begin(Model):
    """The epoch is open. `differs` None: every tensor goes dense. With `version`, that version is in flight afterwards
    (under the hold its dense lanes are spooled); without, nothing differs. The hold is released at the end."""

    op: Literal["begin"] = "begin"
    epoch: Annotated[int, Field(ge=1)]
    version: int | None
    base: int | None
    differs: list[str] | None
    generation: Count
    hold: Count


class Read(Model):
    """Read one step. `base`: the newest commit, which must be the ledger's. Releases the hold when durable. `dense`:
    every tile of the version goes dense, changed or not. `left_s`: after so many seconds the read is given up."""

    op: Literal["read"] = "read"
    sync: SyncRequest
    base: int | None
    dense: bool = False
    left_s: float | None = None


class ReadDone(Model):
    """`revoked`: the trainer took the hold back, nothing was learned. `detail`: counters of this read (elements
    ambiguous and resolved, tiles by fate, slices by counter). `published`: the version that is in flight now."""

    revoked: bool = False
    published: int | None = None
    detail: dict[str, int] = Field(default_factory=dict)
    timings_ms: dict[str, float] = Field(default_factory=dict)


class Encode(Model):
    """Write the chunks of the version in flight into the spool. Always from the start; the bytes come out the same."""

    op: Literal["encode"] = "encode"
    version: Count


class EncodedChunkFile(Model):
    """A chunk complete on disk."""

    seq: Count
    path: str
    sha256: str
    size_bytes: Count
    raw_bytes: Count
    entries: Count


class EncodeDone(Model):
    """`detail` and `timings_ms` are those of the read that put the version in flight, for its part."""

    chunks: Count
    step: Count
    base: int | None
    slices: list[SliceResult]
    replicas: list[ReplicaDigest] = Field(default_factory=list)
    detail: dict[str, int] = Field(default_factory=dict)
    timings_ms: dict[str, float] = Field(default_factory=dict)


class Settle(Model):
    """The version in flight is decided: drop it, or fold it back into pending. `dense`: the parts did not join up with
    the base, so after the abort nothing is believed and every tile goes dense."""

    op: Literal["settle"] = "settle"
    version: Count
    committed: bool
    dense: bool = False


class Rebase(Model):
    """The ledger was lost after the epoch opened: all tiles go dense, with the slice digests of the newest commit."""

    op: Literal["rebase"] = "rebase"
    epoch: Annotated[int, Field(ge=1)]
    base: int | None
    digests: list[str | None]


class Release(Model):
    """Give a hold back without reading."""

    op: Literal["release"] = "release"
    hold: Count


class Detach(Model):
    """Let go of the trainer's memory. What is in the spool can still be encoded and settled."""

    op: Literal["detach"] = "detach"


class P2PSlices(Model):
    """What can this rank send to others?"""

    op: Literal["p2p_slices"] = "p2p_slices"


class P2PSlice(Model):
    """A slice in lanes: `blocks` map its ranks to canonical lanes of `tensor`."""

    slice: Count
    tensor: TensorName
    lanes: Count
    blocks: list[BlockJson]


class P2PSlicesDone(Model):
    """`device`: UUID of the GPU that the rank's memory is on, "" if it is not on one."""

    slices: list[P2PSlice]
    device: str = ""


class P2PPin(Model):
    """Keep the version in flight for sending, and the one before it."""

    op: Literal["p2p_pin"] = "p2p_pin"
    version: Count


class P2PPinned(Model):
    """`bytes`: upper estimate of what a receiver of everything would buffer."""

    epoch: Annotated[int, Field(ge=1)]
    version: Count
    base: Count | None
    step: Count
    bytes: Count


class P2PHost(Model):
    """Keep a group's store at this address of this node."""

    op: Literal["p2p_host"] = "p2p_host"
    group: GroupId
    host: str


class P2PHosted(Model):
    """HOST:PORT."""

    address: str


class P2PConnect(GroupPlace):
    """Connect to a group's other members, compute its plan from the roster, and agree on it."""

    op: Literal["p2p_connect"] = "p2p_connect"


class P2PConnected(Model):
    plan: Sha256
    operations: Count


class P2PSend(Model):
    """Send the pinned version to every receiver of the group."""

    op: Literal["p2p_send"] = "p2p_send"
    group: GroupId
    version: Count
    bucket_bytes: Annotated[int, Field(ge=1)]
    timeout_s: Annotated[float, Field(gt=0)]


class P2PSent(Model):
    """`pairs`: bytes by receiver."""

    entries: Count
    bytes: Count
    ms: float
    pairs: dict[int, Count] = Field(default_factory=dict)


class P2PLeave(Model):
    """Give up this group, if the rank is in it, or is entering it; what is going on in it ends with an error."""

    op: Literal["p2p_leave"] = "p2p_leave"
    group: GroupId


class Done(Model):
    pass


Request = Annotated[
    Open
    | Initial
    | Begin
    | Read
    | Encode
    | Settle
    | Rebase
    | Release
    | Detach
    | P2PSlices
    | P2PPin
    | P2PHost
    | P2PConnect
    | P2PSend
    | P2PLeave,
    Field(discriminator="op"),
]

_ERRORS: dict[str, type[DteError]] = {
    e.code: e
    for e in (
        BaseMoved,
        CodecError,
        DeviceMemoryError,
        HoldTimeout,
        InvalidInput,
        LayoutError,
        SharedMemoryError,
        SharedMemoryInvalid,
        SpoolFull,
        SpoolLost,
        StateConflict,
        UnsupportedOptimizer,
        WorkerFailed,
    )
}


def error_to_json(error: DteError) -> dict[str, Any]:
    found = {"code": error.code, "message": error.message, "remedy": error.remedy}
    member = getattr(error, "member", None)
    return found if member is None else {**found, "member": member}


def error_from_json(data: dict[str, Any]) -> DteError:
    """The error a worker reported, as the class it had there (DteError if unknown)."""
    if "member" in data:
        return P2PError(data.get("message", ""), member=data["member"], remedy=data.get("remedy", ""))
    kind = _ERRORS.get(data.get("code", ""), DteError)
    return kind(data.get("message", "the worker failed."), remedy=data.get("remedy", ""))


__all__ = [
    "Begin",
    "Detach",
    "Done",
    "Encode",
    "EncodeDone",
    "EncodedChunkFile",
    "Initial",
    "InitialDone",
    "Open",
    "Opened",
    "Read",
    "ReadDone",
    "Rebase",
    "Release",
    "Request",
    "Settle",
    "SliceSpec",
    "SpoolFull",
    "SpoolLost",
    "WorkerOptions",
    "error_from_json",
    "error_to_json",
]
