"""Which tensors do some elements depend on? Found by altering tensors in groups and seeing what moves.

One invariant: a tensor that an element depends on is always named for it, as long as altering the tensor shows there;
where an element mixes several tensors, others may be named too.

Tensor k has a binary code; trial 2j alters the tensors whose bit j is 1, trial 2j + 1 the others. What depends on one
tensor moves in exactly one trial of each pair, and that spells the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Moved = npt.NDArray[np.bool_]


class Suspects:
    """Trials that tell `count` tensors apart."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._bits = max(1, (count - 1).bit_length())

    def reference(self) -> frozenset[int]:
        """Tensors to alter in the load that the trials are compared with: none."""
        return frozenset()

    def trials(self) -> Iterator[frozenset[int]]:
        """Tensors to alter, trial by trial."""
        for bit in range(self._bits):
            ones = frozenset(k for k in range(self._count) if k >> bit & 1)
            yield ones
            yield frozenset(range(self._count)) - ones

    def guilty(self, moved: Sequence[Moved]) -> list[int]:
        """Tensors that explain the elements; `moved[t][e]`: element e differed from the reference in trial t.

        Elements that never moved depend on no tensor.
        """
        rows = np.unique(np.stack(moved), axis=1).T
        return [k for k in range(self._count) if any(self._explains(k, row) for row in rows)]

    def _explains(self, k: int, row: Moved) -> bool:
        return all(bool(row[2 * bit + (0 if k >> bit & 1 else 1)]) for bit in range(self._bits))
