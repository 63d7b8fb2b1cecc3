"""The server's front process: what the engine's update call does there, around the schedulers' part of it.

One invariant: our calls change nothing that a client of the server can see but the weight version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from clients.rollout.sglang.call import KEY


class Front:
    """The hook around `TokenizerManager._wait_for_model_update_from_disk`."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def update(self, original: Callable[[Any, Any], Awaitable[Any]], manager: Any, request: Any) -> Any:
        """One call at a time: a paused engine takes no lock of its own, and two calls would share one answer."""
        async with self._turn:
            name = manager.served_model_name
            try:
                return await original(manager, request)
            finally:
                manifest = getattr(request, "manifest", None)
                if isinstance(manifest, dict) and KEY in manifest:
                    # The engine names itself after the path it was given; ours is the one it has.
                    manager.served_model_name = name
