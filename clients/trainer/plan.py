"""What a rank declares: every tensor of the model once, where its bits live, and how its changes are found.

One invariant: nothing is left undeclared without a word. Each parameter and persistent buffer becomes a shard, is an
alias of one, is renamed away on request, or is refused with what to do about it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from clients.protocol import Detector
from clients.trainer.arena import dtype_name
from clients.trainer.checks import (
    check_duplicates,
    check_held,
    check_local,
    check_master,
    check_runs,
    check_storage,
    dense_blocks,
    persistent_buffers,
    run_blocks,
    slice_blocks,
)
from clients.trainer.formulas import begin_state, formula_name, unsupported_reason
from clients.trainer.fused import MASTER, held_master
from clients.trainer.home import PlainHome, StateHome
from clients.trainer.names import meta_of, plain_name, stored_dtype
from clients.trainer.shards import Detectors, GroupKey, Names, OwnedShard, OwnedSlice, Piece, Plan, Shard
from engine.errors import InvalidInput, UnsupportedOptimizer

log = logging.getLogger(__name__)


class Planner:
    """Builds a Plan. One use."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        names: Names | None,
        detector: Detectors,
        dtypes: Mapping[str, str] | None,
        partial: bool = False,
    ) -> None:
        """`partial`: other ranks declare other tensors, so that this one may have none, or none of those named."""
        self.optimizers = optimizers
        self.plan = Plan()
        self._partial = partial
        self._names = names
        self._detector = detector
        self._dtypes = dict(dtypes or {})
        self._asked = dict(detector) if isinstance(detector, Mapping) else {}
        self._owner: dict[int, GroupKey] = {}
        self._group_number: dict[GroupKey, int] = {}
        self._kept: dict[str, list[str]] = {}
        self._elsewhere: dict[int, str] = {}
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
            canonical = self.canonical(name)
            if id(param) in owners:
                self.add_alias(name, owners[id(param)])
                continue
            if canonical is None:
                log.info("parameter %s is not published (renamed to None)", name)
                continue
            owners[id(param)] = canonical
            self.add_parameter(name, param, master_of.get(id(param)))
        for name, buffer in persistent_buffers(model):
            self.add_buffer(name, buffer)

    def add_parameter(
        self,
        name: str,
        param: torch.Tensor,
        master: torch.Tensor | None = None,
        *,
        cell: str | None = None,
        holders: int | None = None,
    ) -> None:
        """Declare a whole parameter of the model, or the master that the optimizer updates in its place. `cell` and
        `holders` as in OwnedShard."""
        canonical = self.canonical(name)
        if canonical is None:
            return
        check_local(name, param)
        dtype = self._dtypes.get(canonical) or stored_dtype(canonical, param)
        if master is not None:
            check_local(f"master of {name}", master)
            check_master(name, param, master)
        theta = param if master is None else master
        key = self._owner.get(id(theta))
        kind = self._choose(canonical, dtype, theta, theta.dtype, key, None) if holders is None else "dense"
        meta = meta_of(canonical, tuple(param.shape), dtype)
        piece = Piece(meta, 0, theta.numel(), dense_blocks(canonical, theta), kind)
        shard = Shard(canonical, PlainHome(theta), (piece,), model_name=name, cell=cell, holders=holders)
        self._append(self._keyed(shard, key))

    def add_buffer(
        self, name: str, buffer: torch.Tensor, *, cell: str | None = None, holders: int | None = None
    ) -> None:
        """Declare a buffer of the model, as a side tensor: it is looked up by this name at every sync. `cell` and
        `holders` as in OwnedShard."""
        canonical = self.canonical(name)
        if canonical is None:
            log.info("buffer %s is not published (renamed to None)", name)
            return
        check_local(name, buffer)
        own = dtype_name(buffer.dtype)
        if own is None:
            raise InvalidInput(
                f"buffer {name} has dtype {buffer.dtype}, which cannot be published.",
                remedy="Leave it out with names={…: None}, or register it with persistent=False.",
            )
        meta = meta_of(canonical, tuple(buffer.shape), self._dtypes.get(canonical, own))
        kind: Detector = self._asked.get(canonical, "snapshot") if holders is None else "dense"
        piece = Piece(meta, 0, buffer.numel(), dense_blocks(name, buffer), kind)
        home = PlainHome(buffer)
        self._append(Shard(canonical, home, (piece,), mirrored=True, model_name=name, cell=cell, holders=holders))

    def add_alias(self, name: str, owner: str) -> None:
        """Note that the model's `name` is tied to the canonical tensor `owner`."""
        canonical = self.canonical(name)
        if canonical is not None and canonical != owner:
            self.plan.aliases[canonical] = owner

    def add_elsewhere(self, name: str, tensor: torch.Tensor) -> None:
        """Note that other ranks publish `name`, of which this rank's optimizer may hold `tensor` all the same."""
        canonical = self.canonical(name)
        if canonical is not None:
            self._elsewhere[id(tensor)] = canonical

    def add_slice(self, part: OwnedSlice) -> None:
        """Declare a flat range that this rank owns."""
        canonical = self.canonical(part.name)
        if canonical is None:
            return
        check_local(part.name, part.tensor)
        if not part.tensor.is_contiguous():
            raise InvalidInput(f"the slice of {part.name} is not contiguous.", remedy="Pass contiguous local memory.")
        blocks = slice_blocks(part)
        dtype = part.dtype or self._dtypes.get(canonical) or stored_dtype(canonical, part.tensor)
        key, kind = self._owner.get(id(part.tensor)), part.detector or "snapshot"
        if part.holders is not None:
            kind = "dense"
        elif not part.side:
            kind = self._choose(canonical, dtype, part.tensor, part.tensor.dtype, key, part.detector)
        piece = Piece(meta_of(canonical, part.shape, dtype), 0, part.tensor.numel(), blocks, kind)
        shard = Shard(
            canonical,
            PlainHome(part.tensor),
            (piece,),
            mirrored=part.side,
            cell=part.cell,
            holders=part.holders,
        )
        self._append(shard if part.side else self._keyed(shard, key))

    def add_shard(self, owned: OwnedShard) -> None:
        """Declare memory that holds pieces of one or several canonical tensors."""
        memory, param = owned.home.memory(), owned.home.param
        check_local(owned.label, memory)
        if not memory.is_contiguous():
            raise InvalidInput(f"the memory of {owned.label} is not contiguous.")
        check_runs(owned)
        key = self._owner.get(id(param))
        pieces = []
        for run in owned.runs:
            canonical = self.canonical(run.name)
            if canonical is None or not run.numel:
                continue
            dtype = run.dtype or self._dtypes.get(canonical) or stored_dtype(canonical, memory)
            replica = owned.holders is not None
            kind = "dense" if replica else self._choose(canonical, dtype, param, memory.dtype, key, run.detector)
            pieces.append(
                Piece(meta_of(canonical, run.shape, dtype), run.start, run.numel, run_blocks(owned, run), kind)
            )
        if pieces:
            shard = Shard(
                owned.label,
                owned.home,
                tuple(pieces),
                mirrored=owned.mirrored,
                cell=owned.cell,
                holders=owned.holders,
            )
            self._append(self._keyed(shard, key))

    def canonical(self, name: str) -> str | None:
        """The name to publish under; None for what is left out."""
        name = plain_name(name)
        if self._names is None:
            return name
        return self._names.get(name, name) if isinstance(self._names, Mapping) else self._names(name)

    def finish(self) -> Plan:
        """The plan, after checks that concern all shards together."""
        declared_names = {t.name for t in self.plan.tensors} | set(self.plan.aliases)
        declared_names |= set(self._elsewhere.values())
        for what, given in (("detector", self._asked), ("dtypes", self._dtypes)):
            unknown = sorted(given.keys() - declared_names)
            if unknown and not self._partial:
                raise InvalidInput(f"{what} names tensors that are not declared: {unknown[:5]}.")
        if not self.plan.shards and not self._elsewhere and not self._partial:
            raise InvalidInput("there is nothing to publish: no parameters, buffers or slices.")
        check_duplicates(self.plan.shards)
        check_storage(self.plan.shards)
        declared = {id(s.home.param) for s in self.plan.shards} | self._elsewhere.keys()
        trained = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
        extra = sum(1 for p in trained if id(p) not in declared and p.numel())
        if extra:
            log.warning("%d parameters of the optimizer belong to no declared tensor and are not published", extra)
        for why, names in self._kept.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            log.warning("%s%s: the snapshot detector (the daemon keeps their previous bits): %s", names[0], more, why)
        for alias, owner in self.plan.aliases.items():
            log.info("%s is tied to %s; only the latter is published", alias, owner)
        return self.plan

    def _keyed(self, shard: Shard, key: GroupKey | None) -> Shard:
        """The shard with its optimizer, and its group if the optimizer's state is read."""
        if key is not None:
            shard.optimizer = key.optimizer
            if any(p.detector == "certified" for p in shard.pieces):
                shard.group = self._number(key)
                self._find_master(shard, key)
        return shard

    def _find_master(self, shard: Shard, key: GroupKey) -> None:
        """Point the shard at the masters in the optimizer's state, if it keeps them there."""
        optimizer, param = self.optimizers[key.optimizer], shard.home.param
        held = held_master(optimizer, param)
        if held is None:
            return
        if not shard.home.memory().is_contiguous():
            raise InvalidInput(
                f"{shard.name} is not contiguous, but its optimizer's state is.",
                remedy="Make the parameter contiguous, or pass detector='snapshot' for it.",
            )
        if held == "remainder":
            shard.split = True
            return
        begin_state(optimizer, optimizer.param_groups[key.index], param)
        shard.home, shard.mirrored = StateHome(optimizer, param, MASTER), False
        check_held(shard)

    def _choose(
        self,
        name: str,
        dtype: str,
        param: torch.Tensor,
        stored: torch.dtype,
        key: GroupKey | None,
        asked: Detector | None,
    ) -> Detector:
        """The detector for one tensor: what was asked for, else certified wherever a formula covers it."""
        asked = asked or self._asked.get(name)
        frozen = not param.requires_grad and (key is None or isinstance(param, torch.nn.Parameter))
        if asked is None and isinstance(self._detector, str) and not frozen:
            asked = self._detector
        if asked is not None and asked != "certified":
            return asked
        if key is not None and held_master(self.optimizers[key.optimizer], param):
            stored = torch.float32
        why_not = self._why_not_certified(dtype, stored, key)
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
            self._kept.setdefault(why_not, []).append(name)
            return "snapshot"
        return "certified"

    def _why_not_certified(self, dtype: str, stored: torch.dtype, key: GroupKey | None) -> str:
        if key is None:
            return "no optimizer given here updates it"
        if stored != torch.float32:
            return f"it is trained in {stored} itself, without an FP32 master"
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

    def _append(self, shard: Shard) -> None:
        if shard.home.memory().numel():  # an empty tensor has no bits to publish
            self.plan.shards.append(shard)
