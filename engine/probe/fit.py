"""From "element p of the local tensor holds canonical element c" to a few rectangular blocks.

One invariant: the blocks hold exactly the given pairs, each once, and are nested on both sides; when that needs more
than the allowed number of blocks the answer is a LayoutError, never an approximation.

Pairs are taken in local order and joined, level by level: equal blocks whose offsets advance by constant steps become
one block with a dimension more. Regular layouts collapse to one block or to one for every seam.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import LayoutError
from engine.jit import njit
from engine.layout.blocks import Block, Layout
from engine.layout.mapping import check_blocks, map_partial

I64 = npt.NDArray[np.int64]
MAX_FITTED_BLOCKS = 1 << 10
"""Blocks one placement may need before it is called no rectangle at all."""
_MAX_LEVELS = 12
_LONG_RUN = 8

Dims = tuple[tuple[int, int, int], ...]
"""(size, local stride, canonical stride) of each dimension, innermost first."""


@dataclass(frozen=True)
class _Items:
    """Blocks in local order: `form[i]` numbers an entry of `forms`, at offsets `p[i]`, `c[i]`."""

    forms: tuple[Dims, ...]
    form: I64
    p: I64
    c: I64


@njit
def _join(form: I64, p: I64, c: I64, start: I64, length: I64) -> int:
    """Cut items into the longest runs of equal form and constant, non-negative steps; returns how many."""
    n = form.shape[0]
    runs = 0
    i = 0
    while i < n:
        j = i + 1
        if j < n and form[j] == form[i] and c[j] >= c[i] and p[j] >= p[i]:
            dp = p[j] - p[i]
            dc = c[j] - c[i]
            j += 1
            while j < n and form[j] == form[i] and p[j] - p[j - 1] == dp and c[j] - c[j - 1] == dc:
                j += 1
            # Two that fit by chance may tear the second from a longer run that begins with it.
            if j == i + 2 and j < n and form[j] == form[j - 1]:
                k = j + 1
                same = (
                    k < n and form[k] == form[j] and p[k] - p[j] == p[j] - p[j - 1] and c[k] - c[j] == c[j] - c[j - 1]
                )
                if same and c[j] >= c[j - 1] and (p[j] - p[j - 1] != dp or c[j] - c[j - 1] != dc):
                    j = i + 1
        start[runs] = i
        length[runs] = j - i
        runs += 1
        i = j
    return runs


def _nested(dims: list[tuple[int, int]]) -> bool:
    span = 0
    for n, stride in sorted(dims, key=lambda d: d[1]):
        if n > 1:
            if stride <= span:
                return False
            span += (n - 1) * stride
    return True


def _level(items: _Items) -> _Items:
    """One round of joining: items of one form side by side first, so that alternating forms do not cut each other."""
    order = np.argsort(items.form, kind="stable")
    form, p, c = items.form[order], items.p[order], items.c[order]
    start, length = np.empty(form.size, np.int64), np.empty(form.size, np.int64)
    runs = int(_join(form, p, c, start, length))
    start, length = start[:runs], length[:runs]
    second = np.minimum(start + 1, form.size - 1)
    many = length > 1
    key = np.stack(
        [form[start], length, np.where(many, p[second] - p[start], 0), np.where(many, c[second] - c[start], 0)]
    )
    kinds, kind = np.unique(key, axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    forms: list[Dims] = []
    torn = []
    for k, (f, n, dp, dc) in enumerate(kinds.T.tolist()):
        dims = (*items.forms[f], (n, dp, dc)) if n > 1 else items.forms[f]
        if n > 1 and not (_nested([d[:2] for d in dims]) and _nested([(d[0], d[2]) for d in dims])):
            torn.append(k)  # such a block could name an index twice: its parts stay apart
            dims = items.forms[f]
        forms.append(dims)
    if torn:
        repeat = np.where(np.isin(kind, torn), length, 1)
        first = np.repeat(start, repeat)
        within = np.arange(first.size) - np.repeat(np.cumsum(repeat) - repeat, repeat)
        at = first + within
        kind = np.repeat(kind, repeat)
    else:
        at = start
    # Kinds that mean the same form (single items, torn ones) share one number again.
    number: dict[Dims, int] = {}
    same = np.array([number.setdefault(d, len(number)) for d in forms], np.int64)
    kind = same[kind]
    by_local = np.argsort(p[at], kind="stable")
    return _Items(tuple(number), kind[by_local], p[at][by_local], c[at][by_local])


def _first(local: I64, canonical: I64) -> _Items:
    """The pairs one by one, or, where they mostly come in long runs, run by run: the same fit, sooner."""
    goes_on = (local[1:] - local[:-1] == 1) & (canonical[1:] - canonical[:-1] == 1)
    start = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    if not local.size or start.size > local.size // _LONG_RUN:
        return _Items(((),), np.zeros(local.size, np.int64), local, canonical)
    length = np.diff(start, append=local.size)
    lengths, form = np.unique(length, return_inverse=True)
    forms: tuple[Dims, ...] = tuple(((n, 1, 1),) if n > 1 else () for n in lengths.tolist())
    return _Items(forms, form.reshape(-1).astype(np.int64), local[start], canonical[start])


def fit_blocks(local: I64, canonical: I64, *, max_blocks: int = MAX_FITTED_BLOCKS) -> tuple[Block, ...]:
    """Blocks that map `local[i]` (rising) to `canonical[i]`, which may not repeat. I64 [n] each.

    LayoutError if they need more than `max_blocks`.
    """
    items = _first(local, canonical)
    for _ in range(_MAX_LEVELS):
        joined = _level(items)
        if joined.form.size == items.form.size:
            break
        items = joined
    if items.form.size > max_blocks:
        raise LayoutError(
            f"{local.size} elements fall into {items.form.size} rectangles; at most {max_blocks} are a layout.",
            remedy="The elements are permuted irregularly; treat the tensor as one without identity bits.",
        )
    blocks = []
    for form, p, c in zip(items.form.tolist(), items.p.tolist(), items.c.tolist(), strict=True):
        dims = items.forms[form][::-1]
        block = Block(tuple(d[0] for d in dims), p, tuple(d[1] for d in dims), c, tuple(d[2] for d in dims))
        blocks.append(block.normalised())
    return tuple(blocks)


def fit_layouts(
    local: I64, canonical: I64, src_numel: int, dst_numel: int, *, max_blocks: int = MAX_FITTED_BLOCKS
) -> list[Layout]:
    """Injective layouts that together hold the pairs; several only when canonical elements repeat.

    `local` rises strictly. Layout k holds the k-th appearance of each canonical element. The fit is proven by mapping
    every local element back. LayoutError if it needs more than `max_blocks` blocks.
    """
    out = []
    for chosen in _appearances(canonical):
        p, c = local[chosen], canonical[chosen]
        layout = Layout(fit_blocks(p, c, max_blocks=max_blocks), src_numel, dst_numel)
        check_blocks(layout)
        if sum(b.numel for b in layout.blocks) != p.size or not np.array_equal(map_partial(layout, p), c):
            raise LayoutError("fitted blocks do not reproduce the elements they were fitted to.")
        out.append(layout)
    return out


def _appearances(canonical: I64) -> list[npt.NDArray[np.int64] | slice]:
    """Positions of the first, second, … appearance of every value, each in rising order."""
    if canonical.size < 2 or bool(np.all(canonical[1:] > canonical[:-1])):
        return [slice(None)]
    low, high = int(canonical.min()), int(canonical.max())
    if high - low < 8 * canonical.size:  # a table of all values is cheaper than sorting them
        seen = np.zeros(high - low + 1, np.bool_)
        seen[canonical - low] = True
        if int(np.count_nonzero(seen)) == canonical.size:
            return [slice(None)]
    order = np.argsort(canonical, kind="stable")
    value = canonical[order]
    fresh = np.concatenate(([True], value[1:] != value[:-1]))
    if bool(fresh.all()):
        return [slice(None)]
    at = np.arange(value.size)
    turn = np.empty(value.size, np.int64)
    turn[order] = at - np.maximum.accumulate(np.where(fresh, at, 0))
    return [np.flatnonzero(turn == k) for k in range(int(turn.max()) + 1)]
