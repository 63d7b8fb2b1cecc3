"""Bits are the bits the trainer's own cast makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bf16 import (
    dtype_name,
    fp32_of_bits,
    lane_count,
    lanes_of,
    lanes_per_element,
    nan_bits,
    round_to_bf16_bits,
    tensor_from_lanes,
    torch_dtype,
)
from engine.errors import InvalidInput

patterns = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70)


@given(patterns)
def test_rounding_is_the_cast_for_every_pattern(bits: list[int]) -> None:
    x = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    expected = x.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(round_to_bf16_bits(x), expected)


@given(patterns)
def test_rounding_is_to_nearest_even_for_numbers(bits: list[int]) -> None:
    u = np.array(bits, np.uint64)
    number = (u & 0x7FFFFFFF) <= 0x7F800000
    u = u[number]
    expected = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    assert np.array_equal(round_to_bf16_bits(torch.from_numpy(u.astype(np.uint32).view(np.float32))), expected)


def test_strided_tensors_round_like_contiguous_ones_even_nan() -> None:
    x = torch.full((64,), float("nan"))
    assert set(round_to_bf16_bits(x[::2])) == set(round_to_bf16_bits(x)) == {nan_bits()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int64", "int32", "int16"])
@settings(max_examples=20)
@given(n=st.integers(0, 33))
def test_lanes_hold_the_elements_bytes_in_order(dtype: str, n: int) -> None:
    x = torch.arange(n).to(torch_dtype(dtype)) - 3
    lanes = lanes_of(x, dtype)
    assert lanes.size == n * lanes_per_element(dtype) == lane_count(n, dtype)
    assert lanes.tobytes() == x.contiguous().view(torch.uint8).numpy().tobytes()
    assert torch.equal(tensor_from_lanes(lanes, dtype, n), x)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool"])
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_bytes_are_padded_to_whole_lanes(dtype: str, n: int) -> None:
    x = (torch.arange(n) % 2).to(torch_dtype(dtype))
    lanes = lanes_of(x, dtype)
    raw = x.view(torch.uint8).numpy().tobytes()
    assert lanes.tobytes() == raw + b"\0" * (n % 2)
    assert torch.equal(tensor_from_lanes(lanes, dtype, n), x)
    with pytest.raises(InvalidInput, match="whole"):
        lanes_per_element(dtype)


def test_lanes_cast_to_the_canonical_dtype_first() -> None:
    x = torch.randn(50)
    assert np.array_equal(lanes_of(x, "bfloat16"), round_to_bf16_bits(x))
    assert np.array_equal(fp32_of_bits(lanes_of(x, "bfloat16")), x.bfloat16().float().numpy())


def test_unknown_dtypes_and_wrong_lane_counts_are_refused() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(InvalidInput):
        dtype_name(torch.complex64)
    with pytest.raises(InvalidInput):
        torch_dtype("float8")
    with pytest.raises(InvalidInput):
        tensor_from_lanes(np.zeros(3, np.uint16), "float32", 2)
