"""Versions arrive rank to rank, bit for bit, whatever the layouts of the two sides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.p2p.rig import Job, Model, Ranks, Rect, p2p_daemon

pytestmark = pytest.mark.p2p

DENSE: Model = {"embed": (64, 48), "q": (48, 48), "k": (16, 48), "up": (96, 48), "down": (48, 96), "norm": (48,)}


def whole(model: Model) -> list[Rect]:
    return [Rect(name) for name in model]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    running = p2p_daemon(tmp_path_factory.mktemp("p2p"))
    yield running.url
    running.end()


def test_one_to_one(url: str, tmp_path: Path) -> None:
    with Job(url, "one", DENSE, [whole(DENSE)], {"a": [whole(DENSE)]}, tmp_path) as job:
        job.until_group(1)
        for _ in range(3):
            job.step()
            found = job.ship()
            assert found is not None
            assert (job.info().path, job.info().proof) == ("p2p", "proven")
