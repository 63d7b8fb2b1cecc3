"""The commit machine: pure functions that say what may be written next, given what stands in the store.

The daemon and the model check (`tests/model`) run the very same functions; nothing here does I/O, keeps state, or
knows the time.
"""

from engine.commit.chain import ChainState, advance, fold, is_effective
from engine.commit.launch import LaunchView, WriterSlices, summarize
from engine.commit.machine import PartEntry, Verdict, decide, may_abort
from engine.commit.opening import (
    ClaimEpoch,
    Opened,
    OpenStep,
    Superseded,
    claim,
    differing_tensors,
    next_open_step,
)

__all__ = [
    "ChainState",
    "ClaimEpoch",
    "LaunchView",
    "OpenStep",
    "Opened",
    "PartEntry",
    "Superseded",
    "Verdict",
    "WriterSlices",
    "advance",
    "claim",
    "decide",
    "differing_tensors",
    "fold",
    "is_effective",
    "may_abort",
    "next_open_step",
    "summarize",
]
