"""What every kind of source takes.

One invariant: an option means the same for every kind of trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import httpx

from clients.protocol import Detector
from clients.trainer.group import Agree
from clients.trainer.places import MemoryMode
from clients.trainer.shards import Names


class SourceOptions(TypedDict, total=False):
    """What every kind of source takes.

    `names` renames canonical tensors (a mapping or a function; None leaves one out). `detector`: `snapshot` or `dense`
    for all trained tensors, or per canonical name. `dtypes`: canonical name → dtype receivers store (default BF16 for
    FP32 parameters). `rank`, `world`, `launch`, `agree` default to what torch.distributed's `group` says, and to a
    single rank. `on_daemon_down`: whether training goes on without its daemon or waits for it. `memory`: how tensors on
    a CUDA device are read: `ipc` where they are, `mirror` as copies in host memory (any tensor), or `auto`: the first,
    and the second where the daemon cannot map the device's memory. `replica_digests`: whether ranks that hold
    the same weights compare them at every version (Megatron-Core and FSDP2; the same on all ranks).
    """

    daemon: str
    token: str | None
    rank: int | None
    world: int | None
    launch: str | None
    group: Any
    agree: Agree | None
    names: Names | None
    detector: Detector | Mapping[str, Detector] | None
    dtypes: Mapping[str, str] | None
    on_daemon_down: Literal["continue", "wait"]
    hold_timeout_s: float
    register_timeout_s: float
    memory: MemoryMode
    replica_digests: bool
    transport: httpx.BaseTransport | None
