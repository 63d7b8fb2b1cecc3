"""Moves a rank's tensors into shared memory and keeps them there.

One invariant: training computes exactly what it would have computed without us. Values are moved bit for bit with their
strides, optimizer state is created as torch would create it at the first step, and parameters stay the same objects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clients.protocol import MemoryRef, SliceSpec
from clients.trainer.arena import Arena, Slot, slot_bytes
from clients.trainer.formulas import new_step_counter
from clients.trainer.fused import GroupSteps
from clients.trainer.home import Home, local_of, put_local
from clients.trainer.shards import Piece, Plan, Shard
from engine.errors import StateConflict
from transports.memory.shm import DTYPES

log = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(eq=False)
class _Bound:
    """A shard with its places. `moments` maps state keys (exp_avg and the second moment in use) to slots.

    Of a frozen one: `version` is torch's own count of in-place writes when it was last looked at, `writes` how often it
    may have been written since the registration.
    """

    shard: Shard
    theta: Slot
    moments: dict[str, Slot]
    version: int = 0
    writes: int = 0
    warned: bool = False


class Binding:
    """The shared memory of one rank's plan. All methods that write must run inside a mutation."""

    def __init__(
        self, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], models: Sequence[torch.nn.Module]
    ) -> None:
        self._plan = plan
        self._optimizers = optimizers
        self._models = models
        self._bound: list[_Bound] = []
        self._arena: Arena | None = None
        self.group_steps = GroupSteps(optimizers)

    @property
    def size_bytes(self) -> int:
        """Shared memory in use."""
        return self._arena.size_bytes if self._arena is not None else 0

    def move_in(self, name_of: Callable[[int], str]) -> None:
        """Move everything in. On SharedMemoryFull all is moved out again and no file is left."""
        self._arena = Arena(name_of, sum(self._shard_bytes(s) for s in self._plan.shards))
        try:
            for shard in self._plan.shards:
                self._bound.append(self._move_in(shard, self._arena))
        except BaseException:
            self.move_out()
            raise

    def move_out(self) -> None:
        """Copy every tensor that lies in shared memory back to private memory and remove the files."""
        for b in self._bound:
            if not b.shard.mirrored and b.theta.holds(b.shard.home.memory()):
                b.shard.home.replace(b.theta.view.clone(memory_format=torch.preserve_format))
            state = self._state(b.shard)
            for key, slot in b.moments.items():
                if key in state and slot.holds(local_of(state[key])):
                    put_local(state, key, slot.view.clone(memory_format=torch.preserve_format))
        self.close()

    def close(self) -> None:
        """Remove the files' names; the tensors stay where they are, as memory of this process alone."""
        if self._arena is not None:
            self._arena.close()

    def adopt(self) -> list[int]:
        """Move in again whatever left its slot (`load_state_dict` and the like). Returns the shards' numbers.

        StateConflict when a parameter was replaced by another object, or changed its shape, dtype or device.
        """
        self._check_identity()
        moved = {id(b.shard) for b in self._bound if self._adopt(b)}
        return [i for i, (b, _) in enumerate(self._slices()) if id(b.shard) in moved]

    def refresh_mirrors(self) -> None:
        """Copy the side tensors (buffers), which others write whenever they like, into their slots."""
        buffers = {name: b for model in self._models for name, b in model.named_buffers()}
        for b in self._bound:
            if not b.shard.mirrored:
                continue
            live = buffers.get(b.shard.model_name or "", b.shard.home.memory())
            if not b.theta.fits(live):
                raise _changed(b.shard.name, live)
            if b.shard.frozen and not _same_bits(live, b.theta.view):
                self._written(b)
            b.theta.take(live)

    def note_writes(self, *, announced: bool) -> None:
        """Count the frozen tensors that may have been written, so that the daemon looks at them again.

        Torch counts in-place writes to a tensor, those of optimizers and of `load_state_dict` included, but not those
        through `.data`: after a mutation the trainer announced (`announced`), any of them may have been written.
        """
        for b in self._bound:
            if not b.shard.frozen or b.shard.mirrored:
                continue
            seen, b.version = b.version, _writes_to(b.shard.home)
            if seen != b.version:
                self._written(b)
            elif announced:
                b.writes += 1

    def specs(self, numbers: Sequence[int] | None = None) -> list[SliceSpec]:
        """The slices as the daemon is told about them (all, or those numbered)."""
        slices = self._slices()
        return [self._spec(i, *slices[i]) for i in (range(len(slices)) if numbers is None else numbers)]

    def steps(self) -> list[int]:
        """Every slice's own step counter; of frozen slices how often they may have been written, 0 for others."""
        counters = [self._counter(b.shard) for b in self._bound]
        slices = ((c, b, piece) for c, b in zip(counters, self._bound, strict=True) for piece in b.shard.pieces)
        return [c if piece.detector == "certified" else b.writes for c, b, piece in slices]

    def with_writes(self, steps: Sequence[int]) -> list[int]:
        """`steps` of an earlier moment, with the writes to frozen slices of now."""
        slices = zip(steps, self._slices(), strict=True)
        return [s if piece.detector == "certified" else b.writes for s, (b, piece) in slices]

    def _counter(self, shard: Shard) -> int:
        if shard.group is None:
            return 0
        if self.group_steps.counts(self._plan.groups[shard.group].optimizer):
            return self.group_steps.of(shard.home.param)
        return int(self._state(shard).get("step", 0))

    def _slices(self) -> list[tuple[_Bound, Piece]]:
        """Every piece with the shard it lies in, in the order of the registration."""
        return [(b, piece) for b in self._bound for piece in b.shard.pieces]

    # --- one shard ---------------------------------------------------------------------------------------------------

    def _move_in(self, shard: Shard, arena: Arena) -> _Bound:
        memory = shard.home.memory()
        slot = arena.slot_like(memory)
        bound = _Bound(shard, slot, {})
        view = slot.take(memory)
        if not shard.mirrored:
            shard.home.replace(view)
        bound.version = _writes_to(shard.home)
        if shard.group is not None:
            self._ensure_state(shard)
            state = self._state(shard)
            for key in self._moment_keys(shard):
                bound.moments[key] = arena.slot_like(local_of(state[key]))
            self._adopt_moments(bound)
        return bound

    def _adopt(self, b: _Bound) -> bool:
        memory, moved = b.shard.home.memory(), False
        if not b.shard.mirrored and not b.theta.holds(memory):
            if not b.theta.fits(memory):
                raise _changed(b.shard.name, memory)
            if b.shard.frozen and not _same_bits(memory, b.theta.view):
                self._written(b)
            b.shard.home.replace(b.theta.take(memory))
            moved = True
        if b.shard.group is not None:
            self._ensure_state(b.shard)
            moved = self._adopt_moments(b) or moved
        return moved

    def _written(self, b: _Bound) -> None:
        if not b.warned:
            b.warned = True
            log.warning(
                "%s was declared frozen and has been written: whatever changed of it is sent whole, tile by tile. If "
                "that goes on, register again or declare it with detector={%r: 'snapshot'}.",
                b.shard.name,
                b.shard.pieces[0].meta.name,
            )
        b.writes += 1

    def _adopt_moments(self, b: _Bound) -> bool:
        state, moved = self._state(b.shard), False
        for key, slot in b.moments.items():
            memory = local_of(state[key])
            if slot.holds(memory):
                continue
            if not slot.fits(memory):
                raise _changed(f"{key} of {b.shard.name}", memory)
            put_local(state, key, slot.take(memory))
            moved = True
        return moved

    def _ensure_state(self, shard: Shard) -> None:
        """Create the optimizer state of a parameter that had no step yet, as torch would at the first one.

        Same keys in the same order, same dtypes: only earlier. A parameter without gradient keeps step 0 and zeros,
        which is what the formula of "not advanced" and torch's own later start both mean.
        """
        state = self._state(shard)
        if state:
            return
        group = self._group(shard)
        assert shard.group is not None
        number = self._plan.groups[shard.group].optimizer
        if not self.group_steps.counts(number):
            state["step"] = new_step_counter(group, shard.home.param)
        dtypes = getattr(self._optimizers[number], "name_to_dtype_map", None) or {}
        for key in _MOMENTS[: 3 if group.get("amsgrad") else 2]:
            state[key] = torch.zeros_like(
                shard.home.param.detach(), dtype=dtypes.get(key), memory_format=torch.preserve_format
            )

    def _moment_keys(self, shard: Shard) -> tuple[str, str]:
        """The first moment, and the second one that the step divides by."""
        return "exp_avg", "max_exp_avg_sq" if self._group(shard).get("amsgrad") else "exp_avg_sq"

    def _spec(self, number: int, b: _Bound, piece: Piece) -> SliceSpec:
        certified = piece.detector == "certified"
        moments: list[MemoryRef | None] = [_part(s.ref, piece) for s in b.moments.values()] if certified else []
        first, second = moments or (None, None)
        return SliceSpec(
            slice=number,
            tensor=piece.meta.name,
            numel=piece.numel,
            blocks=piece.blocks,
            detector=piece.detector,
            theta=_part(b.theta.ref, piece),
            exp_avg=first,
            exp_avg_sq=second,
            group=b.shard.group if certified else None,
        )

    def _shard_bytes(self, shard: Shard) -> int:
        return slot_bytes(shard.home.memory()) * (3 if shard.group is not None else 1)

    def _group(self, shard: Shard) -> dict[str, Any]:
        assert shard.group is not None
        key = self._plan.groups[shard.group]
        group: dict[str, Any] = self._optimizers[key.optimizer].param_groups[key.index]
        return group

    def _state(self, shard: Shard) -> dict[str, Any]:
        if shard.group is None:
            return {}
        state: dict[str, Any] = self._optimizers[self._plan.groups[shard.group].optimizer].state[shard.home.param]
        return state

    def _check_identity(self) -> None:
        """A parameter object that the model or the optimizer no longer uses must not be published as if it did."""
        used = {id(p) for optimizer in self._optimizers for g in optimizer.param_groups for p in g["params"]}
        named = {name: p for model in self._models for name, p in model.named_parameters()}
        for b in self._bound:
            s = b.shard
            param = s.home.param
            lost = s.optimizer is not None and id(param) not in used
            if not lost and s.model_name in named and isinstance(param, torch.nn.Parameter) and s.optimizer is None:
                lost = named[s.model_name] is not param
            if lost:
                raise StateConflict(
                    f"the parameter of {s.name} was replaced by another object.",
                    remedy="Close this source and register a new one (load_state_dict with assign=True, or a new "
                    "optimizer, replaces parameters).",
                )


def _writes_to(home: Home) -> int:
    """Torch's count of in-place writes. A write to a DTensor counts there, and not in the memory it reaches."""
    return home.param._version + home.memory()._version


def _changed(name: str, tensor: torch.Tensor) -> StateConflict:
    return StateConflict(
        f"{name} is now {tensor.dtype}, shape {tuple(tensor.shape)} on {tensor.device}, not what was registered.",
        remedy="Bring it back before the next sync (offloading belongs inside `with source.mutating()` both ways), or "
        "close this source and register again.",
    )


def _part(ref: MemoryRef, piece: Piece) -> MemoryRef:
    """Where the piece's elements lie within a shard's slot."""
    if piece.start == 0 and piece.numel == ref.numel:
        return ref
    skipped = piece.start * DTYPES[ref.dtype].itemsize
    return ref.model_copy(update={"offset_bytes": ref.offset_bytes + skipped, "numel": piece.numel})


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
