"""A rank of a group as a process of its own: JSON commands on standard input, one answer a line.

Commands die on request: `die` names a point ("gathered", "address", "counts", "entries", "receive N") and a signal that
the process sends itself there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.transports.p2p.synthetic import make_plan, make_version
from transports.p2p.base import Bytes, Carrier, Pending
from transports.p2p.errors import ExchangeFailed, P2PError
from transports.p2p.gloo import connect_gloo
from transports.p2p.process_group import connect, host_store
from transports.p2p.rendezvous import Meeting
from transports.p2p.rounds import agree, receive_version, send_version

HOST = "127.0.0.1"


def signal_myself(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


class Mortal(Carrier):
    """A carrier whose process gets a signal once it has posted its n-th receive."""

    def __init__(self, inner: Carrier, number: int, fatal: Callable[[], None]) -> None:
        self._inner, self._left, self._fatal = inner, number, fatal

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def send(self, data: Bytes, to: int) -> Pending:
        return self._inner.send(data, to)

    def receive(self, into: Bytes, source: int) -> Pending:
        pending = self._inner.receive(into, source)
        if self._left == 0:
            self._fatal()
        self._left -= 1
        return pending

    def gather(self, data: bytes, deadline: float) -> list[bytes]:
        return self._inner.gather(data, deadline)

    def close(self) -> None:
        self._inner.close()


class Rank:
    def __init__(self) -> None:
        self.store: Any = None
        self.carrier: Carrier | None = None

    def host(self, command: dict[str, Any]) -> dict[str, Any]:
        self.store, port = host_store(HOST)
        return {"port": port}

    def connect(self, command: dict[str, Any]) -> dict[str, Any]:
        c = command
        address = (HOST, c["port"])
        if "die" in c:
            self._die_connecting(c, address)
        self.carrier = connect(address, c["group"], c["rank"], c["size"], timeout_s=c["timeout_s"])
        return {}

    def _die_connecting(self, c: dict[str, Any], address: tuple[str, int]) -> None:
        """Go as far as to the point, get the signal there, and if it was one that lets us live, go on."""
        point, name = c["die"]
        deadline = time.monotonic() + c["timeout_s"]
        meeting = Meeting(address, c["group"], c["rank"], c["size"], deadline)
        meeting.gather(b"", deadline)
        if point == "gathered":
            signal_myself(name)
        meeting.store = mortal_store(meeting.store, lambda: signal_myself(name))
        connect_gloo(meeting, HOST, deadline)
        raise AssertionError("the point was never reached, or a stop was not noticed")

    def exchange(self, command: dict[str, Any]) -> dict[str, Any]:
        c = command
        carrier = self.carrier
        assert carrier is not None
        plan = make_plan(c["seed"], c["senders"], c["receivers"], c["operations"], pairs=c.get("pairs", 1.0))
        version = make_version(c["seed"], plan, c["version"], c.get("changed"))
        point, name = c.get("die", ("", ""))
        fatal = lambda: signal_myself(name)  # noqa: E731
        agree(carrier, plan, 60.0) if c["version"] == 0 else None
        if carrier.rank < plan.senders:
            left = [c.get("after", 0)]

            def before(verb: str, operation: Any) -> None:
                if verb == point:
                    if left[0] == 0:
                        fatal()
                    left[0] -= 1

            version.before = before
            reports = send_version(
                carrier, plan, carrier.rank, version.head, version,
                bucket_bytes=c["bucket"], deadline_s=c["deadline_s"],
            )  # fmt: skip
            return {"sent": len(reports)}
        if point.startswith("receive"):
            carrier = Mortal(carrier, int(point.split()[1]), fatal)
        side = carrier.rank - plan.senders
        got = receive_version(
            carrier, plan, side, version.head,
            bucket_bytes=c["bucket"], deadline_s=c["deadline_s"], max_bytes=1 << 40,
        )  # fmt: skip
        return {"right": version.matches(got, plan, side)}

    def close(self, command: dict[str, Any]) -> dict[str, Any]:
        if self.carrier is not None:
            self.carrier.close()
            self.carrier = None
        return {"done": True}


def mortal_store(inner: Any, fatal: Callable[[], None]) -> Any:
    """A store that calls `fatal` once this member's address for Gloo is in it."""
    from torch.distributed import Store

    class MortalStore(Store):
        def __init__(self) -> None:
            super().__init__()

        def set(self, key: str, value: Any) -> None:
            inner.set(key, value)
            fatal()

        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name) if name.startswith("_") or name == "set" else getattr(inner, name)

    return MortalStore()


def main() -> None:
    rank = Rank()
    for line in sys.stdin:
        command = json.loads(line)
        started = time.monotonic()
        try:
            answer = getattr(rank, command.pop("do"))(command)
        except P2PError as error:
            answer = {"error": type(error).__name__, "member": error.member, "said": str(error)}
            if isinstance(error, ExchangeFailed):
                answer["failures"] = {str(m): type(e).__name__ for m, e in error.failures.items()}
        if "done" not in answer:
            answer["seconds"] = time.monotonic() - started
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    import torch.distributed  # noqa: F401  # loaded before the first command, so that no deadline includes it

    main()
