"""Layouts read off an engine's own loading."""

from engine.probe.fit import fit_blocks, fit_layouts
from engine.probe.probing import Load, Parameters, Probed, kept, memory_of, probe

__all__ = ["Load", "Parameters", "Probed", "fit_blocks", "fit_layouts", "kept", "memory_of", "probe"]
