"""The records of the protocol: what stands in the store beside the chunks.

One invariant: a record's bytes are its canonical JSON (`record_bytes`), so equal records are equal bytes, and whoever
loses a put-if-absent race can read back and compare. Digests travel as 16 hex digits, hashes as 64.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, StringConstraints, model_serializer

SCHEMA: Final = 1
MAX_DIVERGED: Final = 1000
"""A decision names no more replicas: one fault may have reached every one of them."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RunId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
LaunchId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
TensorName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:\[\]-]{0,511}$")]
Cell = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16,64}$")]
"""Names the canonical content of one of a trainer's parameters: the same for all ranks that hold the same elements."""
Key = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
DType = Literal["bfloat16", "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
BlockJson = tuple[list[Count], Count, list[Count], Count, list[Count]]

ITEMSIZE: dict[str, int] = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1,
}  # fmt: skip


class Record(BaseModel):
    """Base of all records: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SparseRecord(Record):
    """A record some fields of which are absent from its bytes, not null or empty, when they say nothing."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_absent(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        out: dict[str, Any] = dump(self)
        for name in self.OPTIONAL:
            if not out.get(name, True):
                del out[name]
        return out


class TensorMeta(Record):
    """A canonical tensor: Hugging Face name, shape, and the dtype the rollout side stores."""

    name: TensorName
    shape: tuple[Count, ...]
    dtype: DType = "bfloat16"


class TensorDigest(TensorMeta):
    """A canonical tensor with its state digest (DESIGN section 4)."""

    digest: Digest


class SliceDecl(SparseRecord):
    """One slice a writer owns: `lanes` consecutive 16-bit lanes, mapped to the tensor's canonical lanes by `blocks`.

    The source side of the blocks covers [0, lanes) exactly once; the source index is the element's *rank*. `cell`: what
    other ranks hold too, if any do.
    """

    OPTIONAL: ClassVar[tuple[str, ...]] = ("cell",)

    slice: Count
    tensor: TensorName
    lanes: Count
    blocks: list[BlockJson]
    digest: Digest
    cell: Cell | None = None


class ReplicaDecl(Record):
    """`lanes` lanes of `tensor` in `cell` that a rank holds and does not publish. The ranks that hold the whole cell
    together are named by the first of them, `holders`."""

    cell: Cell
    tensor: TensorName
    holders: Count
    lanes: Count


class LaunchRecord(SparseRecord):
    """`runs/<run>/launches/<launch>/<rank>.json`: one rank's registration, written once per launch and rank."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ("replicas",)

    schema_version: Literal[1] = SCHEMA
    run: RunId
    launch: LaunchId
    rank: Count
    world: Annotated[int, Field(ge=1, le=1 << 20)]
    step: Count
    tensors: list[TensorMeta]
    slices: list[SliceDecl]
    replicas: list[ReplicaDecl] = Field(default_factory=list)


class EpochRecord(Record):
    """`runs/<run>/epochs/<epoch>.json`: binds an epoch number to the launch whose ranks are its writers."""

    schema_version: Literal[1] = SCHEMA
    run: RunId
    epoch: Annotated[int, Field(ge=1)]
    launch: LaunchId
    world: Annotated[int, Field(ge=1, le=1 << 20)]


class ChunkRef(Record):
    """One immutable chunk: where it is, the SHA-256 and length of its bytes, and bounds for whoever decodes it."""

    key: Key
    sha256: Sha256
    size_bytes: Count
    raw_bytes: Count
    entries: Count


class SliceResult(Record):
    """What one writer's slice went through between base and version. `digest_base` is null when it is not known,
    which is allowed only when every tile of the tensor is dense. `dense_lanes`: lanes in the dense tiles (the last
    tile of a slice may be short)."""

    slice: Count
    tensor: TensorName
    digest_base: Digest | None
    digest: Digest
    changed: Count
    dense_tiles: Count
    dense_lanes: Count
    tiles: Count


class ReplicaDigest(Record):
    """The digest of what a `ReplicaDecl` names, at a version."""

    cell: Cell
    tensor: TensorName
    holders: Count
    digest: Digest


class PartRecord(SparseRecord):
    """`versions/<version>/parts/<epoch>-<writer>.json`: one writer's share of a version, empties included."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ("replicas",)

    schema_version: Literal[1] = SCHEMA
    run: RunId
    version: Count
    epoch: Annotated[int, Field(ge=1)]
    writer: Count
    launch: LaunchId
    step: Count
    base: Count | None
    chunks: list[ChunkRef]
    slices: list[SliceResult]
    replicas: list[ReplicaDigest] = Field(default_factory=list)
    created_ms: Count = 0
    timings_ms: dict[str, float] = Field(default_factory=dict)
    detail: dict[str, int] = Field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True when nothing of this writer's slices differs from the base."""
        return all(s.changed == 0 and s.dense_tiles == 0 for s in self.slices)


class PartRef(Record):
    """A part by key and SHA-256 of its bytes."""

    writer: Count
    key: Key
    sha256: Sha256


class Totals(Record):
    """Sums over all parts. `elements` counts 16-bit lanes of the whole model, `changed` sparse entries,
    `dense_lanes` the lanes sent in dense tiles, `bytes` the chunk bytes."""

    elements: Count
    changed: Count
    dense_tiles: Count
    dense_lanes: Count
    chunks: Count
    bytes: Count

    @property
    def changed_fraction(self) -> float:
        """Share of the model's lanes that are sparse entries. Of lanes in dense tiles nobody knows which changed."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def complete(self) -> bool:
        """True when every lane of the model is in a dense tile: the version can be had without its base."""
        return self.dense_lanes >= self.elements > 0


class Diverged(Record):
    """The ranks from `holders` on hold other bits of `tensor` than those that the ranks from `writer` on publish."""

    tensor: TensorName
    writer: Count
    holders: Count


class CommitDecision(SparseRecord):
    """A version exists because of this record. `diverged` names at most the first MAX_DIVERGED."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ("diverged",)

    schema_version: Literal[1] = SCHEMA
    kind: Literal["commit"] = "commit"
    run: RunId
    version: Count
    epoch: Annotated[int, Field(ge=1)]
    launch: LaunchId
    step: Count
    base: Count | None
    rewound: bool
    parts: list[PartRef]
    tensors: list[TensorDigest]
    totals: Totals
    diverged: list[Diverged] = Field(default_factory=list, max_length=MAX_DIVERGED)
    created_ms: Count
    hmac: Sha256 | None = None


class AbortDecision(Record):
    """The number is consumed and no version has it."""

    schema_version: Literal[1] = SCHEMA
    kind: Literal["abort"] = "abort"
    run: RunId
    version: Count
    epoch: Annotated[int, Field(ge=1)]
    reason: Literal["unchanged", "revoked", "spool-lost", "superseded", "rejected"]
    hmac: Sha256 | None = None


class EpochStartDecision(Record):
    """The number is consumed by the opening of an epoch. `base` is the newest commit before it; `differs` names the
    canonical tensors whose digest at this launch is not the base's: the first version carries them dense."""

    schema_version: Literal[1] = SCHEMA
    kind: Literal["epoch-start"] = "epoch-start"
    run: RunId
    version: Count
    epoch: Annotated[int, Field(ge=1)]
    launch: LaunchId
    base: Count | None
    differs: list[TensorName]
    hmac: Sha256 | None = None


Decision = Annotated[CommitDecision | AbortDecision | EpochStartDecision, Field(discriminator="kind")]


class AnchorRecord(Record):
    """`anchors/<version>/manifest.json`: a complete dense copy of a version, put-if-absent after its chunks."""

    schema_version: Literal[1] = SCHEMA
    run: RunId
    version: Count
    tensors: list[TensorDigest]
    chunks: list[ChunkRef]
    hmac: Sha256 | None = None


class DenseRequest(Record):
    """`requests/dense-<version>.json`: a receiver found nothing intact that leads to `version`, the head, and asks for
    the next version to be dense. Equal for all who ask."""

    schema_version: Literal[1] = SCHEMA
    run: RunId
    version: Count


class LatestHint(Record):
    """`latest.json`: a blind hint where to start probing; never trusted."""

    schema_version: Literal[1] = SCHEMA
    version: Count
