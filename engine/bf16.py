"""BF16 bits and 16-bit lanes of tensors, exactly as the trainer itself makes them.

Invariant: for FP32 θ, `round_to_bf16_bits(θ)` equals `θ.bfloat16()` of a contiguous tensor on this backend bit for bit,
NaN payloads and signed zeros included; with the rounding of split masters it is the weight that a split leaves, and
`join_master` undoes the split, for every bit pattern. Everything after detection speaks in these bits.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import InvalidInput

U16 = npt.NDArray[np.uint16]

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""Record dtype names (`engine.records.DType`) → torch dtypes."""

Rounding = Literal["even", "away"]
"""How FP32 masters become BF16. `even`: to nearest, ties to even, as casts do. `away`: to nearest, ties away from zero,
which is what splitting a master into a BF16 weight and the low 16 bits does; NaN get no bits of their own then."""

MAX_FINITE_FP32_FOR_BF16: Final = 3.3e38
"""Above this magnitude BF16 rounding overflows or comes close to it; detection treats such elements as unknown."""


def dtype_name(dtype: torch.dtype) -> str:
    """Record name of a torch dtype; raises InvalidInput for dtypes that no record can carry."""
    for name, candidate in TORCH_DTYPES.items():
        if candidate == dtype:
            return name
    raise InvalidInput(f"dtype {dtype} cannot be published.", remedy=f"Use one of {', '.join(TORCH_DTYPES)}.")


def torch_dtype(name: str) -> torch.dtype:
    """torch dtype of a record name; raises InvalidInput for unknown names."""
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        raise InvalidInput(f"unknown dtype {name!r}.", remedy=f"Use one of {', '.join(TORCH_DTYPES)}.") from None


def lanes_per_element(name: str) -> int:
    """16-bit lanes in one element; 1-byte dtypes have no whole number of them and raise InvalidInput."""
    size = torch_dtype(name).itemsize
    if size < 2:
        raise InvalidInput(
            f"{name} elements are smaller than a 16-bit lane.", remedy="Publish such tensors whole, as one slice."
        )
    return size // 2


def lane_count(numel: int, name: str) -> int:
    """16-bit lanes of `numel` elements; an odd last byte counts as one lane."""
    return -(-numel * torch_dtype(name).itemsize // 2)


def bits_of(tensor: torch.Tensor) -> U16:
    """View a BF16 or FP16 tensor as lanes, flat; copies only when it is not contiguous or not on the CPU."""
    return tensor.detach().cpu().contiguous().view(torch.int16).reshape(-1).numpy().view(np.uint16)


def round_to_bf16_bits(theta: torch.Tensor, rounding: Rounding = "even") -> U16:
    """BF16 bits of an FP32 tensor, flat: as `theta.bfloat16()` makes them, or (`away`) as a split does.

    The cast runs on a contiguous tensor: torch converts NaN to other bits (0x7FC0 instead of 0xFFFF on the CPU) when it
    walks a strided one.
    """
    if rounding == "even":
        return bits_of(theta.detach().contiguous().bfloat16())
    words = theta.detach().cpu().contiguous().view(torch.int32).reshape(-1).numpy().view(np.uint32)
    return ((words + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The FP32 master, flat, of which `weight` (BF16) is the upper half and `remainder` (int16) the lower 16 bits.

    A weight whose remainder is negative was rounded up by one unit, so the master's bits are those of the weight,
    shifted, plus the remainder as a signed number (mod 2³²). `round_to_bf16_bits(…, "away")` of the result is `weight`.
    """
    upper = bits_of(weight).astype(np.uint32) << np.uint32(16)
    lower = remainder.detach().cpu().contiguous().reshape(-1).numpy().astype(np.int32).view(np.uint32)
    return torch.from_numpy((upper + lower).view(np.float32))


def nan_bits() -> int:
    """The bits this backend's contiguous FP32 → BF16 cast gives for NaN."""
    return int(round_to_bf16_bits(torch.full((16,), float("nan")))[0])


def lanes_of(tensor: torch.Tensor, dtype: str) -> U16:
    """Cast to the canonical dtype and view as 16-bit lanes, flat, little-endian.

    1-byte dtypes: two elements a lane, a last odd byte zero-padded. The result may share memory with `tensor`.
    """
    target = torch_dtype(dtype)
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype != target:
        flat = flat.to(target)
    raw: npt.NDArray[np.uint8] = flat.cpu().view(torch.uint8).numpy()
    if raw.size % 2:
        raw = np.concatenate([raw, np.zeros(1, np.uint8)])
    return raw.view(np.uint16)


def tensor_from_lanes(lanes: U16, dtype: str, numel: int) -> torch.Tensor:
    """The 1-D tensor of `numel` elements whose lanes these are; shares memory with `lanes` where it is writable.

    Raises InvalidInput when the number of lanes does not fit.
    """
    if lanes.size != lane_count(numel, dtype):
        raise InvalidInput(f"{lanes.size} lanes do not hold {numel} elements of {dtype}.")
    raw = np.ascontiguousarray(lanes).view(np.uint8)[: numel * torch_dtype(dtype).itemsize]
    if not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(torch_dtype(dtype))


def fp32_of_bits(bits: U16) -> npt.NDArray[np.float32]:
    """The FP32 values of BF16 bits, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
