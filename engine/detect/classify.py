"""From the interval of θ_{t-1} to a verdict on each element's old bits. Shared by every backend.

Invariant: if the true θ_{t-1} lies in the interval (and, where replay is exact, the formula is the optimizer's), then
the true old bits are the ones told as certain, or among the candidates, or the element is `unknown`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.bf16 import Rounding, round_to_bf16_bits
from engine.detect.base import I64, U16, Bool
from engine.optimizers.base import Formula, Interval, StepContext
from engine.optimizers.bounds import HasMonotoneForward

MAX_REPLAYED = 64
"""FP32 candidates that are replayed one by one; wider intervals are narrowed by bisection or list their BF16 values."""
MAX_LISTED = 16
"""BF16 values an ambiguous element may have; more make it unknown."""
_REPLAY_BATCH = 1 << 20
_SIGN = 0x8000_0000


@dataclass(frozen=True, slots=True)
class Verdicts:
    """One verdict for each of N elements. Those in none of the masks are unchanged.

    `changed`: old bits certain, in `old`. `ambiguous` (ascending element numbers): candidates
    `amb_old[amb_offsets[j]:amb_offsets[j + 1]]`. `unknown`: nothing can be said. `impossible`: no candidate fits.
    """

    new: U16
    changed: Bool
    old: U16
    ambiguous: I64
    amb_offsets: I64
    amb_old: U16
    unknown: Bool
    impossible: Bool


def no_verdicts() -> Verdicts:
    """Verdicts on no elements."""
    bits, number, flag = np.zeros(0, np.uint16), np.zeros(0, np.int64), np.zeros(0, np.bool_)
    return Verdicts(bits, flag, bits, number, np.zeros(1, np.int64), bits, flag, flag)


def join(parts: list[Verdicts]) -> Verdicts:
    """Verdicts on the concatenation of the parts' elements."""
    if not parts:
        return no_verdicts()
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0] + [p.new.size for p in parts])
    counts = np.concatenate([np.diff(p.amb_offsets) for p in parts])
    return Verdicts(
        new=np.concatenate([p.new for p in parts]),
        changed=np.concatenate([p.changed for p in parts]),
        old=np.concatenate([p.old for p in parts]),
        ambiguous=np.concatenate([p.ambiguous + first for p, first in zip(parts, firsts, strict=False)]),
        amb_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)]),
        amb_old=np.concatenate([p.amb_old for p in parts]),
        unknown=np.concatenate([p.unknown for p in parts]),
        impossible=np.concatenate([p.impossible for p in parts]),
    )


def scatter(part: Verdicts, at: I64, new: U16, changed: Bool, old: U16) -> Verdicts:
    """Verdicts on all elements, given those on elements `at` and the certain changes among the others."""
    changed, old = changed.copy(), old.copy()
    changed[at], old[at] = part.changed, part.old
    unknown, impossible = np.zeros(new.size, np.bool_), np.zeros(new.size, np.bool_)
    unknown[at], impossible[at] = part.unknown, part.impossible
    return Verdicts(new, changed, old, at[part.ambiguous], part.amb_offsets, part.amb_old, unknown, impossible)


def float_keys(x: torch.Tensor) -> torch.Tensor:
    """FP32 → int64 keys in numeric order; −0 is −1 and +0 is 0, neighbours differ by 1."""
    bits = x.view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFF_FFFF) - 1)


def key_bits(keys: torch.Tensor) -> torch.Tensor:
    """FP32 bit patterns (int64, 0 … 2^32 − 1) of keys."""
    return torch.where(keys >= 0, keys, _SIGN | (-keys - 1))


def key_floats(keys: torch.Tensor) -> torch.Tensor:
    """Inverse of `float_keys`."""
    bits = key_bits(keys)
    return torch.where(bits >= _SIGN, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _round_key(keys: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """BF16 bits (int64) of the FP32 values with these keys, none of them NaN."""
    bits = key_bits(keys)
    return (bits + (0x8000 if rounding == "away" else 0x7FFF + ((bits >> 16) & 1))) >> 16


def _bf16_key(bits: torch.Tensor) -> torch.Tensor:
    """BF16 bits → keys in numeric order, as `float_keys`."""
    return torch.where(bits < 0x8000, bits, -(bits & 0x7FFF) - 1)


def _bf16_of_key(keys: torch.Tensor) -> torch.Tensor:
    return torch.where(keys >= 0, keys, 0x8000 | (-keys - 1))


def outward_keys(interval: Interval) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of the smallest and largest FP32 value that may lie in each interval; both zeros count where 0 does."""
    lo32, hi32 = interval.lo.float(), interval.hi.float()
    lo, hi = float_keys(lo32), float_keys(hi32)
    lo = torch.where(lo32.double() > interval.lo, lo - 1, lo)
    hi = torch.where(hi32.double() < interval.hi, hi + 1, hi)
    lo = torch.where(interval.lo == 0, -1, lo)
    hi = torch.where(interval.hi == 0, 0, hi)
    return lo, hi


@torch.no_grad()
def classify(
    formula: Formula,
    ctx: StepContext,
    theta: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    exact_replay: bool,
    rounding: Rounding = "even",
) -> Verdicts:
    """Judge every element of 1-D tensors of one shape. `exact_replay`, `rounding` as in `DetectBackend.detect`."""
    n = theta.numel()
    new = round_to_bf16_bits(theta, rounding)
    current = torch.from_numpy(new.astype(np.int64))
    interval = formula.invert(theta, m, v, ctx)
    lo, hi = outward_keys(interval)
    low_bits, high_bits = _round_key(lo, rounding), _round_key(hi, rounding)
    unknown = ~(torch.isfinite(interval.lo) & torch.isfinite(interval.hi))
    single = ~unknown & (low_bits == high_bits)
    changed = single & (low_bits != current)
    old = torch.where(changed, low_bits, 0)
    impossible = torch.zeros(n, dtype=torch.bool)
    doubtful = torch.nonzero(~unknown & ~single).flatten()

    can_replay = exact_replay and m.dtype == v.dtype == torch.float32
    narrow = (hi - lo + 1)[doubtful] <= MAX_REPLAYED
    replayed = doubtful[narrow] if can_replay else doubtful[:0]
    listed = doubtful[~narrow] if can_replay else doubtful
    owner, value = _replay(formula, ctx, theta, m, v, lo, hi, replayed, rounding)
    impossible[replayed] = True
    impossible[owner] = False
    if can_replay and listed.numel() and isinstance(formula, HasMonotoneForward) and formula.is_monotone(ctx):
        first, last = _preimage(formula, ctx, theta[listed], m[listed], v[listed], lo[listed], hi[listed])
        impossible[listed[first > last]] = True
        low_bits[listed], high_bits[listed] = _round_key(first, rounding), _round_key(last, rounding)
        listed = listed[first <= last]

    low_key, high_key = _bf16_key(low_bits[listed]), _bf16_key(high_bits[listed])
    count = high_key - low_key + 1
    unknown[listed[count > MAX_LISTED]] = True
    fits = count <= MAX_LISTED
    position, offset = _ramps(count[fits])
    owner = torch.cat([owner, listed[fits][position]])
    value = torch.cat([value, _bf16_of_key(low_key[fits][position] + offset)])

    order = torch.argsort(owner, stable=True)
    owner, value = owner[order], value[order]
    number = torch.bincount(owner, minlength=n) if n else owner
    alone = number[owner] == 1  # one candidate left: certain, whether changed or not
    sure = owner[alone]
    changed[sure] = value[alone] != current[sure]
    old[sure] = torch.where(changed[sure], value[alone], 0)
    owner, value = owner[~alone], value[~alone]
    ambiguous, counts = torch.unique_consecutive(owner, return_counts=True)
    return Verdicts(
        new=new,
        changed=changed.numpy(),
        old=old.numpy().astype(np.uint16),
        ambiguous=ambiguous.numpy(),
        amb_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts.numpy(), dtype=np.int64)]),
        amb_old=value.numpy().astype(np.uint16),
        unknown=unknown.numpy(),
        impossible=impossible.numpy(),
    )


def _preimage(
    formula: Formula,
    ctx: StepContext,
    theta: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last key in [lo, hi] whose forward step gives exactly θ (first > last: none does).

    The forward step must not fall as θ_{t-1} grows; then the keys that give θ are consecutive and bisection finds them.
    """
    target = float_keys(theta)

    def first_reaching(goal: torch.Tensor) -> torch.Tensor:
        """Smallest key in [lo, hi + 1] whose step is at least `goal` (hi + 1: none)."""
        low, high = lo.clone(), hi + 1
        while bool((low < high).any()):
            middle = torch.div(low + high, 2, rounding_mode="floor")
            reached = float_keys(formula.forward(key_floats(middle), m, v, ctx)) >= goal
            open_ = low < high
            high = torch.where(open_ & reached, middle, high)
            low = torch.where(open_ & ~reached, middle + 1, low)
        return low

    return first_reaching(target), first_reaching(target + 1) - 1


def _ramps(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For counts [2, 3]: positions [0, 0, 1, 1, 1] and offsets [0, 1, 0, 1, 2]."""
    position = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    starts = torch.cumsum(counts, 0) - counts
    return position, torch.arange(position.numel()) - starts[position]


def _replay(
    formula: Formula,
    ctx: StepContext,
    theta: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    elements: torch.Tensor,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct BF16 values of the FP32 candidates whose forward step gives exactly θ: (element, BF16 bits) pairs."""
    owners: list[torch.Tensor] = [elements[:0]]
    values: list[torch.Tensor] = [elements[:0]]
    for batch in torch.split(elements, _REPLAY_BATCH // MAX_REPLAYED):
        position, offset = _ramps(hi[batch] - lo[batch] + 1)
        owner = batch[position]
        keys = lo[batch][position] + offset
        stepped = formula.forward(key_floats(keys), m[owner], v[owner], ctx)
        hit = stepped.view(torch.int32) == theta[owner].view(torch.int32)
        owner, bits = owner[hit], _round_key(keys[hit], rounding)
        fresh = torch.ones(owner.numel(), dtype=torch.bool)
        fresh[1:] = (owner[1:] != owner[:-1]) | (bits[1:] != bits[:-1])  # keys ascend, so equal bits are neighbours
        owners.append(owner[fresh])
        values.append(bits[fresh])
    return torch.cat(owners), torch.cat(values)
