"""An HTTP proxy between one daemon and the store that can hold a request back, before or after the store has done it.

A held request is complete in the proxy: it can be let through after its sender has died, answered late, or lost.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.processes import PATIENCE_S

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


class Hold:
    """The first request that matches is held: `before` the store sees it, or `after` the store has answered it."""

    def __init__(self, method: str, path: str, *, after: bool = False, every: bool = False) -> None:
        self.method = method
        self.path = re.compile(path)
        self.after = after
        self.every = every
        self.reached = threading.Event()
        self.done = threading.Event()
        self.lost = False
        self.who: StoreProxy | None = None
        self._lock = threading.Lock()
        self._go = threading.Event()

    def wait(self) -> None:
        """Until a request is held."""
        assert self.reached.wait(PATIENCE_S), f"no {self.method} {self.path.pattern} was seen"

    def release(self) -> None:
        """Let it go on."""
        self._go.set()

    def lose(self) -> None:
        """Cut its connection instead."""
        self.lost = True
        self._go.set()

    def takes(self, method: str, path: str, proxy: StoreProxy) -> bool:
        with self._lock:  # several daemons may come at once
            if method != self.method or not self.path.search(path) or (self.reached.is_set() and not self.every):
                return False
            if self.who is None:
                self.who = proxy
            self.reached.set()
        return True

    def pause(self) -> None:
        self._go.wait(PATIENCE_S)


class StoreProxy:
    """One daemon's way to the store on `port`. `url` is the store's address there."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self._port = port
        self._lock = threading.Lock()
        self._holds: list[Hold] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _pass(self) -> None:
                proxy._pass(self)

            do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _pass

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

            def handle_error(self, *_: Any) -> None:
                pass  # a killed daemon's connections

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/store"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def add(self, hold: Hold) -> None:
        with self._lock:
            self._holds.append(hold)

    def clear(self) -> None:
        with self._lock:
            for hold in self._holds:
                hold.release()
            self._holds.clear()

    def close(self) -> None:
        self.clear()
        self._server.shutdown()
        self._server.server_close()

    def _held(self, method: str, path: str) -> Hold | None:
        with self._lock:
            return next((h for h in self._holds if h.takes(method, path, self)), None)

    def _pass(self, request: BaseHTTPRequestHandler) -> None:
        method = str(request.command)
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        hold = self._held(method, request.path)
        if hold is not None and not hold.after:
            hold.pause()
        if hold is not None and hold.lost and not hold.after:
            request.close_connection = True
            return
        try:
            status, headers, answer = self._forward(method, request, body)
        except (OSError, http.client.HTTPException):
            request.close_connection = True
            return
        finally:
            if hold is not None:
                hold.done.set()
        if hold is not None and hold.after:
            hold.pause()
            if hold.lost:
                request.close_connection = True
                return
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
        lines += [f"{k}: {v}" for k, v in headers if k.lower() not in _HOP_BY_HOP]
        if status not in (204, 304):
            length = next((v for k, v in headers if k.lower() == "content-length"), len(answer))
            lines.append(f"Content-Length: {length if method == 'HEAD' else len(answer)}")
        with contextlib.suppress(OSError):
            request.wfile.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + answer)

    def _forward(
        self, method: str, request: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
            if method == "PUT":
                headers["Content-Length"] = str(len(body))
            connection.request(method, request.path, body=body or None, headers=headers)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()
