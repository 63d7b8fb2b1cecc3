"""What tests of a trainer's side begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.clients.trainer_double import FakeDaemon


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    double = FakeDaemon()
    yield double
    double.close()


@pytest.fixture
def net() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)
