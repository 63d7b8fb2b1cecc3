"""Every kind of Adam over every kind of tensor, from the optimizer step to the receiver's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from clients.protocol import JobState
from tests.e2e.line import Line
from tests.e2e.odd import Odd, give_gradients, stir_buffers

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

ADAMS: dict[str, Make] = {
    "default": lambda p: torch.optim.AdamW(p, lr=1e-5),
    "foreach-amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-4, foreach=True, amsgrad=True, maximize=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.3, fused=True),
    "coupled": lambda p: torch.optim.Adam(p, lr=1e-4, weight_decay=0.2, eps=1e-15),
    "tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(2e-5), betas=(0.8, 0.95)),
    "double-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(2e-5, dtype=torch.float64)),
    "fused-tensor-lr-amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(2e-5), amsgrad=True, fused=True),
    "beta1-zero": lambda p: torch.optim.AdamW(p, lr=1e-5, betas=(0.0, 0.9)),
    "eps-zero": lambda p: torch.optim.AdamW(p, lr=1e-5, eps=0.0, weight_decay=5.0),
    "huge-lr": lambda p: torch.optim.AdamW(p, lr=10.0, weight_decay=0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAMS)
def test_odd_tensors_arrive_under_any_adam(url: str, kind: str) -> None:
    torch.manual_seed(1)
    model = Odd()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() != 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = ADAMS[kind](groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 3))
    with Line(url, model, optimizer) as line:
        for step in range(1, 7):
            give_gradients(model.parameters(), step, skip=[model.unused] if step % 2 else [model.unused, model.five])
            optimizer.step()
            scheduler.step()
            stir_buffers(model, step)
            job = line.ship(publish=step != 4)
            assert job.state is (JobState.COMMITTED if step != 4 else JobState.ACCUMULATED)
            for trouble in ("mismatched_tiles", "slices_unjoined", "outside_tiles", "failed_tiles"):
                if (kind, trouble) == ("huge-lr", "failed_tiles"):
                    continue  # steps that swallow the weights leave more open than a proof settles
                assert job.detail.get(trouble, 0) == 0, job.detail
