"""A deadline for calls into libraries that keep none of their own.

One invariant: `within` returns by its deadline; what it gave up on ends behind it, and its late result is handed to
`discard`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from transports.p2p.errors import CarrierClosed, ExchangeTimeout

T = TypeVar("T")


LOOK_S = 0.02
"""How often somebody who may be told to stop looks whether he was."""


def within(
    deadline: float,
    call: Callable[[], T],
    discard: Callable[[T], None],
    what: str,
    stopped: threading.Event | None = None,
) -> T:
    """The result of `call`, or what it raises; ExchangeTimeout saying `what` if it takes until after `deadline`, or
    CarrierClosed as soon as `stopped` is set."""
    lock = threading.Lock()
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []
    given_up = False

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            errors.append(error)
        else:
            with lock:
                if not given_up:
                    results.append(result)
            if not results:
                discard(result)
        done.set()

    threading.Thread(target=run, name="p2p-bounded", daemon=True).start()
    while (left_s := deadline - time.monotonic()) > 0 and not (stopped is not None and stopped.is_set()):
        if done.wait(left_s if stopped is None else min(left_s, LOOK_S)):
            break
    with lock:
        given_up = True
    if results:
        return results[0]
    if errors:
        raise errors[0]
    if stopped is not None and stopped.is_set():
        raise CarrierClosed("the group was left while its members were being connected.")
    raise ExchangeTimeout(what)
