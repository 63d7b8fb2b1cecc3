"""The whole way on one machine: a model under a real TorchSource, one real daemon, and a receiver in this process.

One invariant: the verdict compares tensors of the two models through numpy views; nothing of dte takes part in it.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from clients.control import ControlClient
from clients.protocol import Job, JobState, ReceiverState, VersionInfo
from clients.rollout.torch import TorchReceiver
from clients.trainer import TorchSource
from tests.support.daemon_process import Daemon

TIMEOUT_S = 120.0
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_count = itertools.count()


def daemon(folder: Path, **changes: Any) -> Daemon:
    """One daemon with all roles on a free port."""
    return Daemon(
        folder,
        **{
            "host": "127.0.0.1",
            "port": 0,
            "roles": "publisher,coordinator,store,subscriber",
            "data_dir": str(folder / "data"),
            "poll_interval_s": 0.02,
            "detect_threads": 1,
        }
        | changes,
    )


def bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's bits as integers, row-major."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(_WORDS[tensor.element_size()]).numpy()


def published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by every name."""
    kept = set(model.state_dict(keep_vars=True))
    named = dict(model.named_parameters(remove_duplicate=False))
    named.update((n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in kept)
    return named


def rollout_twin(model: torch.nn.Module, dtypes: Mapping[str, torch.dtype] | None = None) -> torch.nn.Module:
    """A copy of the model as a rollout engine holds it: FP32 parameters in BF16, and other weights in it."""
    twin = copy.deepcopy(model)
    dtypes = dtypes or {}
    with torch.no_grad():
        for name, p in twin.named_parameters():
            kind = dtypes.get(name) or (torch.bfloat16 if p.dtype == torch.float32 else p.dtype)
            p.data = torch.zeros_like(p.data, dtype=kind)
        for name, b in twin.named_buffers():
            b.zero_()
            if name in dtypes:
                b.data = b.data.to(dtypes[name])
    return twin


class Line:
    """`step()` trains, `ship()` syncs, waits and compares."""

    def __init__(
        self,
        url: str,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        run: str | None = None,
        masters: Mapping[str, torch.Tensor] | None = None,
        cast: Mapping[str, torch.dtype] | None = None,
        twin: torch.nn.Module | None = None,
        rename: Callable[[str], str] = lambda name: name,
        register: bool = True,
        receiver_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.url = url
        self.run = run or f"line-{next(_count)}"
        self.model = model
        self.masters = dict(masters or {})
        self.rename = rename
        self.number = 0
        self.source = TorchSource(
            model, optimizer, daemon=url, run=self.run, masters=masters, hold_timeout_s=120.0, **options
        )
        self.twin = twin if twin is not None else rollout_twin(model, cast)
        self.control = ControlClient(url, run=self.run)
        self.receiver: TorchReceiver | None = None
        self._receiver_options = dict(receiver_options or {})
        if register:
            self.source.register()
            self.receive()
            self.arrived(0)

    def receive(self) -> None:
        """Start the receiver."""
        self.receiver = TorchReceiver(
            self.twin, name=f"to-{self.run}"[:100], run=self.run, daemon=self.url, **self._receiver_options
        )

    def ship(self, step: int | None = None, *, publish: bool = True) -> Job:
        """Sync the present weights, wait for the end of the job; if a version came of it, compare the receiver."""
        self.number = self.number + 1 if step is None else step
        job = self.source.sync(self.number, publish=publish).wait(TIMEOUT_S)
        if job.state is JobState.COMMITTED:
            assert job.version is not None
            self.arrived(job.version)
        elif job.state is JobState.UNCHANGED:
            assert not self.differing()
        return job

    def arrived(self, version: int) -> None:
        """Wait until the receiver serves `version`, and compare everything."""
        assert self.receiver is not None
        until_s = time.monotonic() + TIMEOUT_S
        while not self.receiver.ready or (self.receiver.version or 0) < version:
            info = next(iter(self.control.receivers()), None)
            assert info is None or info.state is not ReceiverState.FAILED, info
            assert time.monotonic() < until_s, info
            time.sleep(0.02)
        with self.receiver.serving(TIMEOUT_S):
            assert self.receiver.version == version
            assert not self.differing(), f"version {version}"

    def relaunched(self, optimizer: Any) -> TorchSource:
        """The source of the trainer's next life, not registered yet; the old one is closed."""
        self.source.close()
        self.source = TorchSource(self.model, optimizer, daemon=self.url, run=self.run, hold_timeout_s=120.0)
        return self.source

    def info(self, version: int) -> VersionInfo:
        return self.control.version(version)

    def differing(self) -> dict[str, int]:
        """Tensors whose bits are not what the trainer's cast makes, with the number of wrong elements."""
        theirs = published(self.twin)
        wrong: dict[str, int] = {}
        for name, tensor in published(self.model).items():
            master = self.masters.get(name)
            mine = tensor if master is None else master.reshape(tensor.shape)
            held = theirs[self.rename(name)]
            expected, found = bits(mine.detach().to(held.dtype)), bits(held)
            if expected.shape != found.shape:
                wrong[name] = -1
            elif count := int(np.count_nonzero(expected != found)):
                wrong[name] = count
        return wrong

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.source.close()
        self.control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
