"""Lane views of numpy memory of every kind, so that one test can say that all of them behave alike.

`PRETEND` is a device that this machine does not have: its tensors keep their elements in host memory, but refuse to be
read there or to be mixed with host tensors, as an accelerator's would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from engine.apply import DeviceLanes, Lanes, LaneView

PRETEND = torch.device("maia:1")
_CROSSES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)

View = Callable[[npt.NDArray[Any]], Lanes]


class PretendTensor(torch.Tensor):
    """A tensor that says it lies on `PRETEND`. Only to be used inside `pretending`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PretendTensor:
        out: PretendTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=PRETEND,
        )
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(False):  # wrappers made in it could not be viewed
            return _run(func, args, kwargs or {})

    # These look for the device's driver before they dispatch.
    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> PretendTensor:  # type: ignore[override]
        self.inner.copy_(other.inner if isinstance(other, PretendTensor) else other)
        return self

    def data_ptr(self) -> int:
        return self.inner.data_ptr()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    here = [t for t in tensors if isinstance(t, PretendTensor)]
    asked = kwargs.get("device")
    stays = bool(here) if asked is None else torch.device(asked) == PRETEND
    if here and len(here) != len(tensors) and func not in _CROSSES:
        raise RuntimeError(f"{func} mixes tensors of {PRETEND} and the host.")
    if asked is not None and stays:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda x: x.inner if isinstance(x, PretendTensor) else x, (args, kwargs))
    out = func(*args, **kwargs)
    return tree_map(lambda x: PretendTensor(x) if isinstance(x, torch.Tensor) else x, out) if stays else out


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(False):
            return _run(func, args, kwargs or {})


class PretendModule:
    """What torch has for a device type: selects a device for a thread, and waits for one."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self, device: torch.device) -> None:
        assert device == PRETEND
        self.calls.append("synchronize")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == PRETEND
        self.calls.append("enter")
        yield
        self.calls.append("leave")


@contextmanager
def pretending() -> Iterator[PretendModule]:
    """The pretended device exists, in this thread."""
    module, real = PretendModule(), torch.get_device_module
    with pytest.MonkeyPatch.context() as patch, _Mode():
        patch.setattr(torch, "get_device_module", lambda d: module if torch.device(d) == PRETEND else real(d))
        yield module


@contextmanager
def one_thread() -> Iterator[None]:
    """Many small operations: torch's threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tensor(memory: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(memory.reshape(-1).view(np.uint8)).view(torch.int16)


def numpy_view(memory: npt.NDArray[Any]) -> Lanes:
    return LaneView(memory)


def device_view(memory: npt.NDArray[Any]) -> Lanes:
    """`DeviceLanes` in pieces of 4096 lanes; memory of an odd length has to stay on the host."""
    if memory.nbytes % 2:
        return LaneView(memory)
    return DeviceLanes(_tensor(memory), scratch_bytes=1)


def pretend_view(memory: npt.NDArray[Any]) -> Lanes:
    """The same on the pretended device, inside `pretending`."""
    if memory.nbytes % 2:
        return LaneView(memory)
    return DeviceLanes(PretendTensor(_tensor(memory)), scratch_bytes=1)


@contextmanager
def views(kind: str) -> Iterator[View]:
    """The maker of views of this kind."""
    with one_thread():
        if kind == "pretend":
            with pretending():
                yield pretend_view
        else:
            yield {"numpy": numpy_view, "device": device_view}[kind]


KINDS = ("numpy", "device", "pretend")
