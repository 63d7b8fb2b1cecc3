"""Single roundings that torch on the CPU does not offer: IEEE square root, fused multiply-add, flush to zero.

Invariant: every function returns what one hardware instruction would, bit for bit, for all inputs of its domain.
"""

from __future__ import annotations

import torch

MIN_NORMAL_FP32 = 2.0**-126


def f32(x: float) -> float:
    """`x` rounded once to FP32, as a Python float."""
    return float(torch.tensor(x, dtype=torch.float64).to(torch.float32))


def ieee_sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded FP32 square root.

    `torch.sqrt` on the CPU may be off by one ulp (vector math library). The FP64 root of an FP32 value, rounded to
    FP32, is correctly rounded: a double rounding error would need the root to lie within 2^-53 of a FP32 midpoint,
    which no 24-bit operand allows.
    """
    if x.device.type == "cuda":
        return torch.sqrt(x)
    return torch.sqrt(x.double()).float()


def fma(a: torch.Tensor | float, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """FP32 fused multiply-add `a·b + c` with one rounding; `a` a FP32 tensor or a float that FP32 holds exactly.

    The FP64 product of two FP32 values is exact. The FP64 sum is rounded to odd (its error from TwoSum tells the
    direction), after which rounding to FP32 is the correct single rounding even at ties and in the subnormal range.
    """
    product = b.double() * a if isinstance(a, float) else a.double() * b.double()
    addend = c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    even = (bits & 1) == 0
    inexact = torch.isfinite(total) & (error != 0) & even
    away = (error > 0) == (total > 0)  # towards larger magnitude
    odd = torch.where(inexact, torch.where(away, bits + 1, bits - 1), bits)
    return odd.view(torch.float64).float()


def flush(x: torch.Tensor) -> torch.Tensor:
    """Subnormal FP32 values become zeros of the same sign."""
    return torch.where(x.abs() < MIN_NORMAL_FP32, x * 0.0, x)
