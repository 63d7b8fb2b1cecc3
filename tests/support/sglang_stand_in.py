"""Stand-ins for an SGLang server: its HTTP calls, and the sockets of its ranks with scripted answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from clients.rollout.protocol import HEADER_BYTES, ErrorBody, ReceiverError, frame_length
from clients.rollout.sglang.call import KEY, EngineAnswer, answer_text

GOOD: dict[str, Any] = {
    "dp_size": 1,
    "pp_size": 1,
    "nnodes": 1,
    "speculative_algorithm": None,
    "enable_hierarchical_cache": False,
    "internal_states": [{KEY: {"protocol": 1, "boot": "b", "sockets": ["/nowhere.sock"], "error": None}}],
}


class StandIn:
    """Answers `GET /server_info` with `info`, or with `raw` (status, body) where that is set.

    `said` has the path and the body of every POST, `keys` the Authorization header by path. `update`: the plugin's
    answer to an update call.
    """

    def __init__(self) -> None:
        self.info: Any = dict(GOOD)
        self.raw: tuple[int, bytes] | None = None
        self.statuses: dict[str, int] = {}
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.keys: dict[str, str | None] = {}
        self.update: Callable[[dict[str, Any]], EngineAnswer] = lambda _: EngineAnswer(phases=["clean"])
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/server_info" and outer.raw is not None:
                    self.answer(*outer.raw)
                    return
                found = outer.info if self.path == "/server_info" else {"model_path": "/m", "weight_version": "default"}
                self.answer(200, json.dumps(found).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.said.append((self.path, body))
                found: dict[str, Any] = {}
                if self.path == "/update_weights_from_disk":
                    found = {"message": answer_text(outer.update(body["manifest"][KEY]))}
                self.answer(outer.statuses.get(self.path, 200), json.dumps(found).encode())

            def answer(self, status: int, data: bytes) -> None:
                outer.keys[self.path] = self.headers["Authorization"]
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def ops(self) -> list[str]:
        """What was asked, in order: `pause-<mode>`, `continue`, and the update calls' operations."""
        out = []
        for path, body in self.said:
            if path == "/pause_generation":
                out.append(f"pause-{body['mode']}")
            elif path == "/continue_generation":
                out.append("continue")
            elif path == "/update_weights_from_disk":
                out.append(body["manifest"][KEY]["op"])
        return out


class Rank:
    """The socket of one rank with `tensors`, their `digests`, and converter `units`. `status` is what it answers;
    `refuse`: the errors of an operation's next calls (None: it is answered)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.status: dict[str, Any] = {
            "phase": "clean", "version": None, "step": None, "target": None, "generation": 0, "fence": 1, "ready": False
        }  # fmt: skip
        self.tensors: list[dict[str, Any]] = []
        self.units: list[dict[str, Any]] = []
        self.digests: dict[str, str] = {}
        self.refuse: dict[str, list[ReceiverError | None]] = {}
        self.seen: list[str] = []
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Rank:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while True:
                length = frame_length(await reader.readexactly(HEADER_BYTES))
                asked = json.loads(await reader.readexactly(length))
                data = json.dumps({"id": asked["id"]} | self._answer(asked["op"], asked["body"])).encode()
                writer.write(len(data).to_bytes(HEADER_BYTES, "little") + data)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(op)
        errors = self.refuse.get(op, [])
        error = errors.pop(0) if errors else None
        if error is not None:
            return {"error": ErrorBody(code=error.code, message=error.message).model_dump()}
        if op == "describe":
            about = {"protocol": 1, "name": "x", "run": None, "pid": 1, "rank": 0, "ranks": 1}
            return {"result": about | {"tensors": self.tensors, "units": self.units}}
        if op == "audit":
            return {"result": {"digests": self.digests, "generation": self.status["generation"]}}
        if op == "adopt":
            self.status |= {"version": body["version"], "step": body["step"], "ready": True}
        return {"result": self.status}
