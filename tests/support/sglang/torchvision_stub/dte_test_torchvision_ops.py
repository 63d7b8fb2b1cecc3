"""Test support: lets torchvision's wheel for GPUs be imported beside a torch for CPUs.

Its extension cannot load without CUDA libraries, and the registrations that follow fail for want of two operators.
Nothing calls them. One invariant: an operator that exists is left alone.
"""

from __future__ import annotations


def declare() -> None:
    """Called by torch when it is imported (entry point group `torch.backends`)."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
