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
from clients.trainer.plan import Plan, Shard
from engine.errors import StateConflict

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

    def __init__(self, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None) -> None:
        self._plan = plan
        self._optimizers = optimizers
        self._model = model
        self._bound: list[_Bound] = []
        self._arena: Arena | None = None

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
            if not b.shard.mirrored and b.theta.holds(b.shard.theta):
                b.shard.theta.data = b.theta.view.clone(memory_format=torch.preserve_format)
            state = self._state(b.shard)
            for key, slot in b.moments.items():
                if key in state and slot.holds(state[key]):
                    state[key] = slot.view.clone(memory_format=torch.preserve_format)
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
        return [i for i, b in enumerate(self._bound) if not b.shard.mirrored and self._adopt(b)]

    def refresh_mirrors(self) -> None:
        """Copy the side tensors (buffers), which others write whenever they like, into their slots."""
        buffers = dict(self._model.named_buffers()) if self._model is not None else {}
        for b in self._bound:
            if not b.shard.mirrored:
                continue
            live = buffers.get(b.shard.model_name or "", b.shard.theta)
            if not b.theta.fits(live):
                raise _changed(b.shard.meta.name, live)
            if b.shard.detector == "frozen" and not _same_bits(live, b.theta.view):
                self._written(b)
            b.theta.take(live)

    def note_writes(self, *, announced: bool) -> None:
        """Count the frozen tensors that may have been written, so that the daemon looks at them again.

        Torch counts in-place writes to a tensor, those of optimizers and of `load_state_dict` included, but not those
        through `.data`: after a mutation the trainer announced (`announced`), any of them may have been written.
        """
        for b in self._bound:
            if b.shard.detector != "frozen" or b.shard.mirrored:
                continue
            seen, b.version = b.version, b.shard.theta._version
            if seen != b.version:
                self._written(b)
            elif announced:
                b.writes += 1

    def specs(self, numbers: Sequence[int] | None = None) -> list[SliceSpec]:
        """The slices as the daemon is told about them (all, or those numbered)."""
        return [self._spec(i) for i in (range(len(self._bound)) if numbers is None else numbers)]

    def steps(self) -> list[int]:
        """Every slice's own step counter; of frozen slices how often they may have been written, 0 for others."""
        counters = [self._state(b.shard).get("step", 0) if b.shard.group is not None else b.writes for b in self._bound]
        return [int(c) for c in counters]

    def with_writes(self, steps: Sequence[int]) -> list[int]:
        """`steps` of an earlier moment, with the writes to frozen slices of now."""
        return [s if b.shard.group is not None else b.writes for s, b in zip(steps, self._bound, strict=True)]

    # --- one shard ---------------------------------------------------------------------------------------------------

    def _move_in(self, shard: Shard, arena: Arena) -> _Bound:
        slot = arena.slot_like(shard.theta)
        bound = _Bound(shard, slot, {})
        view = slot.take(shard.theta)
        if not shard.mirrored:
            shard.theta.data = view
        bound.version = shard.theta._version
        if shard.group is not None:
            self._ensure_state(shard)
            for key in self._moment_keys(shard):
                bound.moments[key] = arena.slot_like(shard.theta)
            self._adopt_moments(bound)
        return bound

    def _adopt(self, b: _Bound) -> bool:
        theta, moved = b.shard.theta, False
        if not b.theta.holds(theta):
            if not b.theta.fits(theta):
                raise _changed(b.shard.meta.name, theta)
            if b.shard.detector == "frozen" and not _same_bits(theta, b.theta.view):
                self._written(b)
            theta.data = b.theta.take(theta)
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
                b.shard.meta.name,
                b.shard.meta.name,
            )
        b.writes += 1

    def _adopt_moments(self, b: _Bound) -> bool:
        state, moved = self._state(b.shard), False
        for key, slot in b.moments.items():
            if slot.holds(state[key]):
                continue
            if not slot.fits(state[key]):
                raise _changed(f"{key} of {b.shard.meta.name}", state[key])
            state[key] = slot.take(state[key])
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
        state["step"] = new_step_counter(group, shard.theta)
        for key in _MOMENTS[: 3 if group["amsgrad"] else 2]:
            state[key] = torch.zeros_like(shard.theta.detach(), memory_format=torch.preserve_format)

    def _moment_keys(self, shard: Shard) -> tuple[str, str]:
        """The first moment, and the second one that the step divides by."""
        return "exp_avg", "max_exp_avg_sq" if self._group(shard)["amsgrad"] else "exp_avg_sq"

    def _spec(self, number: int) -> SliceSpec:
        b = self._bound[number]
        moments: list[MemoryRef | None] = [slot.ref for slot in b.moments.values()] or [None, None]
        return SliceSpec(
            slice=number,
            tensor=b.shard.meta.name,
            numel=b.shard.theta.numel(),
            blocks=b.shard.blocks,
            detector=b.shard.detector,
            theta=b.theta.ref,
            exp_avg=moments[0],
            exp_avg_sq=moments[1],
            group=b.shard.group,
        )

    def _shard_bytes(self, shard: Shard) -> int:
        return slot_bytes(shard.theta) * (3 if shard.group is not None else 1)

    def _group(self, shard: Shard) -> dict[str, Any]:
        assert shard.group is not None
        key = self._plan.groups[shard.group]
        group: dict[str, Any] = self._optimizers[key.optimizer].param_groups[key.index]
        return group

    def _state(self, shard: Shard) -> dict[str, Any]:
        if shard.group is None:
            return {}
        state: dict[str, Any] = self._optimizers[self._plan.groups[shard.group].optimizer].state[shard.theta]
        return state

    def _check_identity(self) -> None:
        """A parameter object that the model or the optimizer no longer uses must not be published as if it did."""
        used = {id(p) for optimizer in self._optimizers for g in optimizer.param_groups for p in g["params"]}
        named = dict(self._model.named_parameters()) if self._model is not None else {}
        for b in self._bound:
            s = b.shard
            lost = s.optimizer is not None and id(s.theta) not in used
            if not lost and s.model_name in named and isinstance(s.theta, torch.nn.Parameter) and s.optimizer is None:
                lost = named[s.model_name] is not s.theta
            if lost:
                raise StateConflict(
                    f"the parameter of {s.meta.name} was replaced by another object.",
                    remedy="Close this source and register a new one (load_state_dict with assign=True, or a new "
                    "optimizer, replaces parameters).",
                )


def _changed(name: str, tensor: torch.Tensor) -> StateConflict:
    return StateConflict(
        f"{name} is now {tensor.dtype}, shape {tuple(tensor.shape)} on {tensor.device}, not what was registered.",
        remedy="Bring it back before the next sync (offloading belongs inside `with source.mutating()` both ways), or "
        "close this source and register again.",
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
