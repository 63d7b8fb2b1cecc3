"""Tensors whose values spell where their elements come from, and reading them back.

One invariant: every value of a tag is exact in any float dtype of 8 or more bits of precision and in a byte, and 0
never occurs in one, so what is read back is either a digit or was not written.

Elements are numbered through all canonical tensors, one after the other; a digit pass writes one base-255 digit of the
number (1 … 255), a pattern pass writes pseudo-random bits, all finite, that differ from pass to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import InvalidInput
from engine.layout.placement import numel_of
from engine.records.models import TensorMeta

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger[Any]]

BASE = 255
_TORCH = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
}  # fmt: skip
_WORDS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# The exponent's bits; one of them is cleared where all are set, which would be an infinity or a NaN.
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
_CLEARED = {"bfloat16": 0x0080, "float16": 0x0400, "float32": 0x00800000, "float64": 0x0010000000000000}


def can_tag(meta: TensorMeta) -> bool:
    """False for dtypes that cannot spell a digit."""
    return meta.dtype in _TORCH


class Numbering:
    """Numbers of all elements of the canonical tensors, consecutive in the order given."""

    def __init__(self, tensors: Sequence[TensorMeta]) -> None:
        names = [t.name for t in tensors]
        if len(set(names)) != len(names):
            raise InvalidInput("two canonical tensors have one name.")
        self.tensors = tuple(tensors)
        self.starts: I64 = np.cumsum([0, *(numel_of(t) for t in tensors)], dtype=np.int64)
        self.total = int(self.starts[-1])
        self.digits = 1
        while BASE**self.digits < self.total:
            self.digits += 1

    def tag(self, k: int, digit: int) -> torch.Tensor:
        """Tensor `k` with digit number `digit` of each element's number, in its own shape and dtype."""
        meta = self.tensors[k]
        numbers = torch.arange(int(self.starts[k]), int(self.starts[k + 1]), dtype=torch.int64)
        values = (numbers // BASE**digit) % BASE + 1
        tag = values.to(torch.uint8).view(torch.int8) if meta.dtype == "int8" else values.to(_TORCH[meta.dtype])
        shaped: torch.Tensor = tag.reshape(tuple(meta.shape))
        return shaped

    def pattern(self, k: int, seed: int) -> torch.Tensor:
        """Tensor `k` filled with the bits that `pattern_words` gives its elements."""
        meta = self.tensors[k]
        dtype = _TORCH[meta.dtype]
        numbers = np.arange(int(self.starts[k]), int(self.starts[k + 1]), dtype=np.int64)
        words = pattern_words(numbers, meta.dtype, seed)
        return torch.from_numpy(words.view(np.uint8)).view(dtype).reshape(tuple(meta.shape))


def pattern_words(numbers: I64, dtype: str, seed: int) -> Words:
    """Pseudo-random bits of each element number as one unsigned word of the dtype's size; floats come out finite."""
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64((seed * 0xD1B54A32D192ED03) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    size = torch.empty(0, dtype=_TORCH[dtype]).element_size()
    words = z.astype(_WORDS[size])
    exponent = _EXPONENT.get(dtype)
    if exponent is not None:
        special = (words & words.dtype.type(exponent)) == exponent
        words[special] ^= words.dtype.type(_CLEARED[dtype])
    return words


def cast_words(words: Words, dtype: str, to: torch.dtype) -> Words:
    """The bits of elements of `dtype` after PyTorch has cast them `to` another."""
    values = torch.from_numpy(words.view(np.uint8).copy()).view(_TORCH[dtype])
    return read_words(values.to(to))


def read_digits(memory: torch.Tensor) -> U8:
    """What a digit pass left in flat `memory`: digit + 1, or 0 where it is no digit (not written, or another value)."""
    memory = memory.detach().cpu()  # first: a conversion on a device would need room for the wide copy there
    if memory.dtype == torch.int8:
        memory = memory.view(torch.uint8)
    if memory.dtype == torch.bool or memory.is_complex():
        return np.zeros(memory.numel(), np.uint8)
    if not memory.is_floating_point():
        values = memory.to(torch.int64)
        good = (values >= 1) & (values <= BASE)
        return torch.where(good, values, 0).to(torch.uint8).numpy()
    floats = memory.to(torch.float64 if memory.dtype == torch.float64 else torch.float32)
    good = (floats >= 1) & (floats <= BASE) & (floats == floats.floor())
    return torch.where(good, floats, 0).to(torch.uint8).numpy()


def read_words(memory: torch.Tensor) -> Words:
    """The bits of flat `memory`, one unsigned word an element."""
    size = memory.element_size()
    return memory.detach().to("cpu").contiguous().view(torch.uint8).numpy().view(_WORDS[size])


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
