"""The worker's loop: requests in, answers out, each request in the thread that it belongs to.

One invariant: every request is answered once, and an error nobody foresaw ends the request, never the loop.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NoReturn

from pydantic import TypeAdapter, ValidationError

from app.worker import frames
from app.worker import protocol as p
from engine.errors import DteError, InvalidInput, StateConflict

log = logging.getLogger("dte.worker")

_REQUEST: TypeAdapter[p.Request] = TypeAdapter(p.Request)
_BESIDE = {
    "encode": "encode",
    "p2p_host": "p2p",
    "p2p_connect": "p2p",
    "p2p_send": "p2p",
    "p2p_slices": "control",
    "p2p_pin": "control",
    "p2p_leave": "control",
}
"""Which thread answers a request; all others are tensor work."""


class Server:
    """Answers requests: tensor work in one thread, in order; encoding, and what goes on in a P2P group, each in one of
    its own beside it. What must not wait for those has a fourth."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._in = source
        self._out = sink
        self._write_lock = threading.Lock()
        self._tensor = ThreadPoolExecutor(1, "tensor")
        self._pools = {
            "encode": ThreadPoolExecutor(1, "encode"),
            "p2p": ThreadPoolExecutor(1, "p2p"),
            "control": ThreadPoolExecutor(1, "control"),
        }
        self._rank: Any = None
        self._group: Any = None

    def run(self) -> None:
        """Serve until stdin ends."""
        while (message := frames.read(self._in)) is not None:
            pool = self._pools.get(_BESIDE.get(str(message.get("op")), ""), self._tensor)
            pool.submit(self._answer, message)

    def _send(self, message: dict[str, Any]) -> None:
        data = frames.pack(message)
        with self._write_lock:
            self._out.write(data)
            self._out.flush()

    def _answer(self, message: dict[str, Any]) -> None:
        number = message.pop("id", None)
        try:
            try:
                request = _REQUEST.validate_python(message)
            except ValidationError as error:
                raise InvalidInput(f"not a worker request: {error.error_count()} errors.") from None
            reply = self._dispatch(number, request)
            self._send({"id": number, "ok": reply.model_dump(mode="json")})
        except DteError as error:
            self._send({"id": number, "error": p.error_to_json(error)})
        except Exception as error:
            # An error nobody foresaw. What is remembered changes only when an operation succeeds, so the worker can go
            # on; the daemon gives up this one request.
            log.exception("a request failed")
            failed = p.WorkerFailed(f"the worker failed: {type(error).__name__}: {error}.", remedy=p.SEE_LOG)
            self._send({"id": number, "error": p.error_to_json(failed)})

    def _dispatch(self, number: Any, request: p.Request) -> Any:
        if isinstance(request, p.Open):
            from app.worker.rank import RankWorker

            gc.freeze()
            gc.enable()
            worker = RankWorker(request)
            opened = worker.open()
            self._rank = worker
            return opened
        rank = self._rank
        if rank is None:
            raise StateConflict("the first request must be `open`.")
        if request.op.startswith("p2p_"):
            return self._take_part(rank, request)
        if isinstance(request, p.Encode):
            return rank.encode(request, lambda c: self._send({"id": number, "chunk": c.model_dump(mode="json")}))
        return getattr(rank, request.op)(request)

    def _take_part(self, rank: Any, request: Any) -> Any:
        if isinstance(request, p.P2PSlices):
            from app.worker.sending import GroupSender

            if self._group is None:
                self._group = GroupSender(rank.shapes)
            return self._group.slices()
        if self._group is None:
            if isinstance(request, p.P2PLeave):
                return p.Done()
            raise StateConflict("this worker has not been asked yet what it can send.")
        if isinstance(request, p.P2PPin):
            return self._group.pin(*rank.in_flight(request.version))
        return getattr(self._group, request.op.removeprefix("p2p_"))(request)


def serve() -> NoReturn:
    """Be the worker between standard input and output, to the end of the process."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(0, "rb", closefd=False) as source:
        Server(source, _private_stdout()).run()
    os._exit(0)


def _private_stdout() -> BinaryIO:
    """The real stdout for frames; whatever else prints goes to stderr from now on."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out
