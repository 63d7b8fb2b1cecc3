"""Test support: makes a scheduler rank fail in the middle of writing weights, when a test asks for it.

One invariant: without a file in `DTE_TEST_FAULTS` nothing is different.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _asked(name: str) -> bool:
    """True once for each time a test creates the file `name`."""
    try:
        (Path(os.environ["DTE_TEST_FAULTS"]) / name).unlink()
    except (KeyError, FileNotFoundError):
        return False
    return True


def _commit(original: Callable[..., Any], core: Any, body: Any) -> Any:
    if _asked(f"refuse-{core.rank}"):
        raise RuntimeError("asked to refuse")
    if _asked(f"die-{core.rank}"):
        os._exit(9)
    return original(core, body)


def _rollback(original: Callable[..., Any], core: Any) -> Any:
    if _asked("no-undo"):
        raise RuntimeError("asked not to undo")
    return original(core)


def _scatter(original: Callable[..., Any], view: Any, index: Any, values: Any) -> Any:
    if _asked("tear"):
        half = index.size // 2
        original(view, index[:half], values[:half])
        raise RuntimeError("asked to fail in the middle of a write")
    return original(view, index, values)


def _load(original: Callable[..., Any], loader: Any, named: Any, parameters: Any) -> Any:
    if _asked("load"):
        original(loader, list(named)[:1], parameters)
        raise RuntimeError("asked to fail in the middle of a unit")
    return original(loader, named, parameters)


def register() -> None:
    """Entry point `sglang.srt.plugins`."""
    if "DTE_TEST_FAULTS" not in os.environ or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("clients.rollout.core.ReceiverCore.commit", _commit, HookType.AROUND)
    HookRegistry.register("clients.rollout.core.ReceiverCore.rollback", _rollback, HookType.AROUND)
    HookRegistry.register("engine.apply.lanes.LaneView.scatter", _scatter, HookType.AROUND)
    HookRegistry.register("clients.rollout.sglang.loader.EngineLoader.load", _load, HookType.AROUND)
