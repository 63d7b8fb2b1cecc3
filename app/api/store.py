"""`/store`: the daemon's own directory as an HTTP object store.

Invariant: an object is visible only whole, hashed and fsynced; whatever ends a PUT early (a cut connection, a wrong
hash, a full disk, too many bytes) leaves nothing behind. Bodies are streamed in 1 MiB steps, never compressed.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.metrics import Metrics
from app.problems import HttpProblem, problem_responses
from engine.errors import DteError
from engine.records.keys import check_key
from transports.errors import ObjectCorrupt, ObjectNotFound
from transports.store._files import READ_BYTES, Reader
from transports.store.base import ObjectInfo
from transports.store.local import LocalStore

MAX_PAGE = 1000
CHECKSUM = "X-Checksum-SHA256"
WANT_CHECKSUM = "X-Want-Checksum"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class Page(BaseModel):
    """A page of a listing: keys in order, and the key after which the next page starts (null: this was the last)."""

    keys: list[str]
    next: str | None


def store_router(store: LocalStore, metrics: Metrics, *, max_object_bytes: int) -> APIRouter:
    """Routes of the embedded store."""
    api = APIRouter(tags=["store"])
    server = _Server(store, metrics, max_object_bytes)
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    @api.get("/store")
    async def list_objects(
        prefix: Annotated[str, Query(description="Empty, or ending with a slash.")] = "",
        after: Annotated[str, Query(description="Keys above this one only.")] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    ) -> Page:
        """Keys that start with `prefix`, in lexicographic order, a page at a time."""
        keys = await store.page(prefix, after=after, limit=limit + 1)
        more = len(keys) > limit
        keys = keys[:limit]
        metrics.store_requests.labels("list", "ok").inc()
        return Page(keys=keys, next=keys[-1] if more else None)

    @api.get(
        "/store/{key:path}",
        response_class=Response,
        responses={
            200: {"content": binary, "description": "The object."},
            206: {"content": binary, "description": "The range asked for."},
            304: {"description": "The object still has the ETag of If-None-Match."},
            **problem_responses({404: "No such object.", 416: "The range lies behind the object's end."}),
        },
    )
    async def get_object(key: str, request: Request) -> Response:
        """The object, or the single range of `Range` (unless `If-Range` names another ETag)."""
        return await server.get(key, request)

    @api.head("/store/{key:path}", response_class=Response)
    async def head_object(key: str, request: Request) -> Response:
        """Length and ETag; with `X-Want-Checksum: sha256` also the hash."""
        return await server.head(key, request)

    @api.put(
        "/store/{key:path}",
        status_code=201,
        response_class=Response,
        openapi_extra={"requestBody": {"content": binary, "required": True}},
        responses={
            201: {"description": "Stored durably."},
            **problem_responses(
                {
                    409: "The key is a prefix of another object's, or the other way round.",
                    412: "There is an object, and `If-None-Match: *` was sent.",
                    413: "Longer than this store takes.",
                    422: "The bytes do not have the hash of X-Checksum-SHA256, or the key is not valid.",
                    507: "The disk is full.",
                }
            ),
        },
    )
    async def put_object(key: str, request: Request) -> Response:
        """Create or replace the object; with `If-None-Match: *` only create. `X-Checksum-SHA256` is verified."""
        return await server.put(key, request)

    @api.delete("/store/{key:path}", status_code=204, responses=problem_responses({404: "No such object."}))
    async def delete_object(key: str) -> Response:
        """Remove the object."""
        found = await store.delete(key)
        metrics.store_requests.labels("delete", "ok" if found else "absent").inc()
        if not found:
            raise ObjectNotFound(f"no object has the key {key}.")
        return Response(status_code=204)

    return api


class _Server:
    def __init__(self, store: LocalStore, metrics: Metrics, max_object_bytes: int) -> None:
        self._store = store
        self._metrics = metrics
        self._max = max_object_bytes

    async def get(self, key: str, request: Request) -> Response:
        try:
            reader = await self._store.open(key)
        except ObjectNotFound:
            self._metrics.store_requests.labels("get", "absent").inc()
            raise
        try:
            info = reader.info
            headers = _object_headers(info)
            if _names(request.headers.get("if-none-match"), info.etag):
                reader.close()
                return Response(status_code=304, headers=headers)
            start, stop, status = _range(request, info)
        except BaseException:
            reader.close()
            raise
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{info.size}"
        headers["Content-Length"] = str(stop - start)
        self._metrics.store_requests.labels("get", "ok").inc()
        return _ObjectResponse(self._body(reader, start, stop), status, headers, reader)

    async def head(self, key: str, request: Request) -> Response:
        try:
            reader = await self._store.open(key)
        except ObjectNotFound:
            self._metrics.store_requests.labels("head", "absent").inc()
            raise
        try:
            headers = _object_headers(reader.info) | {"Content-Length": str(reader.info.size)}
            if request.headers.get(WANT_CHECKSUM, "").lower() == "sha256":
                digest = hashlib.sha256()
                async for piece in reader.pieces(0, reader.info.size):
                    await asyncio.to_thread(digest.update, piece)
                headers[CHECKSUM] = digest.hexdigest()
        finally:
            reader.close()
        self._metrics.store_requests.labels("head", "ok").inc()
        return Response(status_code=200, headers=headers)

    async def put(self, key: str, request: Request) -> Response:
        outcome = "failed"
        try:
            created, size = await self._receive(check_key(key), request)
            outcome = "ok" if created else "exists"
        except DteError as e:
            outcome = e.code
            raise
        finally:
            self._metrics.store_requests.labels("put", outcome).inc()
        if not created:
            raise HttpProblem(412, "object-exists", f"an object has the key {key} already.")
        self._metrics.store_bytes.labels("in").inc(size)
        return Response(status_code=201)

    async def _receive(self, key: str, request: Request) -> tuple[bool, int]:
        if_absent, want, declared = _put_headers(request)
        if declared is not None and declared > self._max:
            raise self._too_large()
        digest = hashlib.sha256()
        size = 0
        async with self._store.upload(key) as upload:
            try:
                async for block in _blocks(request.stream()):
                    size += sum(len(piece) for piece in block)
                    if size > self._max:
                        raise self._too_large()
                    await upload.write(block)
                    if want is not None:
                        await asyncio.to_thread(_update, digest, block)
            except ClientDisconnect:
                raise HttpProblem(400, "cut-off", "the connection ended before the body did.") from None
            if declared is not None and size != declared:
                raise HttpProblem(400, "cut-off", f"{size} bytes came, {declared} were declared.")
            if want is not None and digest.hexdigest() != want:
                raise ObjectCorrupt(
                    f"the bytes received for {key} do not have the hash of {CHECKSUM}.", remedy="Send them again."
                )
            return await upload.commit(if_absent=if_absent), size

    def _too_large(self) -> HttpProblem:
        return HttpProblem(
            413,
            "object-too-large",
            f"the object is longer than {self._max} bytes.",
            remedy="Use smaller chunks, or raise max_object_bytes (DTE_MAX_OBJECT_BYTES).",
        )

    async def _body(self, reader: Reader, start: int, stop: int) -> AsyncIterator[bytes]:
        async for piece in reader.pieces(start, stop):
            yield piece
            self._metrics.store_bytes.labels("out").inc(len(piece))


class _ObjectResponse(StreamingResponse):
    """Streams an open object and closes it, however the response ends."""

    def __init__(self, body: AsyncIterator[bytes], status: int, headers: dict[str, str], reader: Reader) -> None:
        super().__init__(body, status, headers, media_type="application/octet-stream")
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reader.close()


async def _blocks(stream: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The stream's pieces gathered to about READ_BYTES, so that a thread is asked once per MiB."""
    block: list[bytes] = []
    size = 0
    async for piece in stream:
        if piece:
            block.append(piece)
            size += len(piece)
        if size >= READ_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _update(digest: hashlib._Hash, pieces: list[bytes]) -> None:
    for piece in pieces:
        digest.update(piece)


def _object_headers(info: ObjectInfo) -> dict[str, str]:
    return {
        "ETag": info.etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "no-transform",
        "X-Content-Type-Options": "nosniff",
    }


def _names(header: str | None, etag: str) -> bool:
    """Whether an If-None-Match list names `etag`."""
    return header is not None and any(
        tag.strip().removeprefix("W/") == etag or tag.strip() == "*" for tag in header.split(",")
    )


def _range(request: Request, info: ObjectInfo) -> tuple[int, int, int]:
    """(start, stop, status) of what to send. Several ranges, and what is no range, mean the whole object."""
    whole = (0, info.size, 200)
    header = request.headers.get("range")
    if_range = request.headers.get("if-range")
    if header is None or (if_range is not None and if_range != info.etag):
        return whole
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        return whole
    first, last = match.groups()
    if not first:
        start, stop = max(0, info.size - int(last)), info.size
    else:
        start = int(first)
        stop = min(int(last) + 1, info.size) if last else info.size
        if last and int(last) < start:
            return whole
    if start >= stop:
        raise HttpProblem(
            416,
            "range-not-satisfiable",
            f"the object has {info.size} bytes; {header[:60]!r} lies outside.",
            headers={"Content-Range": f"bytes */{info.size}"},
        )
    return start, stop, 206


def _put_headers(request: Request) -> tuple[bool, str | None, int | None]:
    """(create only, wanted SHA-256, declared length). What this store cannot honour is refused, never ignored."""
    headers = request.headers
    condition = headers.get("if-none-match")
    if (
        (condition is not None and condition.strip() != "*")
        or "if-match" in headers
        or "if-unmodified-since" in headers
    ):
        raise HttpProblem(501, "unsupported-condition", "the only condition a PUT may have is `If-None-Match: *`.")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HttpProblem(415, "content-encoding", "objects are stored as sent; leave Content-Encoding out.")
    if "content-range" in headers:
        raise HttpProblem(400, "partial-put", "an object can only be put whole; send it without Content-Range.")
    want = headers.get(CHECKSUM)
    if want is not None and not _SHA256.fullmatch(want := want.strip().lower()):
        raise HttpProblem(400, "bad-checksum", f"{CHECKSUM} must be 64 hexadecimal digits.")
    declared = headers.get("content-length")
    return condition is not None, want, None if declared is None else int(declared)
