"""Where each of Megatron-Core's optimizers keeps the FP32 weights of a parameter, and which range of it this rank owns.

One invariant: a model parameter's flat elements [start, stop) are exactly the elements of its master, in order; ranges
come from the optimizer's own map of its buffers, never from the order in which it lists parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from engine.errors import InvalidInput, UnsupportedOptimizer

_INSTEAD = "Describe what each rank owns with TorchSource(slices=[OwnedSlice(…)], detector='snapshot')."


@dataclass(frozen=True)
class Master:
    """FP32 weights of elements [start, stop) of `param`. `master` is what the torch optimizer steps: with a
    precision-aware optimizer the 16-bit weights themselves, whose masters are in its state.

    `aliased`: it is a view of the model's own parameter buffer and cannot be moved. `holders`: the ranks that own the
    parameter's ranges together, once each.
    """

    param: torch.nn.Parameter
    start: int
    stop: int
    master: torch.Tensor
    aliased: bool
    holders: tuple[int, ...]


class _Kinds(NamedTuple):
    """Megatron-Core's optimizer classes."""

    chained: type
    distributed: type
    float16: type
    fp32: type


def _kinds() -> _Kinds:
    """Imported when first needed: importing Megatron-Core takes seconds, and only its own trainers have it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

    return _Kinds(ChainedOptimizer, DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers that a Megatron-Core optimizer chains, those without parameters on this rank left out."""
    if issubclass(type(optimizer), _kinds().chained):
        return [leaf for inner in optimizer.chained_optimizers for leaf in leaves(inner)]
    if getattr(optimizer, "is_stub_optimizer", False) or getattr(optimizer, "optimizer", None) is None:
        return []
    return [optimizer]


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers that step, in the order of `leaves`. UnsupportedOptimizer for what cannot be read."""
    found: list[torch.optim.Optimizer] = []
    for leaf in leaves(optimizer):
        _check_supported(leaf)
        found.append(leaf.optimizer)
    return found


def masters(optimizer: Any) -> Iterator[Master]:
    """Every range this rank's optimizers own."""
    kinds = _kinds()
    for leaf in leaves(optimizer):
        if issubclass(type(leaf), kinds.distributed):
            yield from _distributed(leaf)
        elif issubclass(type(leaf), kinds.float16):
            yield from _float16(leaf)
        else:
            yield from _fp32(leaf)


def holders_of(optimizer: Any) -> dict[int, tuple[int, ...]]:
    """id of a model parameter → the ranks that own its ranges together, also where this rank owns none of it."""
    found: dict[int, tuple[int, ...]] = {}
    for leaf in leaves(optimizer):
        if issubclass(type(leaf), _kinds().distributed):
            ranks = _ranks(leaf.data_parallel_group)
            for buffer in leaf.buffers:
                for param in buffer.param_index_map:
                    found[id(param)] = ranks
    return found


def _distributed(leaf: Any) -> Iterator[Master]:
    ranks = _ranks(leaf.data_parallel_group)
    # Megatron-Core's own name for "FusedAdam has the masters"; it then steps the shards of the 16-bit parameters.
    inside = bool(getattr(leaf.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))
    groups = zip(
        leaf.model_float16_groups, leaf.shard_float16_groups if inside else leaf.shard_fp32_from_float16_groups,
        leaf.model_fp32_groups, leaf.shard_fp32_groups,
        strict=True,
    )  # fmt: skip
    for half, half_masters, full, full_masters in groups:
        for params, owned, aliased in ((half, half_masters, inside), (full, full_masters, True)):
            for param, master in zip(params, owned, strict=True):
                span = leaf._get_model_param_range_map(param)["param"]
                if master is None or master.numel() != span.end - span.start:
                    raise UnsupportedOptimizer(
                        "a master of the distributed optimizer is not where it was expected.", remedy=_INSTEAD
                    )
                yield Master(param, span.start, span.end, master, aliased, ranks)


def _float16(leaf: Any) -> Iterator[Master]:
    me = (_rank(),)
    for half, half_masters in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
        for param, master in zip(half, half_masters, strict=True):
            yield Master(param, 0, param.numel(), master, False, me)
    for full in leaf.fp32_from_fp32_groups:
        for param in full:
            yield Master(param, 0, param.numel(), param, False, me)


def _fp32(leaf: Any) -> Iterator[Master]:
    me = (_rank(),)
    for group in leaf.optimizer.param_groups:
        for param in group["params"]:
            yield Master(param, 0, param.numel(), param, False, me)


def _check_supported(leaf: Any) -> None:
    kind = type(leaf).__name__
    if not issubclass(type(leaf), _kinds()[1:]):
        raise UnsupportedOptimizer(f"{kind} of Megatron-Core is not known here.", remedy=_INSTEAD)
    inner = type(leaf.optimizer).__name__
    if inner == "HybridDeviceOptimizer":
        raise UnsupportedOptimizer(
            "the optimizer is split between devices (optimizer_cpu_offload).",
            remedy="Train with optimizer_cpu_offload=False.",
        )
    ddp = getattr(leaf, "ddp_config", None)
    for flag, what in (
        ("use_megatron_fsdp", "Megatron-FSDP"),
        ("use_custom_fsdp", "Megatron's custom FSDP"),
        ("fp8_param_gather", "FP8 parameters"),
        ("fp4_param_gather", "FP4 parameters"),
    ):
        if getattr(ddp, flag, False):
            raise UnsupportedOptimizer(
                f"{what} ({flag}) keeps no 16-bit weights whose bits could be published.",
                remedy=f"Train with {flag}=False.",
            )


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def check_masters(found: Iterator[Master], names: dict[int, str]) -> None:
    """InvalidInput if a master does not round to its 16-bit parameter: after a checkpoint load one of them is stale."""
    for m in found:
        if m.param.dtype == torch.float32:
            continue
        cast = m.master.detach().reshape(-1).to(m.param.dtype)
        own = m.param.detach().reshape(-1)[m.start : m.stop]
        if not torch.equal(cast.view(torch.int16), own.view(torch.int16)):
            wrong = int((cast.view(torch.int16) != own.view(torch.int16)).sum())
            raise InvalidInput(
                f"the FP32 master of {names.get(id(m.param), 'a parameter')} does not round to the model's weights "
                f"({wrong} of {own.numel()} elements differ): one of them is stale.",
                remedy="After loading the model's weights call optimizer.reload_model_params(); after loading the "
                "optimizer let it write the model (one step, or the checkpoint loader does). Then register or sync "
                "again.",
            )
