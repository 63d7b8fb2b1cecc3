"""The receiver's end of the protocol: a Unix socket served by threads, and who may command.

One invariant: at most one connection is the owner, the one that attached with the highest fence so far; every other
one may only look.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import threading
from pathlib import Path

from clients.protocol import Model
from clients.rollout import protocol as p
from clients.rollout.core import ReceiverCore
from clients.rollout.operations import Operations, error_body, operations
from clients.rollout.p2p_protocol import Delegate
from engine.errors import CodecError, DteError, InvalidInput, StateConflict

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
MAX_SOCKET_PATH = 100


class FencedOff(StateConflict):
    """Another owner has attached with a higher fence."""

    code = "fenced-off"


def _bind(path: Path) -> socket.socket:
    """Bind `path`, replacing a socket nobody listens on; InvalidInput if the path is not usable."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise InvalidInput(f"socket path is too long: {path}.", remedy="Pass a shorter `socket_path`.")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise InvalidInput(f"{path} exists and is not a socket.", remedy="Pass another `socket_path`.")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
                else:
                    raise InvalidInput(f"another receiver serves {path}.", remedy="Pass another `socket_path`.")
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener


def _peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end (Linux)."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def _receive(connection: socket.socket, count: int) -> bytes | None:
    """Exactly `count` bytes, or None at the end of the connection."""
    buffer = bytearray()
    while len(buffer) < count:
        piece = connection.recv(min(count - len(buffer), 1 << 20))
        if not piece:
            return None
        buffer += piece
    return bytes(buffer)


class ReceiverServer:
    """Serves one `ReceiverCore` until closed. Requests of one connection are answered in order.

    `serves`: the operations, where they are not the core's own.
    """

    def __init__(self, core: ReceiverCore, path: Path, serves: Operations | None = None) -> None:
        self.core = core
        self.path = path
        self._operations = operations(core) if serves is None else serves
        self._lock = threading.Lock()
        self._owner: socket.socket | None = None
        self._owner_id = ""
        self._attached = threading.Event()
        self._deposed: set[socket.socket] = set()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._listener = _bind(path)
        self._inode = path.stat().st_ino
        self._thread = threading.Thread(target=self._accept, name=f"dte-receiver-{core.name}", daemon=True)
        self._thread.start()

    @property
    def owned(self) -> bool:
        """True while an owner is attached."""
        return self._attached.is_set()

    def wait_owned(self, timeout_s: float) -> bool:
        """Wait until an owner is attached."""
        return self._attached.wait(timeout_s)

    def close(self) -> None:
        """Stop serving, end all connections, remove the socket file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_ones = list(self._connections.items())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection, thread in open_ones:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            if thread is not threading.current_thread():
                thread.join()
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:  # not a successor's
                self.path.unlink()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = self._closed or len(self._connections) >= MAX_CONNECTIONS
                if not full and _peer_uid(connection) in (os.geteuid(), 0):
                    thread = threading.Thread(
                        target=self._serve, args=(connection,), name=f"dte-receiver-{self.core.name}-c", daemon=True
                    )
                    self._connections[connection] = thread
                    thread.start()
                    continue
            log.warning("receiver %s: refused a connection (too many, or another user)", self.core.name)
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while True:
                header = _receive(connection, p.HEADER_BYTES)
                if header is None:
                    return
                data = _receive(connection, p.frame_length(header))
                if data is None:
                    return
                connection.sendall(p.pack(self._answer(connection, p.unpack(p.Request, data))))
        except CodecError as error:
            log.warning("receiver %s: dropped a connection: %s", self.core.name, error)
        except OSError:
            pass
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                self._deposed.discard(connection)
                lost = self._owner is connection
                if lost:
                    self._owner = None
                    self._attached.clear()
            connection.close()
            if lost:
                self.core.group.leave()
                self.core.owner_lost()

    def _answer(self, connection: socket.socket, request: p.Request) -> p.Response:
        try:
            if request.op == "attach":
                result: Model = self._attach(connection, p.parse_body(p.Attach, request.body))
            elif request.op in self._operations:
                kind, function, owners_only = self._operations[request.op]
                body = p.parse_body(kind, request.body)
                if owners_only or request.op == "status":
                    self._require_owner(connection, request.op, or_stranger=not owners_only)
                if isinstance(body, Delegate) and not self.owned_by(body.owner, body.fence):
                    raise FencedOff(f"'{request.op}' is only for the owner, not {body.owner!r}.")
                result = function(body)
            else:
                raise InvalidInput(f"unknown operation {request.op!r}.", remedy="See docs/receiver-contract.md.")
            return p.Response(id=request.id, result=result.model_dump(mode="json"))
        except DteError as error:
            return p.Response(id=request.id, error=error_body(error))
        except Exception as error:
            log.exception("receiver %s: %s failed", self.core.name, request.op)
            return p.Response(id=request.id, error=error_body(error))

    def owned_by(self, owner: str, fence: int) -> bool:
        """True if `owner` is attached with `fence`."""
        with self._lock:
            return self._owner is not None and (owner, fence) == (self._owner_id, self.core.fence)

    def _attach(self, connection: socket.socket, body: p.Attach) -> p.Status:
        self.core.check_owner_run(body.run)
        with self._lock:
            again = body.fence == self.core.fence and body.owner == self._owner_id
            if body.fence <= self.core.fence and not again:
                raise FencedOff(
                    f"fence {body.fence} is not above {self.core.fence}, which {self._owner_id!r} attached with.",
                    remedy="Only the newest daemon may own a receiver; register it again at the one that should.",
                )
            before = self._owner
            self._owner, self._owner_id, self.core.fence = connection, body.owner, body.fence
            self._attached.set()
            self._deposed.discard(connection)
            if before is not None and before is not connection:
                self._deposed.add(before)
        self.core.follow(body.run)
        self.core.owner_present()
        return self.core.status()

    def _require_owner(self, connection: socket.socket, op: str, *, or_stranger: bool = False) -> None:
        """FencedOff for anybody else. `or_stranger`: only for who was the owner, and must not think it still is."""
        with self._lock:
            if self._owner is not connection and not (or_stranger and connection not in self._deposed):
                raise FencedOff(f"'{op}' is only for the owner, {self._owner_id or 'nobody yet'!r}.")
