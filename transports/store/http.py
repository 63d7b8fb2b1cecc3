"""`HttpStore`: another daemon's `/store` as a store.

Invariant: what a verb returns is whole (its length was declared and checked), and a verb may be retried without doing
its work twice: puts carry their SHA-256, reads resume only the very object they began with, and a create that finds
the object after an unclear try compares hashes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from engine.errors import InvalidInput
from engine.records.keys import check_key
from transports.errors import ObjectCorrupt, ObjectNotFound, ObjectTooLarge, StoreError
from transports.store import _replies as replies
from transports.store._files import Reader, acquire, hash_reader
from transports.store._replies import Reply
from transports.store.base import ChunkStore, ObjectInfo
from transports.store.retry import Retrier, RetryPolicy, Surroundings
from transports.tls import verification

_SMALL_BYTES = 64 << 10
_MAX_REPLY_BYTES = 8 << 20
_CORRUPT_TRIES = 3

Content = Callable[[], bytes | AsyncIterator[bytes]]
_RETRIED = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError, httpx.ProxyError)


@dataclass(frozen=True, slots=True)
class _Body:
    """What a PUT sends: length, SHA-256, and the bytes anew for each try."""

    size: int
    sha256: str
    content: Content


class HttpStore(ChunkStore):
    """A client for `base_url` (`http(s)://host[:port]/…/store`). Thread-bound to one event loop.

    Proxies and credentials of the environment are not used. `put_if_absent` that returns True after a retry means
    that the object is there with exactly our bytes; only a writer of the same bytes can have been told the same.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        policy: RetryPolicy | None = None,
        max_connections: int = 16,
        page_keys: int = 1000,
        transport: httpx.AsyncBaseTransport | None = None,
        around: Surroundings | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
            or parts.username
        ):
            raise InvalidInput("not the address of a store.", remedy="Use http(s)://host:port/store, without a query.")
        self._base = base_url.rstrip("/")
        self._page_keys = page_keys
        self._policy = policy or RetryPolicy()
        self._around = around or Surroundings()
        headers = {"Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.AsyncClient(
            headers=headers,
            http1=True,
            http2=False,
            follow_redirects=False,
            trust_env=False,
            verify=verification(self._base, proxies=False),
            transport=transport,
            timeout=httpx.Timeout(connect=10.0, read=30.0, write=30.0, pool=None),
            # The server keeps idle connections longer than this, so that a request rarely meets a closing one.
            limits=httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=15.0
            ),
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    # --- the six verbs ----------------------------------------------------------------------------------------------

    async def put(self, key: str, data: bytes | Path) -> None:
        await self._put(key, data, if_absent=False)

    async def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        return await self._put(key, data, if_absent=True)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        return b"".join([piece async for piece in self._read(key, 0, None, max_bytes)])

    async def stream(self, key: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        if start < 0 or (length is not None and length < 0):
            raise InvalidInput(f"not a byte range: start {start}, length {length}.")
        if length == 0:
            if await self.head(key) is None:
                raise _not_found(key)
            return
        async for piece in self._read(key, start, length, None):
            yield piece

    async def head(self, key: str) -> ObjectInfo | None:
        reply = await self._head(key)
        if reply is None:
            return None
        return ObjectInfo(replies.declared_length(reply.headers, f"HEAD {key}"), reply.headers.get("etag", ""))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        what = f"listing {prefix}"
        if prefix:
            check_key(prefix.removesuffix("/"))
            if not prefix.endswith("/"):
                raise InvalidInput(f"not a prefix: {prefix[:80]!r}.", remedy="A prefix ends with a slash.")
        after: str | None = ""
        while after is not None:
            params = {"prefix": prefix, "after": after, "limit": str(self._page_keys)}
            reply = await self._until_answered("GET", None, Retrier(what, self._policy, self._around), params=params)
            if reply.status != 200:
                raise replies.error(reply, what)
            keys, after = replies.page(reply, prefix, after, what)
            for key in keys:
                yield key

    async def delete(self, key: str) -> bool:
        retrier = Retrier(f"DELETE {check_key(key)}", self._policy, self._around)
        unclear = False
        while (reply := await self._try("DELETE", key, retrier)) is None:
            unclear = True
        if reply.status == 404:
            return unclear  # then it was probably our own earlier try that removed it
        if reply.status not in (200, 204):
            raise replies.error(reply, f"DELETE {key}")
        return True

    # --- writing ----------------------------------------------------------------------------------------------------

    async def _put(self, key: str, data: bytes | Path, *, if_absent: bool) -> bool:
        what = f"PUT {check_key(key)}"
        if isinstance(data, Path):
            reader = await acquire(lambda: _open_file(data), Reader.close)
            try:
                sha256 = await asyncio.to_thread(hash_reader, reader)
                size = reader.info.size
                return await self._put_body(
                    key, _Body(size, sha256, lambda: reader.pieces(0, size)), what, if_absent=if_absent
                )
            finally:
                reader.close()
        if len(data) > _SMALL_BYTES:
            sha256 = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        else:
            sha256 = hashlib.sha256(data).hexdigest()
        return await self._put_body(key, _Body(len(data), sha256, lambda: data), what, if_absent=if_absent)

    async def _put_body(self, key: str, body: _Body, what: str, *, if_absent: bool) -> bool:
        headers = {"Content-Length": str(body.size), replies.CHECKSUM: body.sha256}
        if if_absent:
            headers["If-None-Match"] = "*"
        retrier = Retrier(what, self._policy, self._around, size_bytes=body.size)
        unclear, corrupt = False, 0
        while True:
            reply = await self._try("PUT", key, retrier, headers=headers, content=body.content)
            if reply is None:
                unclear = True
            elif reply.status in (200, 201, 204):
                return True
            elif reply.status == 412 and if_absent:
                return unclear and await self._holds(key, body)
            elif reply.is_corrupt_upload and (corrupt := corrupt + 1) < _CORRUPT_TRIES:
                await retrier.pause("the bytes were damaged on the way")
            else:
                raise replies.error(reply, what)

    async def _holds(self, key: str, body: _Body) -> bool:
        """Whether the object is the one we sent."""
        reply = await self._head(key, want_checksum=True)
        if reply is None:
            return False
        found = reply.headers.get(replies.CHECKSUM.lower())
        if found is None:
            raise StoreError(
                f"PUT {key}: the store does not say which bytes it holds, so the winner is unknown.",
                remedy="Read the object back and compare.",
            )
        return bool(found == body.sha256)

    # --- reading ----------------------------------------------------------------------------------------------------

    async def _read(self, key: str, start: int, length: int | None, max_bytes: int | None) -> AsyncIterator[bytes]:
        """The bytes from `start`, resumed where a connection broke, always of the one object that was there first."""
        what = f"GET {check_key(key)}"
        retrier = Retrier(what, self._policy, self._around)
        offset, stop, etag = start, None if length is None else start + length, ""
        while stop is None or offset < stop:
            headers = {}
            if offset or stop is not None:
                headers["Range"] = f"bytes={offset}-" + ("" if stop is None else str(stop - 1))
            if offset > start:
                if not etag or etag.startswith("W/"):
                    raise retrier.expired("the connection broke, and without an ETag a read cannot be resumed")
                headers["If-Range"] = etag
            response = await self._open("GET", key, retrier, headers=headers)
            if response is None:
                continue
            try:
                reply = Reply(response.status_code, response.headers)
                if reply.status == 416 and offset == start:
                    total = replies.unsatisfied_total(reply)
                    if total is not None and total <= start:
                        return
                if reply.status not in (200, 206):
                    raise replies.error(Reply(reply.status, reply.headers, await self._body(response, retrier)), what)
                extent = replies.extent(reply, what)
                if extent.start != offset:
                    changed = offset > start and reply.status == 200
                    raise (ObjectCorrupt if changed else StoreError)(
                        f"{what}: " + ("it changed while it was read." if changed else "the store ignores ranges."),
                        remedy="Read it again." if changed else "Use a store that serves ranges.",
                    )
                if max_bytes is not None and extent.total > max_bytes:
                    raise ObjectTooLarge(
                        f"{key} has {extent.total} bytes; at most {max_bytes} are allowed here.",
                        remedy="Check who wrote it.",
                    )
                if offset == start:
                    etag = response.headers.get("etag", "")
                    stop = extent.total if stop is None else min(stop, extent.total)
                assert stop is not None
                if extent.stop < stop:
                    raise StoreError(f"{what}: the store sends less than was asked for.", remedy="Check the proxy.")
                pieces = response.aiter_raw()
                while offset < stop:
                    piece = await self._next(pieces, retrier)
                    if piece is None:
                        break
                    piece = piece[: stop - offset]
                    offset += len(piece)
                    retrier.received(len(piece))
                    handed_over = self._around.clock()
                    yield piece
                    retrier.exclude(self._around.clock() - handed_over)
            finally:
                await response.aclose()

    async def _next(self, pieces: AsyncIterator[bytes], retrier: Retrier) -> bytes | None:
        """The next piece of a body, or None (after a pause) when the connection broke."""
        try:
            async with asyncio.timeout(retrier.remaining_s()):
                return await anext(pieces)
        except TimeoutError:
            raise retrier.expired("the answer stopped coming") from None
        except StopAsyncIteration:
            reason = "the answer ended early"
        except _RETRIED as e:
            reason = _describe(e)
        await retrier.pause(reason)
        return None

    async def _head(self, key: str, *, want_checksum: bool = False) -> Reply | None:
        retrier = Retrier(f"HEAD {check_key(key)}", self._policy, self._around)
        headers = {replies.WANT_CHECKSUM: "sha256"} if want_checksum else {}
        reply = await self._until_answered("HEAD", key, retrier, headers=headers)
        if reply.status == 404:
            return None
        if reply.status != 200:
            raise replies.error(reply, f"HEAD {key}")
        return reply

    # --- one exchange -----------------------------------------------------------------------------------------------

    async def _until_answered(
        self,
        method: str,
        key: str | None,
        retrier: Retrier,
        *,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
    ) -> Reply:
        while True:
            reply = await self._try(method, key, retrier, headers=headers, params=params)
            if reply is not None:
                return reply

    async def _try(
        self,
        method: str,
        key: str | None,
        retrier: Retrier,
        *,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
        content: Content | None = None,
    ) -> Reply | None:
        """One try with its whole answer; None (after a pause) when it is worth another."""
        response = await self._open(method, key, retrier, headers=headers, params=params, content=content)
        if response is None:
            return None
        try:
            return Reply(response.status_code, response.headers, await self._body(response, retrier))
        except _RETRIED as e:
            reason = _describe(e)
        finally:
            await response.aclose()
        await retrier.pause(reason)
        return None

    async def _open(
        self,
        method: str,
        key: str | None,
        retrier: Retrier,
        *,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
        content: Content | None = None,
    ) -> httpx.Response | None:
        """Send, and return the answer with its body unread; None (after a pause) when it is worth another try."""
        url = self._base if key is None else f"{self._base}/{key}"
        retry_after: str | None = None
        try:
            async with asyncio.timeout(retrier.remaining_s()):
                request = self._client.build_request(
                    method, url, headers=headers, params=params, content=content() if content else None
                )
                response = await self._client.send(request, stream=True)
        except TimeoutError:
            raise retrier.expired("no answer came") from None
        except _RETRIED as e:
            reason = _describe(e)
        except httpx.HTTPError as e:
            raise StoreError(f"{method} {url}: {_describe(e)}.", remedy="Check the store's address.") from e
        else:
            try:
                if response.status_code not in replies.RETRY_STATUSES:
                    replies.refuse_encoded(response.headers, f"{method} {key or 'listing'}")
                    return response
            except BaseException:
                await response.aclose()
                raise
            reason = f"HTTP {response.status_code}"
            retry_after = response.headers.get("retry-after")
            await response.aclose()
        await retrier.pause(reason, retry_after)
        return None

    async def _body(self, response: httpx.Response, retrier: Retrier) -> bytes:
        """The body of a small answer."""
        pieces, size = [], 0
        try:
            async with asyncio.timeout(retrier.remaining_s()):
                async for piece in response.aiter_raw():
                    size += len(piece)
                    if size > _MAX_REPLY_BYTES:
                        raise StoreError("the store's answer is too long.", remedy="Check the store's address.")
                    pieces.append(piece)
        except TimeoutError:
            raise retrier.expired("the answer stopped coming") from None
        return b"".join(pieces)


def _not_found(key: str) -> ObjectNotFound:
    return ObjectNotFound(f"no object has the key {key}.", remedy="It may have been pruned; resolve again.")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:200]


def _open_file(path: Path) -> Reader:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return Reader(path.name, fd, os.fstat(fd))
    except OSError as e:
        raise InvalidInput(f"cannot read the file to store, {path.name}: {e.strerror}.") from e
