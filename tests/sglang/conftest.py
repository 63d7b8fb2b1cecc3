"""Servers are slow to start: one per module and checkpoint; each test follows a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sglang.checkpoints import make
from tests.support.sglang.server import Server, needs_sglang
from tests.support.sglang.world import World


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(1200))
            item.add_marker(needs_sglang)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sgl")


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Callable[..., Server]]:
    """Start a server without waiting for it; all end with the module."""
    servers: list[Server] = []

    def begin(model: Path, **more: Any) -> Server:
        servers.append(Server(model, folder, **more))
        return servers[-1]

    yield begin
    for server in servers:
        server.end()


@pytest.fixture(scope="module")
def qwen3(folder: Path) -> Path:
    return make("qwen3", folder)


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], qwen3: Path) -> Server:
    return start(qwen3).wait_ready()


@pytest.fixture
def worlds(folder: Path) -> Iterator[Callable[..., World]]:
    """Make a run with its daemon; they end with the test."""
    made: list[World] = []

    def begin(base: Path, **more: Any) -> World:
        made.append(World(folder, base, **more))
        return made[-1]

    yield begin
    for world in made:
        world.end()
