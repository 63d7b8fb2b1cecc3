"""Workers for tests: forked from a process that has imported everything, since an import takes longer than most tests.

`python -m tests.support.nursery SOCKET` forks a worker for each connection to the socket, between the descriptors that
come with it, says its pid, and at its end its exit code. One invariant: a worker ends when the daemon that asked for it
closes the connection or dies, and all end with the process that started the nursery.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from app.worker.launching import WorkerProcess
from tests.support.processes import WORKER_SAYS

ROOT = Path(__file__).parents[2]
MESSAGE_BYTES = 1 << 10


# --- the daemon's end -------------------------------------------------------------------------------------------------


class ForkedWorker:
    """A worker that the nursery at `path` has forked. What it logs goes to this process's stderr."""

    def __init__(self, connection: socket.socket, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._connection = connection
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.pid = pid
        self.stdin: asyncio.StreamWriter | None = writer
        self.stdout: asyncio.StreamReader | None = reader
        asyncio.get_running_loop().add_reader(connection, self._on_end)

    @classmethod
    async def launch(cls, path: str) -> WorkerProcess:
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(path)
        (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
        socket.send_fds(connection, [b"{}"], [its_in, its_out, 2])
        os.close(its_in)
        os.close(its_out)
        pid = json.loads(connection.recv(MESSAGE_BYTES))["pid"]
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_in, "rb", 0))
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(our_out, "wb", 0)
        )
        connection.setblocking(False)
        print(WORKER_SAYS, pid, file=sys.stderr, flush=True)
        return cls(connection, pid, reader, asyncio.StreamWriter(transport, protocol, None, loop))

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if self._ended.done():
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGKILL)  # not reaped before the nursery has said so

    def _on_end(self) -> None:
        said = self._connection.recv(MESSAGE_BYTES)
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        self._ended.set_result(json.loads(said)["code"] if said else -signal.SIGKILL)


# --- the test process's end -------------------------------------------------------------------------------------------


@cache
def nursery() -> str:
    """The socket of this test process's nursery, which is started when it is first asked for."""
    path = str(Path(tempfile.mkdtemp(prefix="dte-nursery-")) / "socket")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.nursery", path],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # ends with this process
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return path


# --- the nursery ------------------------------------------------------------------------------------------------------


def main(path: str) -> None:
    """Serve until standard input ends."""
    _prepare()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for source in (sys.stdin, listener, wake):
        selector.register(source, selectors.EVENT_READ)
    workers: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                os.unlink(path)
                os.rmdir(os.path.dirname(path))
                for pid in workers:
                    os.kill(pid, signal.SIGKILL)
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                pid = _fork(connection, [listener, wake, woken, *workers.values()])
                if pid is None:
                    continue
                workers[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj is wake:
                wake.recv(MESSAGE_BYTES)
                _reap(workers, selector)
            elif key.data in workers:  # the daemon is gone
                os.kill(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)


def _prepare() -> None:
    """Import and compile what workers need; no thread may be running afterwards."""
    import torch

    torch.set_num_threads(1)

    import app.worker.rank
    import app.worker.sending  # noqa: F401
    from engine.optimizers import registry, selftest

    for name in registry.names():
        selftest.choose(name, None)


def _fork(connection: socket.socket, others: list[socket.socket]) -> int | None:
    _, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
    if len(fds) != 3:
        connection.close()
        return None
    pid = os.fork()
    if pid == 0:
        _become(fds, [connection, *others])
    for fd in fds:
        os.close(fd)
    connection.send(json.dumps({"pid": pid}).encode())
    return pid


def _become(fds: list[int], close: list[socket.socket]) -> None:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for n, fd in enumerate(fds):
            os.dup2(fd, n)
            os.close(fd)
        for one in close:
            one.close()
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        from app.worker.server import serve

        serve()
    finally:
        os._exit(1)


def _reap(workers: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while workers:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        connection = workers.pop(pid)
        with contextlib.suppress(KeyError):
            selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
        connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
