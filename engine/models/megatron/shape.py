"""Where a rank stands in a Megatron-Core job, as far as its parameters depend on it.

One invariant: a shape names ranks inside their groups, and `expert_share` is always resolved: without an
expert-tensor-parallel size of its own, an expert is split like everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidInput


@dataclass(frozen=True)
class MegatronShape:
    """One rank's coordinates. Pipeline stages do not matter here: callers give global layer numbers.

    `tp`: tensor parallel, `ep`: expert parallel, `etp`: expert-tensor-parallel (`parallel_state` has all six numbers).
    `etp_size` None means the tensor-parallel group, as in Megatron-Core's configuration; `etp_rank` then follows it.
    InvalidInput if a rank lies outside its group.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int | None = 1

    def __post_init__(self) -> None:
        rank, size = self.expert_share
        if self.etp_size is None and self.etp_rank not in (0, self.tp_rank):
            raise InvalidInput(
                f"{self}: without an etp_size, etp_rank is tp_rank.",
                remedy="Leave etp_rank out, or give etp_size too.",
            )
        for of, at, n in (("tp", self.tp_rank, self.tp_size), ("ep", self.ep_rank, self.ep_size), ("etp", rank, size)):
            if not 0 <= at < n:
                raise InvalidInput(
                    f"{of} rank {at} is not in a group of {n}.", remedy="Take both from Megatron-Core's parallel_state."
                )

    @property
    def share(self) -> tuple[int, int]:
        """(rank, size) of the group that splits everything but experts."""
        return self.tp_rank, self.tp_size

    @property
    def expert_share(self) -> tuple[int, int]:
        """(rank, size) of the group that splits each expert."""
        return self.share if self.etp_size is None else (self.etp_rank, self.etp_size)
