"""Applying a version to live weights: prepare, verify, commit with undo, resync."""

from engine.apply.changes import Change
from engine.apply.device import DeviceLanes, view_of
from engine.apply.errors import ChunkDamaged, LiveChanged, TensorMismatch, WrongBase, WrongResult
from engine.apply.lanes import Lanes, LaneView
from engine.apply.live import LiveCopy, LiveSet, LiveTensor, lane_count
from engine.apply.phases import TRANSITIONS, Move, Phase
from engine.apply.session import Applier, Verdict
from engine.apply.target import ChunkFile, Target

__all__ = [
    "TRANSITIONS",
    "Applier",
    "Change",
    "ChunkDamaged",
    "ChunkFile",
    "DeviceLanes",
    "LaneView",
    "Lanes",
    "LiveChanged",
    "LiveCopy",
    "LiveSet",
    "LiveTensor",
    "Move",
    "Phase",
    "Target",
    "TensorMismatch",
    "Verdict",
    "WrongBase",
    "WrongResult",
    "lane_count",
    "view_of",
]
