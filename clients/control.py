"""The control plane's view of a run: which versions exist, who has installed them, what is happening now.

`ControlClient` and `AsyncControlClient` are twins with one vocabulary. One invariant: neither imports torch, so a
scheduler or a dashboard can use them anywhere.

    with ControlClient("http://127.0.0.1:7411", run="my-run") as control:
        info = control.wait_for_version(3, timeout_s=60)
        control.wait_for_receivers(3, timeout_s=60)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Final, Self

import httpx
from pydantic import TypeAdapter

from clients.errors import WaitTimeout, error_for
from clients.http import (
    AsyncSender,
    Call,
    Options,
    Sender,
    one,
    one_or_none,
    read_problem,
    unavailable,
)
from clients.protocol import Event, Job, ReceiverInfo, VersionInfo, Versions

DEFAULT_URL: Final = "http://127.0.0.1:7411"
LONG_POLL_S: Final = 20.0
RECEIVER_POLL_S: Final = 0.2

_RECEIVERS: Final = TypeAdapter(list[ReceiverInfo])


# --- calls, shared by both twins --------------------------------------------------------------------------------------


def _versions(run: str | None, limit: int | None) -> Call[Versions]:
    return Call("GET", "/versions", one(Versions), _run(run) | ({} if limit is None else {"limit": str(limit)}))


def _version(number: int, run: str | None) -> Call[VersionInfo]:
    return Call("GET", f"/versions/{number}", one(VersionInfo), _run(run))


def _latest(after: int | None, wait_s: float, run: str | None) -> Call[VersionInfo | None]:
    params: dict[str, str | int | float] = {**_run(run), "wait": wait_s}
    if after is not None:
        params["after"] = after
    return Call("GET", "/versions/latest", one_or_none(VersionInfo), params, wait_s=wait_s)


def _receivers(run: str | None) -> Call[list[ReceiverInfo]]:
    return Call("GET", "/receivers", lambda r: _RECEIVERS.validate_json(r.content), _run(run))


def _job(job_id: str, wait_s: float) -> Call[Job]:
    return Call("GET", f"/jobs/{job_id}", one(Job), {"wait": wait_s}, wait_s=wait_s)


def _run(run: str | None) -> dict[str, str | int | float]:
    return {} if run is None else {"run": run}


def _behind(receivers: list[ReceiverInfo], version: int, count: int) -> str:
    """Why `receivers` do not all serve `version` or newer yet; empty when they do."""
    late = [r for r in receivers if r.installed is None or r.installed < version or not r.ready]
    if late:
        return "; ".join(
            f"{r.name}: {r.state}, installed {r.installed}" + (f", {r.last_error}" if r.last_error else "")
            for r in late
        )
    return "" if len(receivers) >= count else f"{len(receivers)} of {count} receivers are registered"


def _version_timeout(version: int, timeout_s: float) -> WaitTimeout:
    return WaitTimeout(
        f"version {version} was not committed within {timeout_s:g} s.",
        remedy="See GET /versions ('degraded') and the jobs of the trainer's daemon for what it waits for.",
    )


def _receivers_timeout(version: int, timeout_s: float, why: str) -> WaitTimeout:
    return WaitTimeout(
        f"not every receiver serves version {version} after {timeout_s:g} s: {why}.",
        remedy="See GET /receivers for each one's last error.",
    )


class _EventParser:
    """Server-sent events, line by line: collects `data:` lines and gives an Event at each empty line."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def feed(self, line: str) -> Event | None:
        if line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        elif not line and self._data:
            text, self._data = "\n".join(self._data), []
            return Event.model_validate_json(text)
        return None


def _event_headers(after: int | None) -> dict[str, str]:
    headers = {"Accept": "text/event-stream"}
    if after is not None:
        headers["Last-Event-ID"] = str(after)
    return headers


# --- the twins ------------------------------------------------------------------------------------------------------


class ControlClient:
    """Synchronous client of one daemon. All times in seconds.

    Errors are `clients.errors`: DaemonUnavailable when it does not answer, ApiError subclasses for its problem
    documents, WaitTimeout when something waited for did not happen.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        run: str | None = None,
        token: str | None = None,
        options: Options | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`run` None means the daemon's default run. `transport` replaces the network in tests."""
        self.run = run
        self._sender = Sender(url, token=token, options=options, transport=transport)

    def versions(self, *, limit: int | None = None) -> Versions:
        """The newest `limit` versions (1 to 1000, left out: 100), newest last."""
        return self._sender.send(_versions(self.run, limit))

    def version(self, number: int) -> VersionInfo:
        """One committed version; NotFound if there is none of that number."""
        return self._sender.send(_version(number, self.run))

    def latest(self, *, after: int | None = None, wait_s: float = 0.0) -> VersionInfo | None:
        """The newest version, or None when there is none newer than `after` within `wait_s`."""
        return self._sender.send(_latest(after, wait_s, self.run))

    def wait_for_version(self, version: int, timeout_s: float) -> VersionInfo:
        """Wait until a version numbered `version` or higher is committed; returns the newest.

        A number can be consumed by an abort, so the one returned may be higher.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            info = self.latest(after=version - 1 if version else None, wait_s=min(left_s, LONG_POLL_S))
            if info is not None and info.version >= version:
                return info
            if time.monotonic() >= deadline_s:
                raise _version_timeout(version, timeout_s)
            if info is not None:
                time.sleep(min(RECEIVER_POLL_S, max(0.0, deadline_s - time.monotonic())))

    def receivers(self) -> list[ReceiverInfo]:
        """Every registered receiver of the run."""
        return self._sender.send(_receivers(self.run))

    def wait_for_receivers(self, version: int, timeout_s: float, *, count: int = 1) -> list[ReceiverInfo]:
        """Wait until at least `count` receivers are registered and all serve `version` or newer, ready."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            receivers = self.receivers()
            why = _behind(receivers, version, count)
            if not why:
                return receivers
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise _receivers_timeout(version, timeout_s, why)
            time.sleep(min(RECEIVER_POLL_S, left_s))

    def job(self, job_id: str, *, wait_s: float = 0.0) -> Job:
        """A job as it is now, or as it is after its next change within `wait_s`."""
        return self._sender.send(_job(job_id, wait_s))

    def events(self, *, after: int | None = None) -> Iterator[Event]:
        """State changes as they happen, those after event id `after` first. Ends when the daemon ends the stream.

        DaemonUnavailable when the connection is lost: call again with the last id seen.
        """
        sender = self._sender
        timeout = httpx.Timeout(sender.options.answer_s, connect=sender.options.connect_s, read=None)
        try:
            with sender.client.stream(
                "GET", "/events", params=_run(self.run), headers=_event_headers(after), timeout=timeout
            ) as response:
                if not response.is_success:
                    response.read()
                    raise error_for(read_problem(response))
                parser = _EventParser()
                for line in response.iter_lines():
                    event = parser.feed(line)
                    if event is not None:
                        yield event
        except httpx.TransportError as e:
            raise unavailable(sender.base_url, e) from e

    def close(self) -> None:
        """Close the connections."""
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class AsyncControlClient:
    """`ControlClient` for asyncio: the same methods, awaited."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        run: str | None = None,
        token: str | None = None,
        options: Options | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.run = run
        self._sender = AsyncSender(url, token=token, options=options, transport=transport)

    async def versions(self, *, limit: int | None = None) -> Versions:
        """As `ControlClient.versions`."""
        return await self._sender.send(_versions(self.run, limit))

    async def version(self, number: int) -> VersionInfo:
        """As `ControlClient.version`."""
        return await self._sender.send(_version(number, self.run))

    async def latest(self, *, after: int | None = None, wait_s: float = 0.0) -> VersionInfo | None:
        """As `ControlClient.latest`."""
        return await self._sender.send(_latest(after, wait_s, self.run))

    async def wait_for_version(self, version: int, timeout_s: float) -> VersionInfo:
        """As `ControlClient.wait_for_version`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            info = await self.latest(after=version - 1 if version else None, wait_s=min(left_s, LONG_POLL_S))
            if info is not None and info.version >= version:
                return info
            if time.monotonic() >= deadline_s:
                raise _version_timeout(version, timeout_s)
            if info is not None:
                await asyncio.sleep(min(RECEIVER_POLL_S, max(0.0, deadline_s - time.monotonic())))

    async def receivers(self) -> list[ReceiverInfo]:
        """As `ControlClient.receivers`."""
        return await self._sender.send(_receivers(self.run))

    async def wait_for_receivers(self, version: int, timeout_s: float, *, count: int = 1) -> list[ReceiverInfo]:
        """As `ControlClient.wait_for_receivers`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            receivers = await self.receivers()
            why = _behind(receivers, version, count)
            if not why:
                return receivers
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise _receivers_timeout(version, timeout_s, why)
            await asyncio.sleep(min(RECEIVER_POLL_S, left_s))

    async def job(self, job_id: str, *, wait_s: float = 0.0) -> Job:
        """As `ControlClient.job`."""
        return await self._sender.send(_job(job_id, wait_s))

    async def events(self, *, after: int | None = None) -> AsyncIterator[Event]:
        """As `ControlClient.events`."""
        sender = self._sender
        timeout = httpx.Timeout(sender.options.answer_s, connect=sender.options.connect_s, read=None)
        try:
            async with sender.client.stream(
                "GET", "/events", params=_run(self.run), headers=_event_headers(after), timeout=timeout
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_for(read_problem(response))
                parser = _EventParser()
                async for line in response.aiter_lines():
                    event = parser.feed(line)
                    if event is not None:
                        yield event
        except httpx.TransportError as e:
            raise unavailable(sender.base_url, e) from e

    async def aclose(self) -> None:
        """Close the connections."""
        await self._sender.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
