"""A server that follows a run ends up with what one started from the last version's checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.sglang.checkpoints import make, write
from tests.support.sglang.server import Server
from tests.support.sglang.world import World

Worlds = Callable[..., World]
Start = Callable[..., Server]
VERSIONS = 5


@pytest.mark.parametrize(
    ("family", "tp", "extra"),
    [
        ("qwen3", 1, ()),
        ("qwen3", 2, ()),
        ("qwen3-narrow", 2, ()),
        ("qwen3-tied", 1, ()),
        ("llama-one-kv-head", 2, ()),
        ("qwen3-moe", 1, ()),
        ("qwen3-moe", 2, ()),
        ("qwen3-moe", 2, ("--ep-size", "2")),
        ("qwen3-moe", 1, "probe"),
    ],
)
def test_versions_arrive_bit_for_bit(
    folder: Path, tmp_path: Path, start: Start, worlds: Worlds, family: str, tp: int, extra: Any
) -> None:
    base = make(family, tmp_path)
    variables = {"DTE_SGLANG_PROBE": "1"} if extra == "probe" else {}
    extra = () if extra == "probe" else extra
    follower = start(base, tp=tp, extra=extra, **variables).wait_ready()
    try:
        world = worlds(base)
        assert world.register(follower).status_code == 200
        # The server was started from the trainer's checkpoint: nothing needed to be written.
        found = world.wait_version(0)
        assert (found["resyncs"], found["ranks"], found["proof"]) == (0, tp, "proven")
        assert follower.weight_version == "0"
        before = follower.generate()
        for _ in range(VERSIONS):
            version = world.step().version
        found = world.wait_version(version)
        assert found["resyncs"] == 0
        assert found["last_install_ms"]["pause"] > 0
        after, sums = follower.generate(), follower.checksums()
        assert after["output_ids"] != before["output_ids"]
        assert after["meta_info"]["weight_version"] == follower.weight_version == str(version)
        assert follower.get("/model_info")["model_path"] == str(base)
    finally:
        follower.end()
    fresh = start(write(base, world.state, tmp_path / "trained"), tp=tp, extra=extra).wait_ready()
    try:
        assert fresh.checksums() == sums
        assert fresh.generate()["output_ids"] == after["output_ids"]
    finally:
        fresh.end()
