"""A daemon over HTTP in the test's process, and a trainer that says to it what the test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.main import create_app
from tests.support.publishing import settings_for


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(settings_for(tmp_path, roles="store,publisher", run="run"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://dte", timeout=120) as made,
    ):
        yield made
