"""Puts a rank's tensors where the daemon can read them, and keeps them there.

One invariant: training computes exactly what it would have computed without us. Values are moved bit for bit with their
strides, optimizer state is created as torch would create it at the first step, and parameters stay the same objects.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clients.protocol import AnyRef, SliceSpec
from clients.trainer.arena import Arena
from clients.trainer.formulas import begin_state
from clients.trainer.fused import MASTER, GroupSteps, moment_scales
from clients.trainer.home import Home, local_of, put_local
from clients.trainer.places import Mirror, Place, Places, host_floats, part_of, whole_numbers
from clients.trainer.shards import Piece, Plan, Shard
from engine.errors import StateConflict
from transports.memory.cuda_ipc import TorchCuda

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Bound:
    """A shard with its places. `moments` maps state keys (exp_avg and the second moment in use, then the lower halves
    of split masters) to theirs.

    Of a frozen one: `version` is torch's own count of in-place writes when it was last looked at, `writes` how often it
    may have been written since the registration, `copied` that number at the latest copy.
    """

    shard: Shard
    theta: Place
    moments: dict[str, Place]
    version: int = 0
    writes: int = 0
    copied: int = 0
    warned: bool = False

    @property
    def follows(self) -> bool:
        """Whether a copy is read of what may be anywhere at each sync."""
        return self.shard.mirrored and isinstance(self.theta, Mirror)


class Binding:
    """The shared memory of one rank's plan. All methods that write must run inside a mutation."""

    def __init__(
        self,
        plan: Plan,
        optimizers: Sequence[torch.optim.Optimizer],
        models: Sequence[torch.nn.Module],
        places: Places | None = None,
    ) -> None:
        self._plan = plan
        self._optimizers = optimizers
        self._models = models
        self._bound: list[_Bound] = []
        self._arena: Arena | None = None
        self.places = places or Places("auto", TorchCuda())
        self.group_steps = GroupSteps(optimizers)

    @property
    def size_bytes(self) -> int:
        """Shared memory in use."""
        return self._arena.size_bytes if self._arena is not None else 0

    @property
    def mirrored_slices(self) -> int:
        """Slices that are copies because their own memory is not read; side tensors always are."""
        return sum(isinstance(b.theta, Mirror) and not b.shard.mirrored for b, _ in self._slices())

    def move_in(self, name_of: Callable[[int], str]) -> None:
        """Move everything in. On SharedMemoryFull or DeviceMemoryError all is moved out again and no file is left."""
        self._arena = Arena(name_of, sum(self._shard_bytes(s) for s in self._plan.shards))
        try:
            for shard in self._plan.shards:
                self._bound.append(self._move_in(shard, self._arena))
            self.scales()
            self.places.settle(self._memories())
        except BaseException:
            self.move_out()
            raise

    def move_out(self) -> None:
        """Copy every tensor that lies in shared memory back to private memory and remove the files."""
        for b in self._bound:
            memory = b.shard.home.memory()
            if b.theta.moves and b.theta.holds(memory):
                b.shard.home.replace(memory.detach().clone(memory_format=torch.preserve_format))
            state = self._state(b.shard)
            for key, slot in b.moments.items():
                if key in state and slot.moves and slot.holds(memory := local_of(state[key])):
                    put_local(state, key, memory.clone(memory_format=torch.preserve_format))
        self.close()

    def close(self) -> None:
        """Remove the files' names; the tensors stay where they are, as memory of this process alone."""
        if self._arena is not None:
            self._arena.close()

    def adopt(self) -> list[Shard]:
        """Move in again whatever left its slot (`load_state_dict` and the like). Returns those shards.

        StateConflict when a parameter was replaced by another object, or changed its shape, dtype or device.
        """
        self._check_identity()
        return [b.shard for b in self._bound if self._adopt(b)]

    def refresh_mirrors(self) -> None:
        """Copy what is read as a copy: side tensors (buffers), which others write whenever they like, and all that is
        mirrored. Then everything may be read."""
        buffers = {name: b for model in self._models for name, b in model.named_buffers()}
        for b in self._bound:
            if not isinstance(b.theta, Mirror):
                continue
            memory = b.shard.home.memory()
            live = buffers.get(b.shard.model_name or "", memory) if b.shard.mirrored else memory
            if not b.theta.fits(live):
                raise _changed(b.shard.name, live)
            if b.shard.frozen and b.follows and not b.theta.same(live):
                self._written(b)
            if not b.shard.frozen or b.copied != b.writes:
                b.theta.take(live)
                b.copied = b.writes
            for key, place in b.moments.items():
                if isinstance(place, Mirror):
                    place.take(local_of(self._state(b.shard)[key]))
        self.places.settle(self._memories())

    def note_writes(self, *, announced: bool) -> None:
        """Count the frozen tensors that may have been written, so that the daemon looks at them again.

        Torch counts in-place writes to a tensor, those of optimizers and of `load_state_dict` included, but not those
        through `.data`: after a mutation the trainer announced (`announced`), any of them may have been written.
        """
        for b in self._bound:
            if not b.shard.frozen or b.follows:
                continue
            seen, b.version = b.version, _writes_to(b.shard.home)
            if seen != b.version:
                self._written(b)
            elif announced:
                b.writes += 1

    def specs(self, of: Collection[Shard] | None = None, *, replicas: bool = False) -> list[SliceSpec]:
        """The slices (or the replicas) as the daemon is told about them: all, or those of some shards."""
        slices = enumerate(self._slices(replicas=replicas))
        return [self._spec(i, b, piece) for i, (b, piece) in slices if of is None or b.shard in of]

    def steps(self) -> list[int]:
        """Every slice's own step counter; of frozen slices how often they may have been written, 0 for others."""
        counters = whole_numbers([self._counter(b.shard) for b in self._bound])
        bound = ((c, b) for c, b in zip(counters, self._bound, strict=True) if not b.shard.replica)
        slices = ((c, b, piece) for c, b in bound for piece in b.shard.pieces)
        return [c if piece.detector == "certified" else b.writes for c, b, piece in slices]

    def with_writes(self, steps: Sequence[int]) -> list[int]:
        """`steps` of an earlier moment, with the writes to frozen slices of now."""
        slices = zip(steps, self._slices(), strict=True)
        return [s if piece.detector == "certified" else b.writes for s, (b, piece) in slices]

    def scales(self) -> list[tuple[float | None, float | None]]:
        """What every slice's stored moments are to be multiplied with, as they are now (None: no number tells); empty
        where none is stored so. InvalidInput if a scale is missing."""
        found: list[torch.Tensor | None] = []
        for b in self._bound:
            if b.shard.group is not None:
                optimizer = self._optimizers[self._plan.groups[b.shard.group].optimizer]
                found += moment_scales(optimizer, b.shard.home.param, self._moment_keys(b.shard)[:2])
            else:
                found += [None, None]
        if not any(x is not None for x in found):
            return []
        values = [x if x is None or math.isfinite(x) else None for x in host_floats(found, 1.0)]
        pairs = zip(values[::2], values[1::2], strict=True)
        return [pair for pair, b in zip(pairs, self._bound, strict=True) if not b.shard.replica for _ in b.shard.pieces]

    def _counter(self, shard: Shard) -> int | torch.Tensor:
        if shard.group is None:
            return 0
        if self.group_steps.counts(self._plan.groups[shard.group].optimizer):
            return self.group_steps.of(shard.home.param)
        step: int | torch.Tensor = self._state(shard).get("step", 0)
        return step

    def _memories(self) -> list[torch.Tensor]:
        """Every tensor that is read, as training has it now."""
        moments = (local_of(self._state(b.shard)[key]) for b in self._bound for key in b.moments)
        return [*(b.shard.home.memory() for b in self._bound), *moments]

    def _slices(self, *, replicas: bool = False) -> list[tuple[_Bound, Piece]]:
        """Every piece (or replica) with the shard it lies in, in the order of the registration."""
        return [(b, piece) for b in self._bound if b.shard.replica is replicas for piece in b.shard.pieces]

    # --- one shard ---------------------------------------------------------------------------------------------------

    def _move_in(self, shard: Shard, arena: Arena) -> _Bound:
        memory = shard.home.memory()
        place = self.places.of(memory, arena, side=self._copies(shard))
        bound = _Bound(shard, place, {})
        self._take(bound, memory)
        bound.version = _writes_to(shard.home)
        if shard.group is not None:
            self._ensure_state(shard)
            state = self._state(shard)
            for key in self._moment_keys(shard):
                bound.moments[key] = self.places.of(local_of(state[key]), arena, side=False)
            self._adopt_moments(bound)
        return bound

    def _adopt(self, b: _Bound) -> bool:
        if b.shard.group is not None:
            self._ensure_state(b.shard)
        memory, moved = b.shard.home.memory(), False
        if not b.follows and not b.theta.holds(memory):
            if not b.theta.fits(memory):
                raise _changed(b.shard.name, memory)
            if b.shard.frozen and not b.theta.same(memory):
                self._written(b)
            self._take(b, memory)
            moved = True
        if b.shard.group is not None:
            moved = self._adopt_moments(b) or moved
        return moved

    def _take(self, b: _Bound, memory: torch.Tensor) -> None:
        view = b.theta.take(memory)
        if b.theta.moves:
            b.shard.home.replace(view)

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
            view, moved = slot.take(memory), True
            if slot.moves:
                put_local(state, key, view)
        return moved

    def _ensure_state(self, shard: Shard) -> None:
        assert shard.group is not None
        optimizer = self._optimizers[self._plan.groups[shard.group].optimizer]
        begin_state(optimizer, self._group(shard), shard.home.param)

    def _moment_keys(self, shard: Shard) -> tuple[str, ...]:
        """The first moment, the second one that the step divides by, and the lower half of split masters."""
        second = "max_exp_avg_sq" if self._group(shard).get("amsgrad") else "exp_avg_sq"
        return ("exp_avg", second, MASTER) if shard.split else ("exp_avg", second)

    def _copies(self, shard: Shard) -> bool:
        """Whether the weights have to be copied at each sync whatever the mode: buffers, and what cannot move out of a
        buffer on the host. What an optimizer steps on a device is read in it."""
        in_place = shard.optimizer is not None and self.places.exports(shard.home.memory())
        return shard.mirrored and not in_place

    def _spec(self, number: int, b: _Bound, piece: Piece) -> SliceSpec:
        certified = piece.detector == "certified"
        moments: list[AnyRef | None] = [None, None, None]
        if certified:
            refs = [part_of(place.ref, piece.start, piece.numel) for place in b.moments.values()]
            moments[: len(refs)] = refs
        first, second, remainder = moments
        return SliceSpec(
            slice=number,
            tensor=piece.meta.name,
            numel=piece.numel,
            blocks=piece.blocks,
            detector=piece.detector,
            theta=part_of(b.theta.ref, piece.start, piece.numel),
            exp_avg=first,
            exp_avg_sq=second,
            remainder=remainder,
            group=b.shard.group if certified else None,
            cell=b.shard.cell,
            holders=b.shard.holders,
        )

    def _shard_bytes(self, shard: Shard) -> int:
        total = self.places.need_bytes(shard.home.memory(), side=self._copies(shard))
        if shard.group is not None:
            self._ensure_state(shard)
            state = self._state(shard)
            moments = (local_of(state[key]) for key in self._moment_keys(shard))
            total += sum(self.places.need_bytes(moment, side=False) for moment in moments)
        return total

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
