"""Backends by name."""

from __future__ import annotations

from engine.detect.base import DetectBackend
from engine.detect.cpu import CpuBackend
from engine.detect.reference import ReferenceBackend
from engine.errors import InvalidInput


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return ("cpu", "reference")


def get(name: str, *, threads: int = 1) -> DetectBackend:
    """A new backend; `threads` matters to `cpu` only. Raises InvalidInput for unknown names."""
    if name == "cpu":
        return CpuBackend(threads)
    if name == "reference":
        return ReferenceBackend()
    raise InvalidInput(f"unknown detection backend {name!r}.", remedy=f"Use one of: {', '.join(names())}.")
