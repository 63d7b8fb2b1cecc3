"""The receiver's local protocol: the messages between a rollout daemon and one receiver rank, and the daemon's end.

A Unix socket, frames of a little-endian u32 length and that many bytes of UTF-8 JSON. One invariant: a frame is
bounded and validated before anything acts on it. The page `docs/receiver-contract.md` describes the same for other
implementations. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from clients.groups import GroupId
from clients.protocol import AbsolutePath, Model
from engine.errors import CodecError, DteError
from engine.records.models import BlockJson, Count, Digest, DType, RunId, Sha256, TensorDigest, TensorMeta, TensorName

PROTOCOL = 1
MAX_FRAME_BYTES = 64 << 20
HEADER_BYTES = 4

OwnerId = Annotated[str, StringConstraints(min_length=1, max_length=200)]
WaitS = Annotated[float, Field(ge=0, le=86400)]

M = TypeVar("M", bound=Model)


class ReceiverError(DteError):
    """A receiver refused or could not do what it was asked. `code` is the receiver's, `detail` whatever it adds."""

    code = "receiver-error"

    def __init__(self, message: str, *, remedy: str = "", code: str = "", detail: dict[str, Any] | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.code = code or type(self).code
        self.detail = detail or {}

    @property
    def member(self) -> int | None:
        """Number of the member of a P2P group that is to blame, if it is not this receiver."""
        found = self.detail.get("member")
        return found if isinstance(found, int) else None


class ReceiverGone(ReceiverError):
    """The receiver's process is not there, or its connection was lost; what it did last is not known."""

    code = "receiver-gone"


# --- messages -------------------------------------------------------------------------------------------------------


class Request(Model):
    """`body` is validated by the operation."""

    id: Count
    op: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}$")]
    body: dict[str, Any] = Field(default_factory=dict)


class ErrorBody(Model):
    code: str
    message: str
    remedy: str = ""
    detail: dict[str, Any] = Field(default_factory=dict)


class Response(Model):
    """Exactly one of `result` and `error` is set."""

    id: Count
    result: dict[str, Any] | None = None
    error: ErrorBody | None = None


class Empty(Model):
    pass


class LocalTensor(Model):
    """A tensor of this rank: the names a version may use for it, its canonical shape and dtype, and which canonical
    lanes are here: `blocks` maps the `held` local lanes, or all but padding, to them (null: all, in order)."""

    names: list[TensorName]
    shape: tuple[Count, ...]
    dtype: DType
    held: Count
    blocks: list[BlockJson] | None = None


class NamedTensor(Model):
    names: list[TensorName]
    shape: tuple[Count, ...]
    dtype: DType


class UnitBody(Model):
    """A converter unit: tensors that are not kept by their bits, and the parameters they become. The engine's loader
    must be given all of them at once."""

    tensors: list[NamedTensor]
    parameters: list[str]


class Description(Model):
    """`run` is null where it is left to the owner. `device`: UUID of the GPU through which this rank may be sent
    versions, "" where they go through host memory."""

    protocol: int
    name: str
    run: RunId | None
    pid: int
    rank: Count
    ranks: Annotated[int, Field(ge=1)]
    tensors: list[LocalTensor]
    units: list[UnitBody] = Field(default_factory=list)
    device: Annotated[str, StringConstraints(max_length=64)] = ""


class Status(Model):
    """`generation` grows whenever something other than this protocol replaced or wrote a tensor."""

    phase: str
    version: int | None
    step: int | None
    target: int | None
    generation: Count
    fence: Count
    ready: bool


class Attach(Model):
    """`run`: the one the owner follows, for a receiver that was not told its own."""

    owner: OwnerId
    fence: Count
    run: RunId | None = None


class Audit(Model):
    tensors: list[TensorMeta]


class Digests(Model):
    """Digests of this rank's lanes by canonical name."""

    digests: dict[str, Digest]
    generation: Count


class Adopt(Model):
    version: Count
    step: Count
    tensors: list[TensorDigest]
    digests: dict[str, Digest]


class ChunkBody(Model):
    path: AbsolutePath
    sha256: Sha256
    size_bytes: Count
    raw_bytes: Count
    entries: Count


class TargetBody(Model):
    """One version (fields of `engine.apply.Target`). In a resync all targets but the last may leave `tensors` empty: a
    run's versions have the same tensors, and only the last one's digests are compared. `received`: the P2P group in
    which this rank has received the version, in place of `chunks`."""

    run: RunId
    version: Count
    step: Count
    base: Count | None
    tensors: list[TensorDigest]
    base_digests: dict[str, Digest] | None
    chunks: list[ChunkBody]
    received: GroupId | None = None


class Prepare(Model):
    target: TargetBody


class Prepared(Model):
    """Digests of this rank's lanes as they are live and as they will be, by canonical name."""

    version: Count
    already: bool
    live: dict[str, Digest]
    after: dict[str, Digest]
    entries: Count
    generation: Count


class Commit(Model):
    """`wait_s`: how long to wait for requests that are being served."""

    version: Count
    wait_s: WaitS = 600.0


class Finalize(Model):
    version: Count


class Resync(Model):
    """`targets[0]` is complete (dense everywhere), each later one is a delta on the one before."""

    targets: Annotated[list[TargetBody], Field(min_length=1, max_length=10000)]
    wait_s: WaitS = 600.0


def in_one_frame(targets: list[TargetBody]) -> list[TargetBody]:
    """The targets of a resync with the tensors named once: with 100,000 of them each list has some 20 MB."""
    return [t.model_copy(update={"tensors": [], "base_digests": None}) for t in targets[:-1]] + [
        t.model_copy(update={"base_digests": None}) for t in targets[-1:]
    ]


# --- framing --------------------------------------------------------------------------------------------------------


def pack(message: Model) -> bytes:
    """One frame; CodecError if it would exceed the bound."""
    data = message.model_dump_json().encode()
    if len(data) > MAX_FRAME_BYTES:
        raise CodecError(
            f"a message of {len(data)} bytes exceeds the {MAX_FRAME_BYTES} of a frame.",
            remedy="Too many tensors with long names, or too many chunks behind the newest anchor: make anchors more "
            "often (anchor_every), or larger chunks (chunk_bytes).",
        )
    return len(data).to_bytes(HEADER_BYTES, "little") + data


def frame_length(header: bytes) -> int:
    """Length of the frame that follows; CodecError if it is not allowed."""
    length = int.from_bytes(header, "little")
    if not 2 <= length <= MAX_FRAME_BYTES:
        raise CodecError(f"a frame of {length} bytes is announced; 2 to {MAX_FRAME_BYTES} are allowed.")
    return length


def unpack(kind: type[M], data: bytes) -> M:
    """Parse one frame's bytes; CodecError if they are not such a message."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        raise CodecError(f"{kind.__name__} is malformed at {where}: {first['msg']}.") from None


def parse_body(kind: type[M], body: dict[str, Any]) -> M:
    """Validate an operation's body; CodecError if it does not fit."""
    return unpack(kind, json.dumps(body).encode())


# --- the daemon's end -----------------------------------------------------------------------------------------------


class ReceiverClient:
    """One connection to one receiver rank. Calls may overlap; the receiver does them one at a time.

    `gone` is set when the connection ends, which is how the death of the receiver's process is noticed.
    """

    def __init__(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.path = path
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self.gone = asyncio.Event()
        self._pump = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, path: str | Path, *, timeout_s: float = 5.0) -> Self:
        """Connect to the socket at `path`; ReceiverGone if nobody answers there."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(str(path))
        except (OSError, TimeoutError) as error:
            raise ReceiverGone(
                f"no receiver answers at {path}: {error or 'timeout'}.", remedy="Start the receiver's process."
            ) from None
        return cls(str(path), reader, writer)

    async def call(self, op: str, body: Model, result: type[M], *, timeout_s: float | None = None) -> M:
        """Do one operation. ReceiverError with the receiver's code if it refuses, ReceiverGone if it is lost.

        A timeout closes the connection, because what the receiver did is then unknown.
        """
        if self.gone.is_set():
            raise ReceiverGone("the connection to the receiver is closed.")
        number = next(self._ids)
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._writer.write(pack(Request(id=number, op=op, body=body.model_dump(mode="json"))))
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
                response = await future
        except TimeoutError:
            await self.aclose()
            raise ReceiverGone(f"the receiver did not answer '{op}' within {timeout_s} s.") from None
        except OSError as error:
            await self.aclose()
            raise ReceiverGone(f"the connection to the receiver broke: {error}.") from None
        finally:
            self._waiting.pop(number, None)
        if response.error is not None:
            e = response.error
            raise ReceiverError(e.message, remedy=e.remedy, code=e.code, detail=e.detail)
        return parse_body(result, response.result or {})

    async def _read(self) -> None:
        reason = "the receiver's process ended or closed the connection."
        try:
            while True:
                length = frame_length(await self._reader.readexactly(HEADER_BYTES))
                response = unpack(Response, await self._reader.readexactly(length))
                future = self._waiting.get(response.id)
                if future is not None and not future.done():
                    future.set_result(response)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except CodecError as error:
            reason = f"the receiver sent a malformed frame: {error}"
        finally:
            self.gone.set()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ReceiverGone(reason))
            self._writer.close()

    async def aclose(self) -> None:
        """Close the connection and wait for its reader to end."""
        self._pump.cancel()
        await asyncio.wait([self._pump])
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def describe(self, *, timeout_s: float | None = 60.0) -> Description:
        return await self.call("describe", Empty(), Description, timeout_s=timeout_s)

    async def status(self, *, timeout_s: float | None = 30.0) -> Status:
        return await self.call("status", Empty(), Status, timeout_s=timeout_s)

    async def attach(self, owner: str, fence: int, run: str | None = None, *, timeout_s: float | None = 60.0) -> Status:
        return await self.call("attach", Attach(owner=owner, fence=fence, run=run), Status, timeout_s=timeout_s)

    async def audit(self, tensors: list[TensorMeta]) -> Digests:
        metas = [TensorMeta(name=t.name, shape=t.shape, dtype=t.dtype) for t in tensors]
        return await self.call("audit", Audit(tensors=metas), Digests)

    async def adopt(self, version: int, step: int, tensors: list[TensorDigest], digests: dict[str, str]) -> Status:
        return await self.call("adopt", Adopt(version=version, step=step, tensors=tensors, digests=digests), Status)

    async def prepare(self, target: TargetBody) -> Prepared:
        return await self.call("prepare", Prepare(target=target), Prepared)

    async def commit(self, version: int, *, wait_s: float = 600.0) -> Status:
        return await self.call("commit", Commit(version=version, wait_s=wait_s), Status)

    async def finalize(self, version: int) -> Status:
        return await self.call("finalize", Finalize(version=version), Status)

    async def rollback(self) -> Status:
        return await self.call("rollback", Empty(), Status)

    async def abort(self) -> Status:
        return await self.call("abort", Empty(), Status)

    async def resync(self, targets: list[TargetBody], *, wait_s: float = 600.0) -> Digests:
        return await self.call("resync", Resync(targets=in_one_frame(targets), wait_s=wait_s), Digests)
