"""A server that follows a run ends up with what loading the last version's checkpoint gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sglang.checkpoints import make
from tests.support.sglang.server import Server
from tests.support.sglang.world import World

Worlds = Callable[..., World]
Start = Callable[..., Server]
EP2 = ("--ep-size", "2")
PROBE = {"DTE_SGLANG_PROBE": "1"}


@pytest.mark.parametrize(
    ("family", "tp", "extra", "variables"),
    [
        pytest.param("qwen3-narrow", 2, (), {}, id="qwen3-narrow-2"),
        pytest.param("llama", 2, (), {}, id="llama-2"),
        pytest.param("qwen3-moe", 1, (), PROBE, id="qwen3-moe-1-probed"),
        pytest.param("qwen3-moe", 2, (), {}, id="qwen3-moe-2"),
        pytest.param("qwen3-moe", 2, EP2, {}, id="qwen3-moe-2-ep2"),
    ],
)
def test_versions_arrive_bit_for_bit(
    tmp_path: Path,
    start: Start,
    worlds: Worlds,
    family: str,
    tp: int,
    extra: tuple[str, ...],
    variables: dict[str, str],
) -> None:
    base = make(family, tmp_path)
    server = start(base, tp=tp, extra=extra, **variables).wait_ready()
    # The CPU's expert kernels fail on tokens for another rank's experts: such a server follows, but does not answer.
    answers = extra != EP2
    world = worlds(base)
    world.follow(server, answers=answers)
    world.expect_newest(server, answers=answers)
    server.end()
