"""`TorchSource`: a plain module trained by torch's own optimizers, or slices that somebody else describes.

One invariant: what is declared is the whole model, or exactly the slices that were passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch

from clients.trainer.options import SourceOptions
from clients.trainer.plan import Planner
from clients.trainer.shards import OwnedSlice
from clients.trainer.source import Source
from engine.errors import InvalidInput


class TorchSource(Source):
    """One rank that holds whole parameters, or ranges of them that it can name."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        run: str,
        masters: Mapping[str, torch.Tensor] | None = None,
        slices: Sequence[OwnedSlice] | None = None,
        **options: Unpack[SourceOptions],
    ) -> None:
        """Describe what to publish; nothing is touched before `register`.

        `model`: its parameters and persistent buffers are declared under their names. `masters`: parameter name → FP32
        master the optimizer updates. `slices`: what this rank owns, instead of a model. Options: `SourceOptions`.
        """
        if (model is None) == (slices is None):
            raise InvalidInput("pass either a model or slices.")
        if masters and model is None:
            raise InvalidInput("masters need a model.")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        super().__init__(optimizers, [] if model is None else [model], run=run, **options)
        self._masters = dict(masters or {})
        self._slices = slices

    def _declare(self, planner: Planner) -> None:
        for model in self._models:
            planner.add_model(model, self._masters)
        for part in self._slices or ():
            planner.add_slice(part)
