"""Names and dtypes as records take them, checked where the user gave them.

One invariant: what a record's own rules would refuse is refused here first, as InvalidInput with what to do about it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from pydantic import TypeAdapter, ValidationError

from clients.trainer.arena import dtype_name
from engine.errors import InvalidInput
from engine.records.models import ITEMSIZE, LaunchId, RunId, TensorMeta

_RUN: Final[TypeAdapter[Any]] = TypeAdapter(RunId)
_LAUNCH: Final[TypeAdapter[Any]] = TypeAdapter(LaunchId)


def check_ids(run: str, launch: str | None) -> None:
    """InvalidInput unless these can name a run and a launch."""
    _check(_RUN, "run", 128, run)
    if launch is not None:
        _check(_LAUNCH, "launch", 64, launch)


def plain_name(name: str) -> str:
    """A tensor's name without what `torch.compile` and activation checkpointing put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def meta_of(name: str, shape: tuple[int, ...], dtype: str) -> TensorMeta:
    """The canonical tensor; InvalidInput if no record could carry it."""
    if dtype not in ITEMSIZE:
        raise InvalidInput(f"no receiver stores {name} as {dtype!r}.", remedy=f"Use one of {', '.join(ITEMSIZE)}.")
    try:
        return TensorMeta(name=name, shape=shape, dtype=dtype)  # type: ignore[arg-type]
    except ValidationError:
        raise InvalidInput(
            f"{name[:100]!r} cannot be published under this name.",
            remedy="Names are up to 512 letters, digits and any of _ . : [ ] -, beginning with a letter, a digit or _; "
            "rename it with names={…: …}, for the receivers too.",
        ) from None


def stored_dtype(name: str, tensor: torch.Tensor) -> str:
    """What receivers store: BF16 for FP32 masters, else the dtype itself."""
    own = dtype_name(tensor.dtype)
    if own is None:
        raise InvalidInput(
            f"{name} has dtype {tensor.dtype}, which cannot be published.", remedy="Leave it out with names={…: None}."
        )
    return "bfloat16" if own == "float32" else own


def _check(kind: TypeAdapter[Any], what: str, longest: int, given: str) -> None:
    try:
        kind.validate_python(given)
    except ValidationError:
        raise InvalidInput(
            f"{given[:100]!r} cannot name a {what}.",
            remedy=f"Use up to {longest} letters, digits, '.', '_' and '-', beginning with a letter or digit.",
        ) from None
