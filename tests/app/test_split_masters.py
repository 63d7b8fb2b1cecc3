"""What the daemon takes for split masters and scaled moments, and how it reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from app.publisher.checks import check_handles, check_hypers
from app.worker.source import SliceSource, check_slice
from clients.protocol import FormulaSpec, HyperSpec, MemoryRef, RankRegistration, SliceSpec, SyncRequest
from engine.bf16 import round_to_bf16_bits
from engine.detect.base import TILE
from engine.errors import InvalidInput
from engine.records.models import TensorMeta
from tests.support.fused_adam import split_master

NUMEL = 2 * TILE + 33
META = TensorMeta(name="w", shape=(NUMEL,), dtype="bfloat16")


def ref(dtype: str, numel: int = NUMEL) -> MemoryRef:
    return MemoryRef(file="dte-none", offset_bytes=0, numel=numel, dtype=dtype)  # type: ignore[arg-type]


def spec(**changes: Any) -> SliceSpec:
    fields: dict[str, Any] = {
        "slice": 0, "tensor": "w", "numel": NUMEL, "blocks": [([NUMEL], 0, [1], 0, [1])], "detector": "certified",
        "theta": ref("bfloat16"), "remainder": ref("int16"), "exp_avg": ref("bfloat16"), "exp_avg_sq": ref("float16"),
        "group": 0,
    }  # fmt: skip
    return SliceSpec(**fields | changes)


def registration(declared: SliceSpec) -> RankRegistration:
    return RankRegistration(
        run="r", launch="l", rank=0, world=1, step=0, control="dte-c", generation=0, hold=1, tensors=[META],
        groups=[FormulaSpec(name="fused-adam/te")], slices=[declared],
    )  # fmt: skip


def sync(**changes: Any) -> SyncRequest:
    hyper = HyperSpec(lr=1e-3, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0)
    fields = {"run": "r", "launch": "l", "epoch": 1, "rank": 0, "step": 1, "generation": 2, "hold": 2, "version": 1}
    return SyncRequest(**fields | {"hypers": [hyper], "steps": [1]} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"theta": ref("float32")},
        {"theta": ref("float16")},
        {"remainder": ref("float32")},
        {"remainder": ref("int16", NUMEL - 1)},
        {"remainder": None},
        {"exp_avg": ref("uint8")},
        {"detector": "snapshot"},
        {"detector": "dense"},
    ],
    ids=str,
)
def test_halves_that_do_not_belong_together_are_refused(changes: dict[str, Any]) -> None:
    check_slice(spec(), {"w": META}, 1)
    with pytest.raises(InvalidInput, match="slice 0"):
        check_slice(spec(**changes), {"w": META}, 1)


def test_masters_are_put_together_for_the_tiles_that_are_read() -> None:
    master = torch.from_numpy(np.random.default_rng(1).integers(0, 2**32, NUMEL, dtype=np.uint32).view(np.float32))
    weight, remainder = split_master(master)
    moments = torch.zeros(NUMEL, dtype=torch.bfloat16), torch.zeros(NUMEL, dtype=torch.float16)
    source = SliceSource(check_slice(spec(), {"w": META}, 1), weight, *moments, remainder)
    assert source.rounding == "away"
    assert {id(x) for x in source.arrays} == {id(x) for x in (weight, *moments, remainder)}
    for first, stop in ((0, 1), (1, 3), (2, 3)):
        held = slice(first * TILE, min(stop * TILE, NUMEL))
        theta, m, v, begin = source.state(first, stop)
        assert begin == first
        assert torch.equal(theta.view(torch.int32), master[held].view(torch.int32))
        assert (m.dtype, v.dtype, m.numel(), v.numel()) == (torch.bfloat16, torch.float16, *2 * (theta.numel(),))
        assert np.array_equal(source.read_lanes(first, stop), round_to_bf16_bits(theta, source.rounding))


def test_a_remainder_may_move_but_neither_come_nor_go() -> None:
    moved = spec(remainder=MemoryRef(file="dte-other", offset_bytes=64, numel=NUMEL, dtype="int16"))
    assert check_handles(registration(spec()), sync(handles=[moved])).slices == [moved]
    whole = spec(theta=ref("float32"), remainder=None)
    for before, after in ((spec(), whole), (whole, spec())):
        with pytest.raises(InvalidInput, match="may only move"):
            check_handles(registration(before), sync(handles=[after]))


def test_scales_come_in_pairs_for_every_slice_or_not_at_all() -> None:
    for scales in ([], [(1.0, None)], [(0.0, 3e-7)]):
        check_hypers(registration(spec()), sync(scales=scales))
    with pytest.raises(InvalidInput, match="scales"):
        check_hypers(registration(spec()), sync(scales=[(1.0, 1.0)] * 2))
    with pytest.raises(ValueError, match="scales"):
        sync(scales=[(float("inf"), 1.0)])
