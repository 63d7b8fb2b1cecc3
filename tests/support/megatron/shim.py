"""Lets unmodified Megatron-Core train on CPUs over Gloo. For tests only; `install` comes before any import of megatron.

The one invariant: a redirect changes where something runs (device, stream, random source, type name, a collective that
Gloo lacks), never optimizer arithmetic, state layout or which rank owns what.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class CudaMachineError(RuntimeError):
    """This machine has CUDA: Megatron-Core runs there as it is, and the redirects would hide the real device path."""


class _CpuForCuda(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU; `Tensor.type()` gives CUDA names.

    Megatron-Core passes `device="cuda"` (or what `current_device` returned) all over, and its optimizers sort
    parameters into FP32 and 16-bit groups by the type names `torch.cuda.FloatTensor`, `torch.cuda.BFloat16Tensor`, ….
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _Stream:
    """Work on a CPU is done when the call returns, so every stream and event is already complete."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _redirect_cuda() -> None:
    """`torch.cuda`: the current device is the CPU, streams are complete, and there is one generator, the CPU's."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"  # Megatron-Core uses it only as `device=…`
    # Each gets a function of its own: the compiler's tables, built on its import, refuse one that has two names.
    cuda.set_device = lambda *_, **__: None
    cuda.synchronize = lambda *_, **__: None
    cuda.empty_cache = lambda *_, **__: None
    cuda.nvtx.range_push = lambda *_, **__: None
    cuda.nvtx.range_pop = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: _Stream()
    cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.is_current_stream_capturing = lambda: False
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, *_, **__: self


def _stub_triton_kernels() -> None:
    """One module that every GPT model imports needs triton; its kernels, for paged activations, are not used here."""
    try:
        import triton  # noqa: F401
    except ImportError:

        def absent(*_: Any, **__: Any) -> None:
            raise RuntimeError("paged stash kernels need triton and a GPU")

        stub: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        stub.GLOBAL_BLOCK_SIZE = 1024
        stub.paged_stash_copy_kernel = stub.paged_stash_pop_kernel = absent
        sys.modules[stub.__name__] = stub


def _redirect_rng_tracker() -> None:
    """The tracker of random states talks to CUDA generators past `torch.cuda`."""
    import megatron.core.tensor_parallel.random as random

    module: Any = random
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()


def _allow_torch_norm_under_sequence_parallel() -> None:
    """torch's norms compute the same on a part of a sequence; what TE's do more is to tag their weights, so that their
    gradients are summed over the tensor-parallel ranks."""
    import megatron.core.transformer.torch_norm as torch_norm

    cls: Any = torch_norm.WrappedTorchNorm
    original = cls.__new__

    def new(klass: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = original(klass, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = parallel
        return norm

    cls.__new__ = new


def _convert_split_sizes() -> None:
    """The all-to-all dispatcher wants numpy split sizes, but converts only tensors that live on a GPU."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        redirected: Any = module
        redirected.maybe_move_tensor_to_cpu = move


def _uneven_collectives() -> None:
    """Gloo's all_gather and reduce_scatter of lists want equal sizes; experts split over tensor-parallel ranks use
    unequal ones."""
    all_gather = dist.all_gather
    reduce_scatter = dist.reduce_scatter

    def gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({tuple(o.shape) for o in outputs}) <= 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        me = dist.get_rank(group)
        for index, output in enumerate(outputs):
            part = tensor.contiguous() if index == me else torch.empty_like(output).contiguous()
            dist.broadcast(part, group=group, group_src=index)
            output.copy_(part)
        return None

    def scatter(
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({tuple(i.shape) for i in inputs}) <= 1:
            return reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
        me = dist.get_rank(group)
        for index, part in enumerate(inputs):
            total = part.contiguous().clone()
            dist.all_reduce(total, op=op, group=group)
            if index == me:
                output.copy_(total)
        return None

    module: Any = dist
    module.all_gather, module.reduce_scatter = gather, scatter


_mode: _CpuForCuda | None = None


def install() -> None:
    """Redirect this process, once, for good. The tensor redirects hold in the calling thread only.

    Raises `CudaMachineError` where CUDA is available, RuntimeError if megatron is already imported.
    """
    global _mode
    if _mode is not None:
        return
    if torch.cuda.is_available():
        raise CudaMachineError("the CPU redirects of the tests must not be installed where CUDA is available")
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core is imported already; install the redirects first")
    # Megatron-Core compiles many small functions; compiling one takes longer than all that a test runs of it.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asked for by tensor parallelism
    _redirect_cuda()
    mode: Any = _CpuForCuda()
    mode.__enter__()
    _mode = mode
    _stub_triton_kernels()
    with _quiet():
        _redirect_rng_tracker()
        _allow_torch_norm_under_sequence_parallel()
        _convert_split_sizes()
    _uneven_collectives()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron-Core warns of each optional package that is absent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
