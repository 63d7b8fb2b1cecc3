"""Shared fixtures, and the sharing out of the tests. Async tests run on asyncio through anyio's plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.sharing import Groups


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
