"""A typed door to numba, so that kernels stay typed for callers.

One invariant: every kernel releases the GIL, wraps integers like C, is cached on disk and never uses fast math, so
results do not depend on the machine that compiled it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def njit(function: F) -> F:
    """Compile `function` (nogil, cached). Arguments must be NumPy arrays, ints or NumPy scalars."""
    return cast(F, numba.njit(nogil=True, cache=True, fastmath=False)(function))
