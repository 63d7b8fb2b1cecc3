"""Calls that keep no deadline of their own."""

from __future__ import annotations

import threading
import time

import pytest

from transports.p2p.bounded import within
from transports.p2p.errors import ExchangeTimeout

pytestmark = pytest.mark.p2p


def test_result_and_error_come_through() -> None:
    assert within(time.monotonic() + 60, lambda: 3, lambda _: None, "") == 3
    with pytest.raises(ZeroDivisionError):
        within(time.monotonic() + 60, lambda: 1 // 0, lambda _: None, "")


def test_what_comes_late_is_discarded() -> None:
    go, discarded, kept = threading.Event(), threading.Event(), []

    def late() -> int:
        go.wait(60)
        return 5

    with pytest.raises(ExchangeTimeout, match="too slow"):
        within(time.monotonic() + 0.05, late, lambda x: (kept.append(x), discarded.set()), "too slow")
    go.set()
    assert discarded.wait(60)
    assert kept == [5]
