"""The engine's own loading, for a few tensors at a time.

One invariant: what is called here is what the engine calls when it loads a checkpoint: the model's `load_weights`, then
the post-processing of the modules whose parameters were loaded, and of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch


class EngineLoader:
    """`model`: asked anew at every call."""

    def __init__(self, model: Callable[[], Any]) -> None:
        self._model = model

    def steps(self) -> list[list[str]]:
        """Parameters that one step of post-processing sees together."""
        return [names for _, _, names in self._modules() if len(names) > 1]

    def load(self, named: Iterable[tuple[str, torch.Tensor]], parameters: Sequence[str]) -> None:
        """Load the tensors, and post-process the modules that own `parameters`."""
        from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
        from sglang.srt.model_loader.loader import DefaultModelLoader, device_loading_context

        model = self._model()
        device = next(model.parameters()).device
        wanted = set(parameters)
        owners = [(module, method) for module, method, names in self._modules() if wanted.intersection(names)]
        for module, method in owners:
            if isinstance(method, QuantizeMethodBase):
                with device_loading_context(module, device):
                    method.restore_weights_before_loading(module)
        DefaultModelLoader.load_weights_only(model, named, device)
        for module, method in owners:
            with device_loading_context(module, device):
                method.process_weights_after_loading(module)

    def _modules(self) -> Iterator[tuple[Any, Any, list[str]]]:
        """(module, its method, its own parameters' full names) of every module that is post-processed."""
        model = self._model()
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        for _, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                own = (names.get(id(t)) for t in module.parameters(recurse=False))
                yield module, method, [name for name in own if name is not None]
