"""A model of everything a parameter or buffer can be, and gradients of every size."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

BUFFER_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def _weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.02


class Odd(nn.Module):
    """Scalars, single elements, empty tensors, tiles that end exactly and one later, every order of memory, tied and
    unused and frozen parameters, low-precision parameters, buffers of every dtype with odd numbers of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(_weights(1))
        self.one_of_many = nn.Parameter(_weights(1, 1, 1))
        self.empty = nn.Parameter(torch.zeros(0))
        self.empty_2d = nn.Parameter(torch.zeros(3, 0, 2))
        self.tile = nn.Parameter(_weights(65536))
        self.tile_and_one = nn.Parameter(_weights(65537))
        self.tiles = nn.Parameter(_weights(3, 65536))
        self.five = nn.Parameter(_weights(2, 3, 4, 5, 6))
        self.transposed = nn.Parameter(_weights(37, 91).t())
        self.permuted = nn.Parameter(_weights(5, 7, 3, 11).permute(2, 0, 3, 1))
        self.conv = nn.Conv2d(6, 10, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.view = nn.Parameter(_weights(100)[10:60])
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(_weights(300))
        self.frozen = nn.Parameter(_weights(7, 3), requires_grad=False)
        self.frozen_low = nn.Parameter(_weights(9).bfloat16(), requires_grad=False)
        self.low = nn.Parameter(_weights(129).bfloat16())
        self.fp16 = nn.Parameter(_weights(65).half())
        self.named = nn.ParameterDict({"a-b": nn.Parameter(_weights(4)), "c[0]:d": nn.Parameter(_weights(5))})
        for dtype in BUFFER_DTYPES:
            kind = str(dtype).removeprefix("torch.")
            self.register_buffer(f"zero_dim_{kind}", torch.ones((), dtype=dtype))
            self.register_buffer(f"odd_{kind}", torch.arange(7).to(dtype).reshape(7, 1))
            self.register_buffer(
                f"turned_{kind}" if dtype.itemsize > 1 else f"flat_{kind}",
                torch.arange(12).to(dtype).reshape(3, 4).t() if dtype.itemsize > 1 else torch.arange(12).to(dtype),
            )
        self.register_buffer("empty_buffer", torch.zeros(0, 4))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def certified(self) -> list[nn.Parameter]:
        """What certified detection is for."""
        return [p for p in self.parameters() if p.dtype == torch.float32 and p.requires_grad]


def give_gradients(params: Iterable[torch.Tensor], seed: int, skip: Iterable[torch.Tensor] = ()) -> None:
    """Gradients over twelve decades, some exactly 0; None for those in `skip`."""
    generator = torch.Generator().manual_seed(seed)
    without = {id(p) for p in skip}
    for p in params:
        if id(p) in without or not p.requires_grad:
            p.grad = None
            continue
        size = 10.0 ** (torch.rand(p.shape, generator=generator) * 12 - 9)
        grad = torch.randn(p.shape, generator=generator) * size
        grad[torch.rand(p.shape, generator=generator) < 0.1] = 0.0
        p.grad = torch.empty_like(p).copy_(grad)


def stir_buffers(model: nn.Module, seed: int) -> None:
    """Change some of the buffers."""
    generator = torch.Generator().manual_seed(seed)
    for number, (_, b) in enumerate(model.named_buffers()):
        if b.numel() and (number + seed) % 3:
            values = torch.randint(0, 2 if b.dtype == torch.bool else 100, b.shape, generator=generator)
            b.copy_(values)
