"""Cached layouts: found again for the same question, and for no other; damage is a miss."""

from __future__ import annotations

import dataclasses
import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from clients.rollout.layout_cache import LayoutCache, LayoutKey
from engine.layout.algebra import contiguous, identity
from engine.layout.blocks import Layout
from engine.layout.placement import Placement
from engine.probe import Probed
from engine.records.models import TensorMeta

A = TensorMeta(name="a", shape=(4, 6))
B = TensorMeta(name="b", shape=(8,), dtype="float32")
KEY = LayoutKey({"hidden_size": 4, "nested": {"x": [1]}}, {"tp_size": 2, "tp_rank": 0}, {"engine": "e 1.0"}, (A, B))


def found() -> Probed:
    part: Layout = contiguous(12, 12, 24)
    return Probed(
        {"p": [Placement(A, part)], "q": [Placement(B, identity(8))]},
        {"tied": "p"},
        {"b": "why"},
        frozenset({"c"}),
        {"p": 3},
    )


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    cache = LayoutCache(tmp_path / "deep" / "folder")
    assert cache.get(KEY) is None
    cache.put(KEY, found())
    cache.put(KEY, found())
    assert cache.get(KEY) == found()
    assert LayoutCache(tmp_path / "deep" / "folder").get(KEY) == found()
    files = list((tmp_path / "deep" / "folder").iterdir())
    assert len(files) == 1
    assert stat.S_IMODE(files[0].stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"hidden_size": 5}},
        {"shape": {"tp_size": 2, "tp_rank": 1}},
        {"flags": {"engine": "e 1.1"}},
        {"tensors": (A,)},
        {"tensors": (A, TensorMeta(name="b", shape=(8,)))},
    ],
)
def test_another_question_is_a_miss(tmp_path: Path, change: dict[str, Any]) -> None:
    cache = LayoutCache(tmp_path)
    cache.put(KEY, found())
    assert cache.get(dataclasses.replace(KEY, **change)) is None


def test_the_order_of_fields_and_tensors_does_not_matter() -> None:
    other = LayoutKey({"nested": {"x": [1]}, "hidden_size": 4}, {"tp_rank": 0, "tp_size": 2}, KEY.flags, (B, A))
    assert other.digest() == KEY.digest()


def body_with(**changes: Any) -> Any:
    def change(body: dict[str, Any]) -> str:
        return json.dumps(body | changes)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: "",
        lambda body: "[]",
        lambda body: json.dumps(body)[:-20],
        lambda body: json.dumps({k: v for k, v in body.items() if k != "absent"}),
        body_with(schema=1),
        body_with(key="0" * 64),
        body_with(placements={"p": [["a", [4, 6], "bfloat16", 12, [[[13], 0, [1], 0, [1]]]]]}),
        body_with(placements={"p": [["a", [4, 6], "bfloat16", 12, [[[12], 0, [1], 20, [1]]]]]}),
        body_with(placements={"p": [["a", [4, 6], "bfloat16", 12, [[[2], 0, [1], 0, [1]], [[2], 2, [1], 1, [1]]]]]}),
        body_with(placements={"p": [["a", [4, 5], "bfloat16", 12, [[[12], 0, [1], 0, [1]]]]]}),
        body_with(placements={"p": [["a", "x", "bfloat16", 12, []]]}),
        body_with(placements={"p": 5}),
        body_with(aliases={"x": 1}),
        body_with(absent=[1]),
    ],
)
def test_a_damaged_file_is_a_miss_and_is_said(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = LayoutCache(tmp_path)
    cache.put(KEY, found())
    (file,) = tmp_path.iterdir()
    file.write_text(damage(json.loads(file.read_text())))
    with caplog.at_level(logging.WARNING):
        assert cache.get(KEY) is None
    assert "found anew" in caplog.text
    cache.put(KEY, found())
    assert cache.get(KEY) == found()
