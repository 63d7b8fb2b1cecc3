"""Kinds of rules that attention, MLPs and the rest of a model share.

One invariant: a rule checks the local shape before it places anything, so a wrong configuration or parallel shape is
an error and never a wrong layout.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import InvalidInput, LayoutError
from engine.models.megatron.dimensions import Dimensions
from engine.models.megatron.spot import CHECK_SIZES, Spot

Rule = Callable[[Spot], int]
"""Places everything and returns the number of local elements that are padding."""


def whole(s: Spot, name: str, *shape: int, dtype: str = "") -> int:
    """Every rank has all of it."""
    s.expect(*shape)
    s.rows(s.meta(name, *shape, dtype=dtype), (0, shape[0]), 0)
    return 0


def norm(name: str, size: Callable[[Dimensions], int] = lambda d: d.hidden) -> Rule:
    return lambda s: whole(s, f"{s.at}.{name}.weight", size(s.dims))


def vocabulary(s: Spot, name: str) -> int:
    """Rows of a padded table: the padded size is whatever the local shape says it is."""
    rows = s.local.shape[0] if s.local.shape else 0
    s.expect(rows, s.dims.hidden)
    rank, size = s.shape.share
    if rows * size < s.dims.vocabulary:
        raise LayoutError(
            f"{s.local.name!r}: {size} ranks with {rows} rows each hold no vocabulary of {s.dims.vocabulary}.",
            remedy=CHECK_SIZES,
        )
    lo, hi = (min(r * rows, s.dims.vocabulary) for r in (rank, rank + 1))
    s.rows(s.meta(name, s.dims.vocabulary, s.dims.hidden), (lo, hi), 0)
    return (rows - (hi - lo)) * s.dims.hidden


def output(s: Spot) -> int:
    return vocabulary(s, "model.embed_tokens.weight" if s.dims.tied else "lm_head.weight")


def no_bias(s: Spot, setting: str) -> InvalidInput:
    """The error for a bias that the checkpoint does not have."""
    return s.refuse("the checkpoint has no such bias.", f"Train without it (Megatron-Core: {setting}).")
