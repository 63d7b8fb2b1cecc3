"""A proxy between a daemon and a receiver that can hold a message back, so that either end may be killed just then."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from clients.rollout.protocol import HEADER_BYTES, frame_length


class Proxy:
    """Forwards frames between `listen` and `target`; operations named in `hold` wait until `release` is set."""

    def __init__(self, listen: Path, target: Path) -> None:
        self.listen, self.target = listen, target
        self.hold: set[str] = set()
        self.seen: list[str] = []
        self.holding = asyncio.Event()
        self.release = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_unix_server(self._serve, str(self.listen))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(str(self.target))
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer, True)),
            asyncio.create_task(self._pump(up_reader, writer, False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, up_writer):
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, down: bool) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                header = await reader.readexactly(HEADER_BYTES)
                data = await reader.readexactly(frame_length(header))
                if down and await self._held(json.loads(data)["op"], reader):
                    return
                writer.write(header + data)
                await writer.drain()

    async def _held(self, op: str, reader: asyncio.StreamReader) -> bool:
        """True if the sender went away while its message was held back."""
        self.seen.append(op)
        if op not in self.hold:
            return False
        self.holding.set()
        release = asyncio.ensure_future(self.release.wait())
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([release, gone], return_when=asyncio.FIRST_COMPLETED)
        release.cancel()
        if gone.done():
            return True
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return False
