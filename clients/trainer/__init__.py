"""The trainer's side: share θ, m and v with the daemon of the node, and say after each step what may be published.

from clients.trainer import TorchSource

source = TorchSource(model, optimizer, daemon="http://127.0.0.1:7411", run="my-run")
source.register()
...
optimizer.step()
source.sync(step)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clients.trainer.daemon import SyncHandle
from clients.trainer.live import SourceStats
from clients.trainer.shards import OwnedSlice
from clients.trainer.torch import TorchSource

if TYPE_CHECKING:
    from clients.trainer.fsdp import FsdpSource
    from clients.trainer.megatron import MegatronSource

__all__ = ["FsdpSource", "MegatronSource", "OwnedSlice", "SourceStats", "SyncHandle", "TorchSource"]


def __getattr__(name: str) -> Any:
    """What a plain trainer has no use for is imported when asked for."""
    if name == "FsdpSource":
        from clients.trainer.fsdp import FsdpSource

        return FsdpSource
    if name == "MegatronSource":
        from clients.trainer.megatron import MegatronSource

        return MegatronSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
