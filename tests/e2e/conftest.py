"""One daemon for all tests of this folder; every test publishes a run of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.line import daemon


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that keeps whatever it can sparse, so that the proofs have something to prove."""
    running = daemon(tmp_path_factory.mktemp("daemon"), dense_fraction=1.0)
    yield running.url
    running.end()
