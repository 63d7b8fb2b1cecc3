"""The trainer's side: share θ, m and v with the daemon of the node, and say after each step what may be published.

from clients.trainer import TorchSource

source = TorchSource(model, optimizer, daemon="http://127.0.0.1:7411", run="my-run")
source.register()
...
optimizer.step()
source.sync(step)
"""

from __future__ import annotations

from clients.trainer.daemon import SyncHandle
from clients.trainer.live import SourceStats
from clients.trainer.shards import OwnedSlice
from clients.trainer.torch import TorchSource

__all__ = ["OwnedSlice", "SourceStats", "SyncHandle", "TorchSource"]
