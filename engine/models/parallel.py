"""Which share of a model a rank of the serving engine holds.

One invariant: the expert-parallel and expert-tensor-parallel coordinates always multiply to the tensor-parallel group:
tp rank = ep rank · (tp size / ep size) + expert tp rank, as the engine lays its groups out.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidInput, LayoutError
from engine.models.boxes import Range

VOCAB_UNIT = 64
"""Vocabularies are padded to multiples of this, or of this × the tensor-parallel size where that does not divide."""


@dataclass(frozen=True)
class Shares:
    """One rank's coordinates."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.ep_rank < self.ep_size):
            raise InvalidInput(f"{self} names a rank outside its group.")
        if self.tp_size % self.ep_size:
            raise InvalidInput(f"an expert-parallel size of {self.ep_size} does not divide {self.tp_size} ranks.")
        if self.ep_rank != self.tp_rank // self.expert_tp_size:
            raise InvalidInput(
                f"rank {self.tp_rank} of {self.tp_size} has expert-parallel rank "
                f"{self.tp_rank // self.expert_tp_size}, not {self.ep_rank}.",
                remedy="Expert-parallel groups are laid out with neighbouring ranks splitting one expert.",
            )

    @property
    def expert_tp_size(self) -> int:
        """Ranks that split each expert among them."""
        return self.tp_size // self.ep_size

    @property
    def expert_tp_rank(self) -> int:
        return self.tp_rank % self.expert_tp_size

    def split(self, n: int, what: str) -> Range:
        """This rank's equal share of `n`."""
        return share(n, self.tp_rank, self.tp_size, what)

    def expert_split(self, n: int, what: str) -> Range:
        """This rank's equal share of something inside an expert."""
        return share(n, self.expert_tp_rank, self.expert_tp_size, what)

    def experts(self, n: int) -> Range:
        """The experts that live here."""
        return share(n, self.ep_rank, self.ep_size, "experts")

    def kv_heads(self, n: int) -> Range:
        """The key/value heads that live here; with more ranks than heads, each is replicated on neighbours."""
        if self.tp_size <= n:
            return self.split(n, "key/value heads")
        if self.tp_size % n:
            raise LayoutError(f"{n} key/value heads cannot be replicated evenly on {self.tp_size} ranks.")
        head = self.tp_rank // (self.tp_size // n)
        return head, head + 1

    def vocabulary(self, n: int) -> tuple[Range, int]:
        """(rows of the vocabulary that live here, rows of the local tensor, padding included)."""
        unit = VOCAB_UNIT if round_up(n, VOCAB_UNIT) % self.tp_size == 0 else VOCAB_UNIT * self.tp_size
        rows = round_up(n, unit) // self.tp_size
        first = self.tp_rank * rows
        return (min(first, n), min(first + rows, n)), rows


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def share(n: int, rank: int, size: int, what: str) -> Range:
    """Equal share `rank` of `size`; LayoutError if they do not come out even."""
    if n % size:
        raise LayoutError(f"{n} {what} cannot be split evenly among {size} ranks.")
    return rank * (n // size), (rank + 1) * (n // size)
