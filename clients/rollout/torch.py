"""`TorchReceiver`: a plain torch or transformers model, in its own process, kept at the trainer's weights.

One invariant: the live tensors are written in place only, never replaced, so whoever holds them sees every version.

    receiver = TorchReceiver(model, name="actor-0", run="my-run", daemon="http://127.0.0.1:7411")
    with receiver.serving():
        model.generate(...)          # receiver.version, receiver.step
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
from torch import nn

from clients.protocol import ReceiverRegistration
from clients.rollout.core import ReceiverCore
from clients.rollout.registrar import Registrar
from clients.rollout.server import MAX_SOCKET_PATH, ReceiverServer
from engine.apply import Lanes, LiveCopy, LiveSet, LiveTensor, lane_count, view_of
from engine.errors import InvalidInput
from engine.layout.algebra import identity, scaled
from engine.layout.blocks import Block, Layout
from engine.records.models import ITEMSIZE


@dataclass(frozen=True)
class Shard:
    """A local tensor that holds part of a canonical one. `layout` maps its flat elements to canonical elements."""

    tensor: str
    shape: tuple[int, ...]
    layout: Layout


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by every name they have, tied ones included.

    Without what `torch.compile` puts into names: the trainer need not have compiled its model.
    """
    out: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    kept = set(model.state_dict(keep_vars=True))
    out.update((n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in kept)
    return {n.replace("_orig_mod.", ""): t for n, t in out.items()}


def _storage_lanes(name: str, tensor: torch.Tensor) -> tuple[Lanes, Layout]:
    """The tensor's own memory, and the layout memory element → row-major element; InvalidInput if it has gaps."""
    if tensor.layout != torch.strided:
        raise InvalidInput(f"{name!r} is {tensor.layout}; this receiver writes strided tensors.")
    n = tensor.numel()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if n else 0
    if span != n:
        raise InvalidInput(
            f"{name!r} does not own a gapless piece of memory (strides {tensor.stride()}).",
            remedy="Make the parameter contiguous before the receiver is created.",
        )
    lanes = view_of(name, tensor.detach().as_strided((n,), (1,)))
    if tensor.is_contiguous() or n == 0:
        return lanes, identity(n)
    dims = [(s, st) for s, st in zip(tensor.shape, tensor.stride(), strict=True)]
    row_major, step = [], 1
    for size, _ in reversed(dims):
        row_major.append(step)
        step *= size
    block = Block(tuple(s for s, _ in dims), 0, tuple(st for _, st in dims), 0, tuple(reversed(row_major))).normalised()
    return lanes, Layout((block,), n, n)


def _to_lanes(name: str, layout: Layout, dtype: str) -> Layout:
    """A layout of elements as one of 16-bit lanes."""
    size = ITEMSIZE[dtype]
    if size == 1:
        plain = len(layout.blocks) == 1 and layout == identity(layout.src_numel)
        if layout.blocks and not plain:
            raise InvalidInput(f"{name!r} has 1-byte elements and is not stored whole and in order.")
        return identity(-(-layout.src_numel // 2))
    return layout if size == 2 else scaled(layout, size // 2)


class ModuleWeights:
    """The tensors of an `nn.Module` as the receiver core wants them (see `clients.rollout.core.Weights`).

    `ignore`: names that no version carries. `copies`: local name → canonical name of the tensor it duplicates.
    `shards`: local name → the part of a canonical tensor it holds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ignore: Collection[str] = (),
        copies: Mapping[str, str] | None = None,
        shards: Mapping[str, Shard] | None = None,
        partial: bool = False,
    ) -> None:
        self._model = model
        self._ignore = frozenset(ignore)
        self._copies = dict(copies or {})
        self._shards = dict(shards or {})
        self._partial = partial
        named = _named_tensors(model)
        unknown = (self._ignore | self._copies.keys() | self._shards.keys()) - named.keys()
        if unknown:
            raise InvalidInput(f"the model has no tensor called {sorted(unknown)[0]!r}.")

    def _tensors(self) -> dict[str, torch.Tensor]:
        # A tensor without elements has no bits, so no version carries it.
        named = _named_tensors(self._model).items()
        return {n: t for n, t in named if n not in self._ignore and t.numel()}

    def places(self) -> tuple[object, ...]:
        return tuple((n, t.device, t.data_ptr(), t.dtype, *t.shape, *t.stride()) for n, t in self._tensors().items())

    def writes(self) -> tuple[object, ...]:
        return tuple(t._version for t in self._tensors().values())

    def live(self) -> LiveSet:
        aliases: dict[tuple[object, ...], list[str]] = {}
        tensors = self._tensors()
        for name, tensor in tensors.items():
            place = (tensor.device, tensor.data_ptr() or name, tensor.dtype, *tensor.shape, *tensor.stride())
            aliases.setdefault(place, []).append(name)
        self._refuse_overlaps(tensors)
        found: dict[tuple[str, ...], LiveTensor] = {}
        for names in aliases.values():
            live = self._one(names, tensors[names[0]])
            key = live.names
            first = found.get(key)
            if first is None:
                found[key] = live
            else:
                found[key] = LiveTensor(key, first.shape, first.dtype, (*first.copies, *live.copies))
        return LiveSet(self._join_copies(list(found.values())), partial=self._partial)

    def _one(self, names: list[str], tensor: torch.Tensor) -> LiveTensor:
        dtype = _dtype_name(tensor.dtype)
        if dtype not in ITEMSIZE:
            raise InvalidInput(f"{names[0]!r} has dtype {dtype}, which no version can carry.", remedy="Ignore it.")
        lanes, layout = _storage_lanes(names[0], tensor)
        shard = next((self._shards[n] for n in names if n in self._shards), None)
        if shard is None:
            shape = tuple(tensor.shape)
            canonical = tuple(dict.fromkeys(self._copies.get(n, n) for n in names))
            return LiveTensor(canonical, shape, dtype, (LiveCopy(lanes, _to_lanes(names[0], layout, dtype)),))
        if not tensor.is_contiguous():
            raise InvalidInput(f"the shard {names[0]!r} is not contiguous.")
        layout = _to_lanes(names[0], shard.layout, dtype)
        if layout.dst_numel != lane_count(shard.shape, dtype):
            raise InvalidInput(f"the shard {names[0]!r} has a layout for another shape than {shard.shape}.")
        return LiveTensor((shard.tensor,), shard.shape, dtype, (LiveCopy(lanes, layout),))

    def _join_copies(self, tensors: list[LiveTensor]) -> list[LiveTensor]:
        """Tensors declared to be copies join the one they duplicate, which may have more names than they."""
        out: list[LiveTensor] = []
        for live in sorted(tensors, key=lambda t: -len(t.names)):
            for at, other in enumerate(out):
                if set(live.names) <= set(other.names):
                    if (live.shape, live.dtype) != (other.shape, other.dtype):
                        raise InvalidInput(f"the copies of {other.names[0]!r} differ in shape or dtype.")
                    out[at] = LiveTensor(other.names, other.shape, other.dtype, (*other.copies, *live.copies))
                    break
            else:
                out.append(live)
        return out

    @staticmethod
    def _refuse_overlaps(tensors: Mapping[str, torch.Tensor]) -> None:
        spans = sorted(
            (str(t.device), t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), n)
            for n, t in tensors.items()
            if t.numel()
        )
        # Tied tensors have equal spans; anything else that overlaps would be written twice.
        for (a_where, a_start, a_stop, a), (b_where, b_start, b_stop, b) in itertools.pairwise(spans):
            if a_where == b_where and b_start < a_stop and (a_start, a_stop) != (b_start, b_stop):
                raise InvalidInput(f"{a!r} and {b!r} share part of their memory.", remedy="Give each its own storage.")


def _gpu_of(model: nn.Module) -> str:
    """UUID of the CUDA device that all of the model's parameters are on; "" where there is none, or several."""
    devices = {p.device for p in model.parameters()}
    device = devices.pop() if len(devices) == 1 else None
    if device is None or device.type != "cuda":
        return ""
    from transports.memory.cuda_ipc import TorchCuda

    return TorchCuda().uuid(torch.cuda.current_device() if device.index is None else device.index)


def default_socket(name: str) -> Path:
    """A private, short path for this process's receiver socket."""
    below = Path(f"dte-{os.getuid()}") / f"{name[:40]}-{os.getpid()}.sock"
    bases = [Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()), Path("/tmp")]
    return next((base / below for base in bases if len(os.fsencode(base / below)) <= MAX_SOCKET_PATH), bases[0] / below)


class TorchReceiver:
    """Serves the receiver protocol for `model` from background threads, and registers it at the rollout daemon.

    `name`: of the receiver at the daemon. `run`: whose versions it follows. `daemon`: base URL; None registers nothing
    (tests, or another rank registers for all). `sockets`: all ranks' sockets, if there are several; `rank` is this
    one's place among them. `ignore`, `copies`, `shards`: see `ModuleWeights`. `on_install`: called with the version
    while nothing is served, before it is (to flush caches). `transport`: see `ReceiverRegistration`.
    `p2p_host`: address at which the trainer's ranks reach this process, if it is not the daemon's.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        run: str,
        daemon: str | None = None,
        socket_path: str | Path | None = None,
        token: str | None = None,
        sockets: Sequence[str | Path] = (),
        rank: int = 0,
        ignore: Collection[str] = (),
        copies: Mapping[str, str] | None = None,
        shards: Mapping[str, Shard] | None = None,
        owner_grace_s: float = 2.0,
        finalize_timeout_s: float = 60.0,
        on_install: Callable[[int], None] | None = None,
        transport: Literal["store", "p2p", "auto"] = "auto",
        p2p_host: str | None = None,
    ) -> None:
        path = Path(socket_path) if socket_path is not None else default_socket(name)
        paths = [str(Path(s).absolute()) for s in sockets] or [str(path.absolute())]
        registration = ReceiverRegistration(name=name, kind="torch", run=run, sockets=paths, transport=transport)
        weights = ModuleWeights(model, ignore=ignore, copies=copies, shards=shards, partial=len(paths) > 1)
        self._core = ReceiverCore(
            weights,
            name=name,
            run=run,
            rank=rank,
            ranks=len(paths),
            owner_grace_s=owner_grace_s,
            finalize_timeout_s=finalize_timeout_s,
            on_install=on_install,
            device=_gpu_of(model),
            p2p_host=p2p_host,
        )
        try:
            self._server = ReceiverServer(self._core, path)
        except BaseException:
            self._core.close()
            raise
        self._registrar = Registrar(daemon, registration, self._server, token=token) if daemon is not None else None

    @property
    def socket_path(self) -> Path:
        return self._server.path

    @property
    def version(self) -> int | None:
        """The proven version of the live weights, None if they are none. Constant inside `serving()`."""
        return self._core.version

    @property
    def step(self) -> int | None:
        """The trainer's step of that version."""
        return self._core.step

    @property
    def ready(self) -> bool:
        return self._core.ready

    @contextmanager
    def serving(self, timeout_s: float | None = None) -> Iterator[Self]:
        """Hold the weights still at one proven version. Waits for one; StateConflict after `timeout_s`."""
        with self._core.serving(timeout_s):
            yield self

    def close(self) -> None:
        """Stop registering and serving; a commit that was not finalized is rolled back."""
        if self._registrar is not None:
            self._registrar.close()
        self._server.close()
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
