"""Follows the optimizers through the hooks torch offers, so that a training loop needs no change but `sync(step)`.

One invariant: hyperparameters and step counters are those the latest step really used, taken inside `step()` before a
scheduler can change them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from clients.protocol import HyperSpec, SliceSpec
from clients.trainer.binding import Binding
from clients.trainer.checks import check_held
from clients.trainer.formulas import formula_name, hyper_of
from clients.trainer.gate import Gate
from clients.trainer.shards import Plan, Shard
from engine.errors import InvalidInput

log = logging.getLogger(__name__)


def ignore(*_: object) -> None:
    """What a copied or unpickled model has in place of our hooks."""


def _ignore() -> Callable[..., None]:
    return ignore


class _ModelHook:
    """A hook on a model that copies and pickles of the model do not carry on."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self, *_: object) -> None:
        self._act()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return ignore

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _ignore, ()


class Watch:
    """Hooks on optimizers and model, and what they saw."""

    def __init__(
        self,
        plan: Plan,
        optimizers: Sequence[torch.optim.Optimizer],
        models: Sequence[torch.nn.Module],
        binding: Binding,
        gate: Gate,
    ) -> None:
        self._plan = plan
        self._optimizers = optimizers
        self._models = models
        self._binding = binding
        self._gate = gate
        self._handles: list[Any] = []
        self._hypers = [self._capture(g) for g in range(len(plan.groups))]
        self._moved: set[Shard] = set()
        self._late = any(self._on_device(o) for o in optimizers)
        self._stepped_since = False
        self.steps = binding.steps()
        self.scales: list[tuple[float | None, float | None]] = []
        """Of the moments as they lie in memory since `settle`."""
        self.moved_total = 0
        self.loads = 0
        """How often a model's weights were loaded since the registration."""
        self._announced = gate.announced
        self._loads_checked = 0

    def install(self) -> None:
        """Register the hooks."""
        for number, optimizer in enumerate(self._optimizers):
            self._handles += [
                optimizer.register_step_pre_hook(lambda *_, n=number: self._stepping(n)),
                optimizer.register_step_post_hook(lambda *_, n=number: self._stepped(n)),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self._gate.begin("load")),
                optimizer.register_load_state_dict_post_hook(lambda *_, n=number: self._loaded(n)),
            ]
        watch = weakref.ref(self)
        begin = _ModelHook(lambda: None if (w := watch()) is None else w._gate.begin("model"))
        end = _ModelHook(lambda: None if (w := watch()) is None else w._model_loaded())
        for model in self._models:
            self._handles += [
                model.register_load_state_dict_pre_hook(begin),  # type: ignore[no-untyped-call]
                model.register_load_state_dict_post_hook(end),  # type: ignore[no-untyped-call]
            ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def settle(self) -> None:
        """Bring shared memory to a state that may be read: nothing running, nothing moved, side tensors copied.

        StateConflict when a tensor is not any more what was registered.
        """
        for what in self._gate.end_all():
            log.warning("an optimizer call (%s) did not return; the proof finds what it changed", what)
        with self._gate.mutating(ours=True):
            self._adopt()
            self._binding.note_writes(announced=self._gate.announced != self._announced)
            self._announced = self._gate.announced
            self._binding.refresh_mirrors()
            self.scales = self._binding.scales()
        if self.loads != self._loads_checked:
            for shard in self._plan.shards:
                check_held(shard)
            self._loads_checked = self.loads
        if self._stepped_since:
            self.steps, self._stepped_since = self._binding.steps(), False
        self.steps = self._binding.with_writes(self.steps)

    def hypers(self) -> list[HyperSpec]:
        """Hyperparameters per group; InvalidInput if the latest step used some that no formula can undo."""
        usable = []
        for h in self._hypers:
            if isinstance(h, InvalidInput):
                raise h
            usable.append(h)
        return usable

    def moved(self, *, replicas: bool = False) -> list[SliceSpec]:
        """Slices (or replicas) that were moved into shared memory again since `told`."""
        return self._binding.specs(self._moved, replicas=replicas)

    def told(self) -> None:
        """The daemon knows about what moved."""
        self._moved.clear()

    def _stepping(self, number: int) -> None:
        self._gate.begin("step")
        self._binding.group_steps.before(number)

    def _stepped(self, number: int) -> None:
        self._binding.group_steps.after(number)
        for g, key in enumerate(self._plan.groups):
            if key.optimizer == number:
                self._hypers[g] = self._capture(g)
        self._binding.places.written()
        if self._late:
            self._stepped_since = True
        else:
            self.steps = self._binding.steps()
        self._gate.end("step")

    def _on_device(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether step counters may lie on a device: reading them would make every step wait for it."""
        return any(p.device.type != "cpu" for g in optimizer.param_groups for p in g["params"])

    def _model_loaded(self) -> None:
        self.loads += 1
        self._gate.end("model")

    def _loaded(self, number: int) -> None:
        """After `Optimizer.load_state_dict`, which replaced the state's storage."""
        self._binding.group_steps.loaded(number)
        self._adopt()
        self.steps = self._binding.steps()
        self._gate.end("load")

    def _adopt(self) -> None:
        moved = self._binding.adopt()
        self._moved.update(moved)
        self.moved_total += sum(len(shard.pieces) for shard in moved)
        if moved:
            log.info("%d tensors were moved into shared memory again", len(moved))

    def _capture(self, g: int) -> HyperSpec | InvalidInput:
        """The group's hyperparameters, or why they cannot be used: raising here would break the training step."""
        key = self._plan.groups[g]
        optimizer = self._optimizers[key.optimizer]
        group = optimizer.param_groups[key.index]
        try:
            now = formula_name(optimizer, group)
            if now != self._plan.formulas[g]:
                return InvalidInput(
                    f"group {key.index} now steps as {now}, it was registered as {self._plan.formulas[g]}.",
                    remedy="Keep foreach, fused and the kind of lr (float or tensor) as they were, or register again.",
                )
            return hyper_of(optimizer, group)
        except InvalidInput as e:
            return e
