"""Shared fixtures, and the sharing out of the tests. Async tests run on asyncio through anyio's plugin."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.sharing import Groups

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell. Processes that tests start would inherit it, and some are interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups | None:
    from tests.support.sharing import Groups

    return Groups(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.support.sharing import in_order

        items[:] = in_order(items)
