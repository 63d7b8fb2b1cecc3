"""Which part of a tensor a rank holds, over many meshes: each value is its own canonical index, and is found there.

One process plays each rank in turn; nothing is communicated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from clients.trainer.binding import _writes_to
from clients.trainer.sharded import FsdpHome, LocalHome, Sharded, region_of
from engine.errors import InvalidInput, StateConflict, UnsupportedOptimizer
from engine.layout.algebra import map_indices

SHAPES = [(251, 3), (7, 4), (3,), (1, 5), (8, 4, 2), (4, 8)]


@contextmanager
def playing(rank: int, world: int) -> Iterator[None]:
    """This process is `rank` of `world`."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds on to meshes, which know the rank


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


class Bag(nn.Module):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(t) for t in tensors])


def indices(tensor: torch.Tensor) -> np.ndarray:
    """Where the layout says the local elements lie, after a comparison with the elements themselves."""
    region = region_of("t", tensor)
    if not region.numel:
        return np.empty(0, np.int64)
    found = map_indices(region.layout(), np.arange(region.numel, dtype=np.int64))
    assert isinstance(tensor, DTensor)
    assert found.tolist() == tensor.to_local().detach().reshape(-1).to(torch.int64).tolist()
    return found


@pytest.mark.parametrize("sizes", [(1,), (2,), (4,), (5,), (2, 2), (2, 3), (3, 1)])
def test_fsdp_shards(sizes: tuple[int, ...]) -> None:
    world = prod(sizes)
    held: list[list[np.ndarray]] = [[] for _ in SHAPES]
    keys: list[dict[str, int]] = [{} for _ in SHAPES]
    for rank in range(world):
        with playing(rank, world):
            bag = Bag([numbered(s) for s in SHAPES])

            def last(p: nn.Parameter) -> Shard | None:
                return Shard(1) if p.shape == (4, 8) and 8 % sizes[-1] == 0 else None

            fully_shard(bag, mesh=mesh_of(*sizes), shard_placement_fn=last)
            sharded = Sharded([bag])
            for i, p in enumerate(bag.all):
                region = region_of("t", p)
                if region.numel and region.key("t") not in keys[i]:
                    keys[i][region.key("t")] = rank
                    held[i].append(indices(p))
                    owned = sharded.owned("t", p, region)
                    assert isinstance(owned.home, FsdpHome)
                    assert owned.home.memory().numel() >= owned.runs[0].numel == region.numel
    for shape, parts in zip(SHAPES, held, strict=True):
        assert sorted(np.concatenate(parts).tolist()) == list(range(prod(shape)))
    if sizes == (2, 2):  # the second replica owns nothing
        assert {r for k in keys for r in k.values()} == {0, 1}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("shape", [(16, 8), (10, 6), (7, 9)])
def test_tensor_parallel_below_fsdp(shape: tuple[int, ...], placement: Placement) -> None:
    parts, seen = [], set()
    for rank in range(4):
        with playing(rank, 4):
            mesh = mesh_of(2, 2)
            own = distribute_tensor(numbered(shape), mesh["b"], [placement], src_data_rank=None)
            bag = Bag([own])
            fully_shard(bag, mesh=mesh["a"])
            (param,) = bag.all
            key = region_of("t", param).key("t")
            if key not in seen:
                seen.add(key)
                parts.append(indices(param))
    assert sorted(np.concatenate(parts).tolist()) == list(range(prod(shape)))


def test_tensors_that_fsdp_does_not_manage() -> None:
    with playing(1, 2):
        t = nn.Parameter(distribute_tensor(numbered((5, 4)), mesh_of(2), [Shard(0)], src_data_rank=None))
        assert indices(t).tolist() == list(range(12, 20))
        home = Sharded([nn.Module()]).owned("t", t, region_of("t", t)).home
        assert isinstance(home, LocalHome)
        home.replace(home.memory().clone())
        assert indices(t).tolist() == list(range(12, 20))
        plain = region_of("p", numbered((2, 3)))
        assert (plain.corner, plain.shape, plain.numel) == ((0, 0), (2, 3), 6)
        partial = DTensor.from_local(torch.ones(3), mesh_of(2), [Partial()])
        with pytest.raises(InvalidInput, match="parts of their sum"):
            region_of("p", partial)
        odd = DTensor.from_local(torch.ones(3, 4), mesh_of(2), [Shard(0)], shape=torch.Size((5, 4)), stride=(4, 1))
        with pytest.raises(InvalidInput, match=r"holds \(3, 4\) of \(5, 4\)"):
            region_of("odd", odd)


def test_other_memory_under_a_shard() -> None:
    """It is what FSDP gathers from, what the optimizer writes, and what loading writes; the padding stays zero."""
    with playing(1, 2):
        bag = Bag([numbered((5, 4)), torch.full((3,), 2.0)])
        bag.all[1].requires_grad_(False)
        fully_shard(bag, mesh=mesh_of(2))
        uneven, frozen = bag.all
        home = Sharded([bag]).owned("t", uneven, region_of("t", uneven)).home
        assert isinstance(home, FsdpHome)
        kept = home.kept
        kept.init_dtype_attrs(kept.mp_policy)  # as the first forward does
        moved = home.memory().clone()
        home.replace(moved)
        assert indices(uneven).tolist() == list(range(12, 20))
        assert kept.all_gather_inputs[0].data_ptr() == moved.data_ptr() == uneven.to_local().data_ptr()
        kept.reset_sharded_param()
        bag.load_state_dict({k: v + 1 for k, v in bag.state_dict().items()})
        bag._apply(lambda t: t)
        uneven.grad = torch.ones_like(uneven)
        torch.optim.SGD([uneven], lr=1.0).step()
        assert home.memory().data_ptr() == moved.data_ptr() == kept._sharded_param_data.data_ptr()
        assert moved.tolist() == [*map(float, range(12, 20)), 0, 0, 0, 0]
        # In-place writes are counted where frozen tensors are watched.
        ice = Sharded([bag]).owned("f", frozen, region_of("f", frozen)).home
        before = _writes_to(ice)
        with torch.no_grad():
            frozen.add_(1)
        assert _writes_to(ice) != before
        # Memory that moved behind FSDP's back is not published as if nothing had happened.
        uneven._local_tensor = uneven._local_tensor.clone()
        with pytest.raises(StateConflict, match="other memory"):
            home.memory()
        bag.load_state_dict(bag.state_dict(), assign=True)
        with pytest.raises(StateConflict, match="replaced by another object"):
            home.memory()


def test_another_torch_is_refused_before_anything_is_touched() -> None:
    with playing(0, 2):
        bag = Bag([numbered((4, 4))])
        fully_shard(bag, mesh=mesh_of(2))
        kept = bag._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]  # type: ignore[operator]
        del kept._sharded_param_data
        with pytest.raises(UnsupportedOptimizer, match=f"{re.escape(torch.__version__)}.*_sharded_param_data missing"):
            Sharded([bag])


def test_offloaded_shards() -> None:
    with playing(0, 2):
        bag = Bag([numbered((4, 4))])
        fully_shard(bag, mesh=mesh_of(2), offload_policy=CPUOffloadPolicy(pin_memory=False))
        (kept,) = Sharded([bag])._kept.values()
        kept.pin_memory = True  # a CPU cannot pin
        with pytest.raises(InvalidInput, match="pinned memory"):
            Sharded([bag])
