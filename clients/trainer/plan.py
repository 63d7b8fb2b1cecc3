"""What a rank declares: every tensor of the model once, where its bits live, and how its changes are found.

One invariant: nothing is left undeclared without a word. Each parameter and persistent buffer becomes a shard, is an
alias of one, is renamed away on request, or is refused with what to do about it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import get_args

import torch

from clients.protocol import Detector
from clients.trainer.arena import dtype_name
from clients.trainer.formulas import formula_name, unsupported_reason
from clients.trainer.names import meta_of, plain_name, stored_dtype
from engine.errors import InvalidInput, UnsupportedOptimizer
from engine.layout.blocks import Layout
from engine.records.models import BlockJson, TensorMeta

log = logging.getLogger(__name__)

Names = Callable[[str], str | None] | Mapping[str, str | None]
Detectors = Detector | Mapping[str, Detector] | None


@dataclass(frozen=True)
class OwnedSlice:
    """A part of a canonical tensor that this rank owns, when it owns only ranges of parameters.

    `tensor` is the contiguous local memory (an optimizer's parameter for detector `certified`). It is the flat range of
    the canonical tensor that starts at `offset`, unless `layout` says where its elements lie. `side` tensors are not
    touched by an optimizer: they are copied at every sync instead of moved into shared memory.
    """

    name: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    offset: int = 0
    layout: Layout | None = None
    dtype: str | None = None
    detector: Detector | None = None
    side: bool = False


@dataclass(eq=False)
class Shard:
    """One slice: `theta` is the live tensor its bits come from. `group` counts (optimizer, group) pairs of the plan."""

    meta: TensorMeta
    theta: torch.Tensor
    blocks: list[BlockJson]
    detector: Detector
    optimizer: int | None = None
    group: int | None = None
    mirrored: bool = False
    model_name: str | None = None


@dataclass(frozen=True)
class GroupKey:
    """A parameter group, by position: `load_state_dict` replaces the group's dict, never its place."""

    optimizer: int
    index: int


@dataclass
class Plan:
    """All shards of a rank, the groups they use formulas of, and names that are aliases of a shard's."""

    shards: list[Shard] = field(default_factory=list)
    groups: list[GroupKey] = field(default_factory=list)
    formulas: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)


class Planner:
    """Builds a Plan. One use."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        names: Names | None,
        detector: Detectors,
        dtypes: Mapping[str, str] | None,
    ) -> None:
        self.optimizers = optimizers
        self.plan = Plan()
        self._names = names
        self._detector = detector
        self._dtypes = dict(dtypes or {})
        self._asked = dict(detector) if isinstance(detector, Mapping) else {}
        self._owner: dict[int, GroupKey] = {}
        self._group_number: dict[GroupKey, int] = {}
        for i, optimizer in enumerate(optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for p in group["params"]:
                    if id(p) in self._owner:
                        raise InvalidInput("a parameter belongs to two optimizers or groups.", remedy="Give it one.")
                    self._owner[id(p)] = GroupKey(i, j)
        wanted = self._asked.values() if self._asked else ([detector] if isinstance(detector, str) else [])
        for d in wanted:
            if d not in get_args(Detector):
                raise InvalidInput(f"unknown detector {d!r}.", remedy=f"Use one of {', '.join(get_args(Detector))}.")

    def add_model(self, model: torch.nn.Module, masters: Mapping[str, torch.Tensor]) -> None:
        """Declare every parameter and persistent buffer of `model`."""
        owners: dict[int, str] = {}
        every = dict(model.named_parameters(remove_duplicate=False))
        unknown = set(masters) - set(every)
        if unknown:
            raise InvalidInput(f"masters names no parameter of the model: {sorted(unknown)[:5]}.")
        master_of = {id(every[name]): master for name, master in masters.items()}
        for name, param in every.items():
            canonical = self._rename(name)
            if id(param) in owners:
                if canonical is not None and canonical != owners[id(param)]:
                    self.plan.aliases[canonical] = owners[id(param)]
                continue
            if canonical is None:
                log.info("parameter %s is not published (renamed to None)", name)
                continue
            owners[id(param)] = canonical
            master = master_of.get(id(param))
            _check_local(name, param)
            dtype = self._dtypes.get(canonical) or stored_dtype(canonical, param)
            if master is not None:
                _check_local(f"master of {name}", master)
                _check_master(name, param, master)
            self._add(canonical, tuple(param.shape), dtype, param if master is None else master, name, None, None)
        for name, buffer in _persistent_buffers(model):
            canonical = self._rename(name)
            if canonical is None:
                log.info("buffer %s is not published (renamed to None)", name)
                continue
            _check_local(name, buffer)
            own = dtype_name(buffer.dtype)
            if own is None:
                raise InvalidInput(
                    f"buffer {name} has dtype {buffer.dtype}, which cannot be published.",
                    remedy="Leave it out with names={…: None}, or register it with persistent=False.",
                )
            self._append(
                Shard(
                    meta_of(canonical, tuple(buffer.shape), self._dtypes.get(canonical, own)),
                    buffer,
                    _dense_blocks(name, buffer),
                    self._asked.get(canonical, "snapshot"),
                    mirrored=True,
                    model_name=name,
                )
            )

    def add_slice(self, part: OwnedSlice) -> None:
        """Declare a flat range that this rank owns."""
        canonical = self._rename(part.name)
        if canonical is None:
            return
        _check_local(part.name, part.tensor)
        if not part.tensor.is_contiguous():
            raise InvalidInput(f"the slice of {part.name} is not contiguous.", remedy="Pass contiguous local memory.")
        blocks = _slice_blocks(part)
        dtype = part.dtype or self._dtypes.get(canonical) or stored_dtype(canonical, part.tensor)
        if part.side:
            kind: Detector = part.detector or "snapshot"
            self._append(Shard(meta_of(canonical, part.shape, dtype), part.tensor, blocks, kind, mirrored=True))
            return
        self._add(canonical, part.shape, dtype, part.tensor, None, blocks, part.detector)

    def finish(self) -> Plan:
        """The plan, after checks that concern all shards together."""
        declared_names = {s.meta.name for s in self.plan.shards} | set(self.plan.aliases)
        for what, given in (("detector", self._asked), ("dtypes", self._dtypes)):
            unknown = sorted(given.keys() - declared_names)
            if unknown:
                raise InvalidInput(f"{what} names tensors that are not declared: {unknown[:5]}.")
        if not self.plan.shards:
            raise InvalidInput("there is nothing to publish: no parameters, buffers or slices.")
        _check_duplicates(self.plan.shards)
        _check_storage(self.plan.shards)
        declared = {id(s.theta) for s in self.plan.shards}
        trained = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
        extra = sum(1 for p in trained if id(p) not in declared and p.numel())
        if extra:
            log.warning("%d parameters of the optimizer belong to no declared tensor and are not published", extra)
        for alias, owner in self.plan.aliases.items():
            log.info("%s is tied to %s; only the latter is published", alias, owner)
        return self.plan

    def _add(
        self,
        canonical: str,
        shape: tuple[int, ...],
        dtype: str,
        theta: torch.Tensor,
        model_name: str | None,
        blocks: list[BlockJson] | None,
        asked: Detector | None,
    ) -> None:
        key = self._owner.get(id(theta))
        kind = self._choose(canonical, dtype, theta, key, asked)
        shard = Shard(meta_of(canonical, shape, dtype), theta, blocks or _dense_blocks(canonical, theta), kind)
        shard.model_name = model_name
        if key is not None:
            shard.optimizer = key.optimizer
            if kind == "certified":
                shard.group = self._number(key)
        self._append(shard)

    def _choose(
        self, name: str, dtype: str, theta: torch.Tensor, key: GroupKey | None, asked: Detector | None
    ) -> Detector:
        """The detector for one tensor: what was asked for, else certified wherever a formula covers it."""
        asked = asked or self._asked.get(name)
        frozen = not theta.requires_grad and (key is None or isinstance(theta, torch.nn.Parameter))
        if asked is None and isinstance(self._detector, str) and not frozen:
            asked = self._detector
        if asked is not None and asked != "certified":
            return asked
        why_not = self._why_not_certified(dtype, theta, key)
        if asked == "certified" and why_not:
            raise InvalidInput(
                f"{name} cannot have the certified detector: {why_not}.", remedy="Use 'snapshot' or 'dense'."
            )
        if asked is None and frozen:
            return "frozen"
        if key is not None:
            optimizer = self.optimizers[key.optimizer]
            reason = unsupported_reason(optimizer, optimizer.param_groups[key.index])
            if reason is not None:
                raise UnsupportedOptimizer(
                    f"no formula undoes the step of {name}'s optimizer: {reason}.",
                    remedy="Pass detector='snapshot' (the daemon keeps the previous weights of these tensors) or "
                    "detector='dense' (they are sent whole), for all tensors, or per tensor: "
                    f"detector={{{name!r}: 'snapshot'}}.",
                )
        if why_not:
            log.warning("%s gets the snapshot detector: %s", name, why_not)
            return "snapshot"
        return "certified"

    def _why_not_certified(self, dtype: str, theta: torch.Tensor, key: GroupKey | None) -> str:
        if key is None:
            return "no optimizer given here updates it"
        if theta.dtype != torch.float32:
            return f"it is trained in {theta.dtype} itself, without an FP32 master"
        if dtype != "bfloat16":
            return f"receivers store it as {dtype}, and certified detection is for bfloat16"
        return ""

    def _number(self, key: GroupKey) -> int:
        if key not in self._group_number:
            optimizer = self.optimizers[key.optimizer]
            self.plan.formulas.append(formula_name(optimizer, optimizer.param_groups[key.index]))
            self.plan.groups.append(key)
            self._group_number[key] = len(self.plan.groups) - 1
        return self._group_number[key]

    def _rename(self, name: str) -> str | None:
        name = plain_name(name)
        if self._names is None:
            return name
        return self._names.get(name, name) if isinstance(self._names, Mapping) else self._names(name)

    def _append(self, shard: Shard) -> None:
        if shard.theta.numel():  # an empty tensor has no bits to publish
            self.plan.shards.append(shard)


def _persistent_buffers(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def _check_local(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise InvalidInput(
            f"{name} is a {type(tensor).__name__}, not a plain tensor.",
            remedy="Declare this rank's local memory with slices=[OwnedSlice(…)].",
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise InvalidInput(
            f"{name} lies on {tensor.device} ({tensor.layout}); this client shares plain CPU memory.",
            remedy="Train on the CPU, or leave the tensor out with names={…: None}.",
        )


def _check_master(name: str, param: torch.Tensor, master: torch.Tensor) -> None:
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


def _dense_blocks(name: str, tensor: torch.Tensor) -> list[BlockJson]:
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


def _slice_blocks(part: OwnedSlice) -> list[BlockJson]:
    numel, total = part.tensor.numel(), prod(part.shape)
    if part.layout is not None:
        if part.layout.src_numel != numel or part.layout.dst_numel != total:
            raise InvalidInput(
                f"the layout of {part.name} maps {part.layout.src_numel} to {part.layout.dst_numel} elements, but the "
                f"slice has {numel} and the tensor {total}."
            )
        return [
            (list(b.shape), b.src_offset, list(b.src_strides), b.dst_offset, list(b.dst_strides))
            for b in part.layout.blocks
        ]
    if part.offset < 0 or part.offset + numel > total:
        raise InvalidInput(
            f"the slice of {part.name} ends at element {part.offset + numel}, the tensor has {total}.",
            remedy="Check its offset and shape.",
        )
    return [([numel], 0, [1], part.offset, [1])] if numel else []


def _check_duplicates(shards: list[Shard]) -> None:
    seen: dict[tuple[str, str], str] = {}
    metas: dict[str, TensorMeta] = {}
    for s in shards:
        key = (s.meta.name, repr(s.blocks))
        if key in seen:
            raise InvalidInput(
                f"{s.meta.name} is declared twice ({seen[key]} and {s.model_name or 'a slice'}).",
                remedy="Give every tensor one owner and one canonical name.",
            )
        seen[key] = s.model_name or "a slice"
        if metas.setdefault(s.meta.name, s.meta) != s.meta:
            raise InvalidInput(f"slices of {s.meta.name} disagree about its shape or dtype.")


def _check_storage(shards: list[Shard]) -> None:
    """Moving a tensor cuts it off from whatever shares its memory, so nothing declared may."""
    spans = sorted(
        ((s.theta.data_ptr(), s.theta.numel() * s.theta.element_size(), s) for s in shards), key=lambda x: x[0]
    )
    for (start, size, a), (start_b, _, b) in pairwise(spans):
        if start + size > start_b and not (a.mirrored and b.mirrored):
            raise InvalidInput(
                f"{a.meta.name} and {b.meta.name} share memory but are different tensors.",
                remedy="Tie weights by using one Parameter object in both places.",
            )
    views = [
        s.meta.name
        for s in shards
        if not s.mirrored and s.theta.untyped_storage().nbytes() > s.theta.numel() * s.theta.element_size()
    ]
    if views:
        log.warning(
            "%d tensors are views of larger buffers (%s, …) and are moved out of them; a flat buffer kept elsewhere no "
            "longer follows them",
            len(views),
            views[0],
        )
