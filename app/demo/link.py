"""The demo's own line between trainer and receiver process: one JSON line each way per call, over a Unix socket.

It carries what an RL framework would send its rollout engine (prompts out, tokens back), and at the end asks for a copy
of the live weights by a way that has nothing to do with dte's. Invariant: no weights ever travel *to* a receiver here.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import DteError

MAX_LINE_BYTES = 8 << 20

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class ReceiverFailed(DteError):
    """A receiver process did not answer, or answered with an error."""

    code = "demo-receiver-failed"


class LinkServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Serves named operations to processes of the same user until closed."""

    daemon_threads = True

    def __init__(self, path: Path, operations: Mapping[str, Handler]) -> None:
        self.operations = dict(operations)
        path.unlink(missing_ok=True)
        before = os.umask(0o077)
        try:
            super().__init__(str(path), _Connection)
        finally:
            os.umask(before)


class _Connection(socketserver.StreamRequestHandler):
    server: LinkServer

    def handle(self) -> None:
        while line := self.rfile.readline(MAX_LINE_BYTES + 1):
            self.wfile.write(json.dumps(self._answer(line)).encode() + b"\n")
            self.wfile.flush()

    def _answer(self, line: bytes) -> dict[str, Any]:
        if len(line) > MAX_LINE_BYTES:
            return {"error": "request too long"}
        try:
            request = json.loads(line)
            operation = self.server.operations[request.pop("op")]
            return operation(request)
        except DteError as e:
            return {"error": str(e)}
        except Exception as e:
            # The caller is another process: whatever went wrong must reach it as a message, or it would wait forever.
            return {"error": f"{type(e).__name__}: {e}"}


class Link:
    """The caller's side: one connection per receiver, one call at a time."""

    def __init__(self, name: str, path: Path, timeout_s: float = 120.0) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as e:
            self._socket.close()
            raise ReceiverFailed(f"cannot reach the receiver process {name}: {e}.") from None
        self._file = self._socket.makefile("rb")

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Ask for an operation. ReceiverFailed when the process is gone, too slow, or says no."""
        try:
            self._socket.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
            line = self._file.readline(MAX_LINE_BYTES)
        except OSError as e:
            raise ReceiverFailed(f"the receiver process {self.name} did not answer {op!r}: {e}.") from None
        if not line:
            raise ReceiverFailed(f"the receiver process {self.name} ended during {op!r}; see its log.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ReceiverFailed(f"the receiver process {self.name} refused {op!r}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()
