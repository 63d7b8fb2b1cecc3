"""What the ranks of one trainer agree on among themselves: a launch id, and the cut of each version.

One invariant: nothing here pickles, and every rank makes the same collective calls in the same order whatever its own
daemon says.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from engine.errors import DteError, InvalidInput

T = TypeVar("T")
Agree = Callable[[int], int]


def rank_and_world(group: Any = None) -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def default_agree(group: Any = None) -> Agree:
    """The smallest of all ranks' numbers: an all-reduce over `group`, or with a single rank the number itself."""
    if rank_and_world(group)[1] == 1:
        return lambda number: number

    def agree(number: int) -> int:
        word = torch.tensor([number], dtype=torch.int64, device=_device(group))
        dist.all_reduce(word, op=dist.ReduceOp.MIN, group=group)
        return int(word.item())

    return agree


def new_launch(group: Any = None) -> str:
    """A random launch id, the same on all ranks: the first rank's, broadcast as plain bytes."""
    raw = torch.frombuffer(bytearray(secrets.token_bytes(12)), dtype=torch.uint8)
    if rank_and_world(group)[1] > 1:
        raw = raw.to(_device(group))
        dist.broadcast(raw, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
        raw = raw.cpu()
    return bytes(raw.tolist()).hex()


def gather_json(value: Any, group: Any = None) -> list[Any]:
    """Every rank's JSON value, in rank order, as plain bytes. A collective call: every rank makes it."""
    world = rank_and_world(group)[1]
    raw = torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)
    if world == 1:
        return [json.loads(bytes(raw.tolist()))]
    device = _device(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([raw.numel()], dtype=torch.int64, device=device), group=group)
    counts = [int(s.item()) for s in sizes]
    mine = torch.zeros(max(counts), dtype=torch.uint8)
    mine[: raw.numel()] = raw
    parts = [torch.empty(max(counts), dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(parts, mine.to(device), group=group)
    return [json.loads(p[:n].cpu().numpy().tobytes()) for p, n in zip(parts, counts, strict=True)]


def exchange(make: Callable[[], T], to_json: Callable[[T], Any], group: Any = None) -> tuple[T, list[Any]]:
    """What `make` returns, and every rank's JSON value of its own. A collective call.

    A rank whose `make` raises a DteError takes part all the same, as the others wait for it: it raises its error behind
    the exchange, and they raise InvalidInput.
    """
    made: list[T] = []
    problem: DteError | None = None
    try:
        made.append(make())
    except DteError as e:
        problem = e
    said = gather_json([to_json(m) for m in made], group)
    if problem is not None:
        raise problem
    failed = [rank for rank, values in enumerate(said) if not values]
    if failed:
        raise InvalidInput(
            f"rank {failed[0]} cannot declare its parameters, so no rank can.", remedy="Its own error says why."
        )
    return made[0], [values[0] for values in said]


def _device(group: Any) -> torch.device:
    return torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
