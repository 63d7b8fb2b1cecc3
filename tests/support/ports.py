"""Ports for servers that tests start in other processes.

One invariant: no two ports handed out are the same, in this process and in those that run other tests at the same time.
They lie below those the system gives out by itself, so nothing takes one before its server binds it: that can be a
minute later, and again after the server was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator

FIRST, END = 10_000, 32_000


def ports_of(worker: int, workers: int) -> range:
    """The ports of one of the processes that share out the tests."""
    size = (END - FIRST) // workers
    first = FIRST + size * (worker % workers)  # a process that replaces a crashed one has a number above all others
    return range(first, first + size)


def _own() -> Iterator[int]:
    """The ports of this process, in turn, from a random one on: another test run may be on this machine."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    ports = ports_of(int(worker), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    start = random.randrange(len(ports))
    return itertools.cycle((*ports[start:], *ports[:start]))


_ports = _own()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    for port in _ports:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("an endless iterator ended")
