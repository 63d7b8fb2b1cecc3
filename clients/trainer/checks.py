"""What a declaration must satisfy before any memory is touched.

One invariant: every refusal names the tensor and says what to do; nothing here changes anything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

import torch

from clients.trainer.home import StateHome, local_of
from clients.trainer.shards import OwnedRun, OwnedShard, OwnedSlice, Shard
from engine.errors import InvalidInput
from engine.layout.blocks import Layout
from engine.records.models import BlockJson, TensorMeta

log = logging.getLogger(__name__)


def persistent_buffers(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def check_local(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise InvalidInput(
            f"{name} is a {type(tensor).__name__}, not a plain tensor.",
            remedy="Declare this rank's local memory with slices=[OwnedSlice(…)].",
        )
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise InvalidInput(
            f"{name} lies on {tensor.device} ({tensor.layout}); memory of the host and of CUDA devices can be read.",
            remedy="Train on the CPU or a CUDA device, or leave the tensor out with names={…: None}.",
        )


def check_master(name: str, param: torch.Tensor, master: torch.Tensor) -> None:
    if master.numel() != param.numel() or master.dtype != torch.float32 or not master.is_contiguous():
        raise InvalidInput(
            f"the master of {name} must be contiguous FP32 with {param.numel()} elements, not {master.dtype} with "
            f"{master.numel()}."
        )
    cast = master.detach().reshape(param.shape).to(param.dtype)
    view: dict[int, torch.dtype] = {2: torch.int16, 4: torch.int32}
    word = view[param.element_size()]
    if not torch.equal(cast.view(word), param.detach().contiguous().view(word)):
        raise InvalidInput(
            f"the FP32 master of {name} does not round to the parameter: one of them is stale.",
            remedy="After loading a checkpoint copy the right one over the other, then register.",
        )


def check_held(shard: Shard) -> None:
    """InvalidInput if a master in the optimizer's state does not round to its parameter: after the model's weights were
    loaded it is stale. The two halves of a split master always fit."""
    if not isinstance(shard.home, StateHome):
        return
    own, master = local_of(shard.home.param).detach(), shard.home.memory().detach()
    cast = master.to(own.dtype)
    if cast.shape != own.shape or not torch.equal(cast.view(torch.int16), own.contiguous().view(torch.int16)):
        raise InvalidInput(
            f"the FP32 master of {shard.name} in the optimizer's state does not round to the parameter: one of them is "
            "stale.",
            remedy="After loading the model's weights load the optimizer's state that belongs to them, or make a new "
            "optimizer. Then register or sync again.",
        )


def dense_blocks(name: str, tensor: torch.Tensor) -> list[BlockJson]:
    """Memory order → canonical (row-major) order of a dense tensor, whatever the order of its strides."""
    if tensor.is_contiguous():
        return [([max(1, tensor.numel())], 0, [1], 0, [1])]
    strides = tensor.stride()
    dims = sorted((d for d in range(tensor.dim()) if tensor.shape[d] > 1), key=lambda d: -strides[d])
    shape = [tensor.shape[d] for d in dims]
    source = [prod(shape[i + 1 :]) for i in range(len(shape))]
    if [strides[d] for d in dims] != source:
        raise InvalidInput(f"{name} has gaps or overlaps in memory.", remedy="Make it contiguous before registering.")
    return [(shape, 0, source, 0, [prod(tensor.shape[d + 1 :]) for d in dims])]


def slice_blocks(part: OwnedSlice) -> list[BlockJson]:
    numel, total = part.tensor.numel(), prod(part.shape)
    if part.layout is not None:
        if part.layout.src_numel != numel or part.layout.dst_numel != total:
            raise InvalidInput(
                f"the layout of {part.name} maps {part.layout.src_numel} to {part.layout.dst_numel} elements, but the "
                f"slice has {numel} and the tensor {total}."
            )
        return _json(part.layout)
    if part.offset < 0 or part.offset + numel > total:
        raise InvalidInput(
            f"the slice of {part.name} ends at element {part.offset + numel}, the tensor has {total}.",
            remedy="Check its offset and shape.",
        )
    return [([numel], 0, [1], part.offset, [1])] if numel else []


def run_blocks(shard: OwnedShard, run: OwnedRun) -> list[BlockJson]:
    """A run's blocks, after its sizes were checked against the shard's memory and the canonical tensor."""
    held, total = shard.home.memory().numel(), prod(run.shape)
    if run.start < 0 or run.numel < 0 or run.start + run.numel > held:
        raise InvalidInput(
            f"{shard.label}: the run of {run.name} ends at element {run.start + run.numel}, the memory has {held}."
        )
    if run.layout.src_numel != run.numel or run.layout.dst_numel != total:
        raise InvalidInput(
            f"{shard.label}: the layout of {run.name} maps {run.layout.src_numel} to {run.layout.dst_numel} elements, "
            f"but the run has {run.numel} and the tensor {total}."
        )
    return _json(run.layout)


def check_runs(shard: OwnedShard) -> None:
    """InvalidInput if two runs share memory."""
    ordered = sorted(shard.runs, key=lambda r: r.start)
    for a, b in pairwise(ordered):
        if a.start + a.numel > b.start:
            raise InvalidInput(f"{shard.label}: the runs of {a.name} and {b.name} overlap in memory.")


def check_duplicates(shards: Sequence[Shard]) -> None:
    """InvalidInput if two slices are the same, or disagree about a tensor."""
    seen: dict[tuple[str, str, bool], str] = {}
    metas: dict[str, TensorMeta] = {}
    for s in shards:
        for p in s.pieces:
            key = (p.meta.name, repr(p.blocks), s.replica)
            if key in seen:
                raise InvalidInput(
                    f"{p.meta.name} is declared twice ({seen[key]} and {s.model_name or 'a slice'}).",
                    remedy="Give every tensor one owner and one canonical name.",
                )
            seen[key] = s.model_name or "a slice"
            if metas.setdefault(p.meta.name, p.meta) != p.meta:
                raise InvalidInput(f"slices of {p.meta.name} disagree about its shape or dtype.")


def check_storage(shards: Sequence[Shard]) -> None:
    """Moving a tensor cuts it off from whatever shares its memory, so nothing declared may."""
    memories = [(s.home.memory(), s) for s in shards]
    spans = sorted(((m.data_ptr(), m.numel() * m.element_size(), s) for m, s in memories), key=lambda x: x[0])
    for (start, size, a), (start_b, _, b) in pairwise(spans):
        if start + size > start_b and not (a.mirrored and b.mirrored):
            raise InvalidInput(
                f"{a.name} and {b.name} share memory but are different tensors.",
                remedy="Tie weights by using one Parameter object in both places.",
            )


def warn_of_views(moved: Iterable[Shard]) -> None:
    """Say which of the shards that will be moved are parts of a larger buffer."""
    views = []
    for s in moved:
        memory = s.home.memory()
        if memory.untyped_storage().nbytes() > memory.numel() * memory.element_size():
            views.append(s.name)
    if views:
        log.warning(
            "%d tensors are views of larger buffers (%s, …) and are moved out of them; a flat buffer kept elsewhere no "
            "longer follows them",
            len(views),
            views[0],
        )


def _json(layout: Layout) -> list[BlockJson]:
    return [
        (list(b.shape), b.src_offset, list(b.src_strides), b.dst_offset, list(b.dst_strides)) for b in layout.blocks
    ]
