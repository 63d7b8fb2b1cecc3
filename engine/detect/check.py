"""What every detector demands of its arguments before it touches memory."""

from __future__ import annotations

import torch

from engine.detect.base import TILE, SliceGeometry, tile_count
from engine.errors import InvalidInput

_MOMENTS = (torch.float32, torch.bfloat16, torch.float16)


def check_window(numel: int, geometry: SliceGeometry, first_tile: int, tile_start: int, tile_stop: int) -> None:
    """InvalidInput unless `numel` lanes from tile `first_tile` on contain the tile range, and are whole tiles of the
    slice (the last one may be short)."""
    total = geometry.layout.src_numel
    if first_tile == 0 and not (0 < numel < total and numel % TILE == 0):
        check_tiles(numel, geometry, tile_start, tile_stop)
        return
    end = first_tile * TILE + numel
    whole = end == total or (end < total and numel % TILE == 0)
    if not whole or not 0 <= first_tile <= tile_start <= tile_stop <= tile_count(end):
        raise InvalidInput(
            f"tiles [{tile_start}, {tile_stop}) of a slice of {tile_count(total)} tiles are not in {numel} lanes from "
            f"tile {first_tile} on."
        )


def check_tiles(numel: int, geometry: SliceGeometry, tile_start: int, tile_stop: int) -> None:
    """InvalidInput unless the layout covers `numel` lanes and the tile range lies in them."""
    if geometry.layout.src_numel != numel:
        raise InvalidInput(
            f"slice of {geometry.tensor!r} has {numel} lanes, its layout {geometry.layout.src_numel}.",
            remedy="Register the slice with the layout of its own memory.",
        )
    if not 0 <= tile_start <= tile_stop <= tile_count(numel):
        raise InvalidInput(f"tiles [{tile_start}, {tile_stop}) are not in a slice of {tile_count(numel)} tiles.")


def check_state(theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, name: str) -> None:
    """InvalidInput unless θ is flat contiguous FP32 on the CPU and m, v match it in shape (FP32, BF16 or FP16)."""
    for what, x, dtypes in (("theta", theta, (torch.float32,)), ("m", m, _MOMENTS), ("v", v, _MOMENTS)):
        if x.dim() != 1 or not x.is_contiguous() or x.dtype not in dtypes or x.device.type != "cpu":
            raise InvalidInput(
                f"{what} of {name!r} must be 1-D, contiguous, {' or '.join(map(str, dtypes))}, on the CPU; it is "
                f"{x.dim()}-D {x.dtype} on {x.device}.",
                remedy="Pass the optimizer's own flat state, or choose the `snapshot` detector.",
            )
        if x.numel() != theta.numel():
            raise InvalidInput(f"{what} of {name!r} has {x.numel()} elements, theta {theta.numel()}.")
