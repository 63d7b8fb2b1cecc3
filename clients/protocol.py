"""The JSON bodies of the daemon's HTTP API, shared by the daemon and its clients. Imports no torch.

All models are frozen and forbid unknown fields. Problems are RFC 9457 documents (`Problem`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from engine.records.models import BlockJson, Cell, Count, Digest, LaunchId, RunId, TensorMeta, TensorName


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# --- trainer memory -------------------------------------------------------------------------------------------------

AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/", max_length=4096)]
ShmName = Annotated[str, StringConstraints(pattern=r"^dte-[A-Za-z0-9._-]{1,200}$")]


ElementType = Literal["float32", "bfloat16", "float16", "int64", "int32", "int16", "uint8", "float64", "int8", "bool"]
_BASE64 = r"^[A-Za-z0-9+/]+={0,2}$"


class MemoryRef(Model):
    """A flat array in shared memory of the host: a file of that name under /dev/shm. A page, not a pickle."""

    kind: Literal["shm"] = "shm"
    file: ShmName
    offset_bytes: Count
    numel: Count
    dtype: ElementType


class CudaRef(Model):
    """A flat array in memory of a CUDA device, which CUDA's interprocess calls open by these fields.

    `device` is its UUID, as the index differs between processes. `handle` (base64) names the allocation; the storage is
    the `storage_bytes` from `storage_offset_bytes` on in it, the array starts `offset_bytes` into the storage. `event`
    (base64) is the interprocess event that a reader waits for.
    """

    kind: Literal["cuda"] = "cuda"
    device: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
    handle: Annotated[str, StringConstraints(pattern=_BASE64, min_length=24, max_length=350_000)]
    storage_offset_bytes: Annotated[int, Field(ge=0, le=1 << 44)]
    storage_bytes: Annotated[int, Field(ge=1, le=1 << 44)]
    offset_bytes: Annotated[int, Field(ge=0, le=1 << 44)]
    numel: Count
    dtype: ElementType
    event: Annotated[str, StringConstraints(pattern=_BASE64, min_length=88, max_length=88)]


AnyRef = Annotated[MemoryRef | CudaRef, Field(discriminator="kind")]
"""Where an array of the trainer lies, by `kind`: `shm` or `cuda`."""


class FormulaSpec(Model):
    """Which optimizer formula a group uses; `name` is a key of `engine.optimizers.registry`."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)]


class HyperSpec(Model):
    """Hyperparameters of one group as the step used them (fields of `engine.optimizers.base.Hyper`)."""

    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    beta1: Annotated[float, Field(ge=0, lt=1)]
    beta2: Annotated[float, Field(ge=0, lt=1)]
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    lr_is_tensor: bool = False


MomentScale = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None

Detector = Literal["certified", "snapshot", "dense", "frozen"]


class SliceSpec(Model):
    """One slice a rank owns: a contiguous run of `numel` elements of local memory and where they lie canonically.

    `blocks` maps the slice's flat element index to the canonical flat element index, source side covering
    [0, numel) exactly once. Detector `certified` needs `exp_avg`, `exp_avg_sq` and `group`; `theta` is FP32 there, or
    with `remainder` the BF16 weights, and the canonical dtype is what the receiver stores. `snapshot` and `dense`
    compare the cast of `theta` in the canonical dtype; `frozen` is read for version 0, and again only when a sync says
    that it may have been written.

    `remainder` (int16): the lower 16 bits of FP32 masters whose upper halves are the BF16 weights in `theta`, one
    higher where the remainder is negative. So masters round half away from zero there; without it, half to even.

    `cell` names what other ranks hold too. A replica is declared with `holders`, the first of the ranks that hold its
    cell together, and detector `dense`: it is not published, only compared.
    """

    slice: Count
    tensor: TensorName
    numel: Count
    blocks: list[BlockJson]
    detector: Detector
    theta: AnyRef
    exp_avg: AnyRef | None = None
    exp_avg_sq: AnyRef | None = None
    remainder: AnyRef | None = None
    group: int | None = None
    cell: Cell | None = None
    holders: Count | None = None


class RankRegistration(Model):
    """`POST /ranks`. `mirrored`: how many slices are copies that the trainer makes at every sync, because their own
    memory cannot be read by another process; counted as a degraded mode. `replicas`: what this rank holds and another
    one publishes, with numbers of their own."""

    run: RunId
    launch: LaunchId
    rank: Count
    world: Annotated[int, Field(ge=1, le=1 << 20)]
    step: Count
    control: ShmName
    generation: Count
    hold: Count
    tensors: list[TensorMeta]
    groups: list[FormulaSpec] = Field(default_factory=list)
    slices: list[SliceSpec]
    replicas: list[SliceSpec] = Field(default_factory=list)
    mirrored: Count = 0


class SyncRequest(Model):
    """`POST /sync`, after optimizer step `step`. Idempotent per (launch, epoch, rank, step).

    `steps[i]` is the per-parameter step counter of `slices[i]` of the registration; of a `frozen` slice it says how
    often it may have been written since then; 0 for the others. `hypers[g]` belongs to `groups[g]`. `generation` and
    `hold` are the words of the control block at this moment.
    `handles` replaces memory references that moved since the registration (slice number → new spec), `replica_handles`
    those of replicas.
    `version` null means: accumulate, do not publish.

    `scales[i]`: what the FP16 moments (`exp_avg`, `exp_avg_sq`) of `slices[i]`, as they lie in memory now, are to be
    multiplied with; 1 for moments without a scale, null where it is not finite. Empty if no slice has one.
    """

    run: RunId
    launch: LaunchId
    epoch: Annotated[int, Field(ge=1)]
    rank: Count
    step: Count
    generation: Count
    hold: Count
    version: Count | None
    hypers: list[HyperSpec]
    steps: list[Count]
    scales: list[tuple[MomentScale, MomentScale]] = Field(default_factory=list)
    handles: list[SliceSpec] = Field(default_factory=list)
    replica_handles: list[SliceSpec] = Field(default_factory=list)


class JobState(StrEnum):
    """`READING` holds the trainer, `RELEASED` and later do not. The last five are final."""

    QUEUED = "queued"
    READING = "reading"
    RELEASED = "released"
    ENCODING = "encoding"
    UPLOADING = "uploading"
    COMMITTED = "committed"
    ACCUMULATED = "accumulated"
    UNCHANGED = "unchanged"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({JobState.COMMITTED, JobState.ACCUMULATED, JobState.UNCHANGED, JobState.ABORTED, JobState.FAILED})


class Problem(BaseModel):
    """RFC 9457 problem document: `type` is `urn:dte:problem:<code>`, `remedy` says what to do."""

    model_config = ConfigDict(extra="allow")
    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    remedy: str = ""


class Job(Model):
    """A registration (`kind` register) or a sync, as the daemon sees it now. `epoch` is known once it is open."""

    id: str
    kind: Literal["register", "sync"]
    run: RunId
    rank: Count
    step: Count
    state: JobState
    epoch: int | None = None
    version: int | None = None
    problem: Problem | None = None
    timings_ms: dict[str, float] = Field(default_factory=dict)
    detail: dict[str, int] = Field(default_factory=dict)


class Cut(Model):
    """`GET /ranks/{rank}/cut?run=`: may the next sync publish? `version` is the number to use, null: accumulate."""

    epoch: int
    version: int | None
    reason: str = ""


# --- versions -------------------------------------------------------------------------------------------------------


class VersionInfo(Model):
    """One committed version with its totals and timings (`GET /versions/{v}`)."""

    run: RunId
    version: Count
    epoch: int
    step: Count
    base: int | None
    rewound: bool
    anchor: bool
    elements: Count
    changed: Count
    changed_fraction: float
    dense_tiles: Count
    bytes: Count
    bits_per_entry: float | None
    created_ms: Count
    timings_ms: dict[str, float] = Field(default_factory=dict)
    detail: dict[str, int] = Field(default_factory=dict)
    writers: Count
    decision_sha256: str


class Versions(Model):
    """`GET /versions`: newest last. `degraded` names every degraded mode in force, with a count."""

    run: RunId
    head: int | None
    next: int
    epoch: int | None
    versions: list[VersionInfo]
    degraded: dict[str, int] = Field(default_factory=dict)


# --- receivers ------------------------------------------------------------------------------------------------------


class ReceiverState(StrEnum):
    PROVING = "proving"
    IN_SYNC = "in-sync"
    BEHIND = "behind"
    INSTALLING = "installing"
    RESYNCING = "resyncing"
    DIRTY = "dirty"
    LOST = "lost"
    FAILED = "failed"


ReceiverName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class ReceiverRegistration(Model):
    """`POST /receivers`. Kind `torch`: Unix sockets of the receiver's rank processes on this node. `transport`: `store`
    takes every version from the store, `p2p` waits for what its ranks are sent directly and takes from the store what
    they miss, `auto` does not wait."""

    name: ReceiverName
    kind: Literal["torch", "sglang"] = "torch"
    run: RunId
    sockets: list[str] = Field(default_factory=list)
    url: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    transport: Literal["store", "p2p", "auto"] = "auto"


class ReceiverInfo(Model):
    """`GET /receivers`. `path`: what brought the version that was installed last. `proof` is `proven` when the live
    weights' digests equalled `installed`'s after the write, `converted` when that holds but for `converted` tensors,
    which the engine made something else of."""

    name: str
    kind: str
    run: RunId
    ranks: int
    state: ReceiverState
    ready: bool
    installed: int | None
    installed_step: int | None
    lag: int | None
    proof: Literal["none", "proven", "converted", "failed"]
    converted: int = 0
    transport: Literal["store", "p2p", "auto"] = "auto"
    path: Literal["none", "store", "p2p"] = "none"
    resyncs: int = 0
    last_error: str = ""
    last_install_ms: dict[str, float] = Field(default_factory=dict)


class Event(Model):
    """One line of `GET /events` (`id` grows by one): a state change."""

    id: int
    kind: str
    at_ms: Count
    run: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)


__all__ = [
    "AnyRef",
    "CudaRef",
    "Cut",
    "Detector",
    "Digest",
    "ElementType",
    "Event",
    "FormulaSpec",
    "HyperSpec",
    "Job",
    "JobState",
    "MemoryRef",
    "Model",
    "Problem",
    "RankRegistration",
    "ReceiverInfo",
    "ReceiverRegistration",
    "ReceiverState",
    "SliceSpec",
    "SyncRequest",
    "VersionInfo",
    "Versions",
]
