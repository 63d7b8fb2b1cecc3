"""Scenarios of the rig's own tests; others name theirs as `module:function` in a task."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tests.support.megatron.train import Trainer
from tests.support.megatron.worker import Context


def train(trainer: Trainer, context: Context) -> dict[str, Any]:
    """A number of steps (argument `steps`, 3): what each said, and where this rank is."""
    steps = [asdict(trainer.step()) for _ in range(context.args.get("steps", 3))]
    return {"steps": steps, "coordinates": asdict(trainer.coordinates)}
