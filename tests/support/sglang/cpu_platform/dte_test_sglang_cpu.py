"""Test support: an out-of-tree SGLang platform, so that an unmodified server runs on any CPU.

SGLang's own CPU engine needs kernels built for AVX-512. A platform of another name takes the plain PyTorch form of
every fused operation instead. One invariant: nothing is patched; this is what SGLang offers platforms for.
"""

from __future__ import annotations

from typing import Any


def activate() -> str:
    """Called by SGLang while it imports its platforms; the class is named, not made, since its bases are not ready."""
    return "dte_test_sglang_cpu:PlainCpuPlatform"


def _platform() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

    return PlainCpuPlatform


def __getattr__(name: str) -> Any:
    if name != "PlainCpuPlatform":
        raise AttributeError(name)
    globals()[name] = found = _platform()
    return found
