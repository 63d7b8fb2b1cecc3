"""A real server on loopback in a thread, and a proxy that breaks connections, for tests of HTTP clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from app import problems
from app.api.store import store_router
from app.bodies import DrainUnread
from app.metrics import Metrics
from transports.store.local import LocalStore


def store_app(store: LocalStore | Path, *, max_object_bytes: int = 1 << 30) -> FastAPI:
    """An application that serves `/store` and nothing else."""
    app = FastAPI()
    problems.install(app)
    own = store if isinstance(store, LocalStore) else LocalStore(store)
    app.include_router(store_router(own, Metrics(), max_object_bytes=max_object_bytes))
    app.add_middleware(problems.UnexpectedErrors)
    app.add_middleware(DrainUnread)
    return app


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """The base URL of a server that runs while the context is open; open requests have ended afterwards."""
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", access_log=False, ws="none", lifespan="off")
    server = _Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        assert server.up.wait(30)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        sock.close()


class CuttingProxy:
    """Forwards to a server, but cuts each connection after it has passed `after` bytes back. On the caller's loop."""

    def __init__(self, target_port: int, after: int) -> None:
        self._target = target_port
        self._after = after
        self.connections = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        sending = asyncio.ensure_future(_pump(reader, up_writer))
        left = self._after
        while left and (data := await up_reader.read(min(left, 65536))):
            writer.write(data)
            await writer.drain()
            left -= len(data)
        sending.cancel()
        up_writer.close()
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
