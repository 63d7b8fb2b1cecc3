"""Where this rank's parameters keep the canonical tensors: from the rule table, from disk, or by probing the loader.

One invariant: probing ends with the parameters' values as they were. A layout is a claim, which the digests of a known
version confirm before anything is written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clients.rollout.layout_cache import LayoutCache, LayoutKey
from clients.rollout.sglang.weights import dtype_name
from engine.errors import InvalidInput
from engine.layout.placement import Placement
from engine.models import has_table, layouts_for
from engine.probe import kept, probe
from engine.records.models import TensorMeta

log = logging.getLogger(__name__)

CACHE_DIR = "DTE_SGLANG_CACHE_DIR"
PROBE = "DTE_SGLANG_PROBE"
"""Set to 1, layouts are probed even where there is a table."""
PUBLISHED = "DTE_SGLANG_PUBLISHED_DTYPE"
"""The dtype of what the trainer publishes, where that is not the checkpoint's."""
MAX_HEADER_BYTES = 100 << 20
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


_HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Found:
    """What this rank's parameters hold. `placements`: parameter → placements of canonical tensors, in the dtype they
    are published in, which need not be the parameter's. `mixed`: parameter → further tensors, of which only that is
    known."""

    placements: Mapping[str, Sequence[Placement]]
    mixed: Mapping[str, Sequence[TensorMeta]]


def checkpoint_tensors(folder: Path) -> list[TensorMeta]:
    """The tensors of a checkpoint from the headers of its safetensors files; InvalidInput if it has none."""
    found: dict[str, TensorMeta] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise InvalidInput(f"{path.name} has a header of {length} bytes.")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
                found[name] = TensorMeta.model_validate({"name": name, "shape": entry["shape"], "dtype": dtype})
    if not found:
        raise InvalidInput(
            f"the model path {str(folder)!r} has no safetensors files to learn the checkpoint's tensors from.",
            remedy="Serve a local directory in safetensors form, or an architecture with a layout table.",
        )
    return list(found.values())


def cache_dir() -> Path:
    """`DTE_SGLANG_CACHE_DIR`, or the user's cache directory."""
    named = os.environ.get(CACHE_DIR)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "dte" / "layouts"


def find_layouts(
    model: nn.Module,
    config: Mapping[str, Any],
    path: str,
    ranks: Sequence[int],
    flags: Mapping[str, Any],
    *,
    trained_in: str | None = None,
) -> Found:
    """What this rank's parameters hold.

    `ranks`: tensor-parallel rank and size, expert-parallel rank and size. `flags`: what else a probed layout depends
    on. `trained_in`: the dtype that the checkpoint's own configuration names. InvalidInput if it cannot be found out.
    """
    if has_table(config) and os.environ.get(PROBE) != "1":
        try:
            table = layouts_for(config, *ranks)
        except InvalidInput as error:
            log.info("no table fits this configuration: probing (%s)", error.message)
        else:
            stored = _stored(Path(path))
            odd = _misfit(model, table) or _other_shape(table, stored)
            if odd is None:
                return Found(_published(model, table, stored, trained_in), {})
            log.info("the engine keeps %r otherwise than its table says: probing", odd)
    tensors = checkpoint_tensors(Path(path))
    shape = dict(zip(("tp_rank", "tp_size", "ep_rank", "ep_size"), ranks, strict=True))
    key = LayoutKey(json.loads(json.dumps(config, default=str)), shape, flags, tensors)
    cache = LayoutCache(cache_dir())
    found = cache.get(key)
    if found is None:
        log.info("probing where the engine keeps %d tensors", len(tensors))
        found = _probe(model, tensors)
        try:
            cache.put(key, found)
        except OSError as error:
            log.warning("probed layouts are not kept: %s", error)
    placed = {n: [*ps, *found.retyped.get(n, ())] for n, ps in found.placements.items()}
    held = {p.tensor.name for ps in placed.values() for p in ps}.union(*found.mixed.values())
    lost = [n for n in found.not_identity if n not in held]
    if lost:
        why = found.not_identity[lost[0]]
        raise InvalidInput(f"where the engine keeps {lost[0]!r} and {len(lost) - 1} more is not known: {why}.")
    metas = {t.name: t for t in tensors}
    return Found(placed, {n: [metas[t] for t in names] for n, names in found.mixed.items()})


def _published(
    model: nn.Module,
    table: Mapping[str, Sequence[Placement]],
    stored: Mapping[str, TensorMeta],
    trained_in: str | None,
) -> Mapping[str, Sequence[Placement]]:
    """The table with the dtypes in which tensors are published: the checkpoint's if it has 16 bits, else the engine's
    (a trainer that keeps FP32 masters publishes what is served)."""
    forced = os.environ.get(PUBLISHED)
    if forced is not None and forced not in _DTYPES.values():
        raise InvalidInput(f"{PUBLISHED} is {forced!r}, not one of {', '.join(_DTYPES.values())}.")
    live = {name: dtype_name(tensor.dtype) for name, tensor in model.named_parameters()}

    def one(name: str, placement: Placement) -> Placement:
        meta = placement.tensor
        dtype = forced or (stored[meta.name].dtype if meta.name in stored else trained_in)
        if dtype not in _HALF and dtype != forced:
            dtype = live[name]
        return Placement(meta.model_copy(update={"dtype": dtype}), placement.layout)

    return {name: [one(name, p) for p in placed] for name, placed in table.items()}


def _misfit(model: nn.Module, table: Mapping[str, Sequence[Placement]]) -> str | None:
    """A parameter that is not as the table says: engines pad sizes that do not suit their kernels."""
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
    for name in sorted(sizes.keys() | table.keys()):
        if name not in table or any(p.layout.src_numel != sizes.get(name) for p in table[name]):
            return name
    return None


def _stored(folder: Path) -> dict[str, TensorMeta]:
    """The checkpoint's tensors, if it is here in safetensors form."""
    return {t.name: t for t in checkpoint_tensors(folder)} if any(folder.glob("*.safetensors")) else {}


def _other_shape(table: Mapping[str, Sequence[Placement]], stored: Mapping[str, TensorMeta]) -> str | None:
    """A tensor that the checkpoint has in another shape: engines pad the configuration, too."""
    for placed in table.values():
        for tensor in (p.tensor for p in placed):
            if tensor.name in stored and tuple(stored[tensor.name].shape) != tuple(tensor.shape):
                return tensor.name
    return None


def _probe(model: nn.Module, tensors: Sequence[TensorMeta]) -> Any:
    from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights

    device = next(model.parameters()).device

    def load(named: Iterable[tuple[str, torch.Tensor]]) -> None:
        DefaultModelLoader.load_weights_and_postprocess(model, named, device)

    def parameters() -> dict[str, torch.Tensor]:
        return dict(model.named_parameters())

    with kept(parameters):
        found = probe(tensors, load, parameters)
    post_load_weights(model)
    return found
