"""The entry point SGLang calls in each of its processes, and the hooks it registers there.

One invariant: nothing of the engine is changed but through its hook registry; a hook of ours never raises into the
engine, and an engine we cannot serve goes on serving requests and says why through `GET /server_info`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import multiprocessing
import os
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from clients.rollout.server import ReceiverServer
from clients.rollout.sglang.call import (
    PLUGIN_PROTOCOL,
    Announcement,
    EngineAnswer,
    answer_text,
    parse_call,
)
from clients.rollout.sglang.converter import Converter
from clients.rollout.sglang.front import Front
from clients.rollout.sglang.layouts import find_layouts
from clients.rollout.sglang.loader import EngineLoader
from clients.rollout.sglang.rank import SglangRank, plain, share
from clients.rollout.sglang.units import units_of
from clients.rollout.sglang.weights import EngineWeights, dtype_name, parameters_of
from engine.errors import DteError, InvalidInput, StateConflict

log = logging.getLogger(__name__)

SOCKET_DIR = "DTE_SGLANG_SOCKET_DIR"
P2P_HOST = "DTE_SGLANG_P2P_HOST"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PARTS = "sglang.srt.managers.scheduler_components"
_UPDATER = f"{_PARTS}.weight_updater.SchedulerWeightUpdaterManager"
_STATE = f"{_PARTS}.internal_state.SchedulerInternalStateController"
_FRONT = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_FRONT_UPDATE = "_wait_for_model_update_from_disk"
_NAMESPACE = "_maybe_namespace_elastic_radix_cache"
_WRITERS = (
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)


def socket_dir() -> Path:
    """Where the ranks' sockets are: `DTE_SGLANG_SOCKET_DIR`, or a private directory of the user, made if need be.

    InvalidInput if somebody else owns that directory, or may write there.
    """
    named = os.environ.get(SOCKET_DIR)
    if named:
        return Path(named).absolute()
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"dte-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise InvalidInput(
            f"{folder} is not a private directory of this user.", remedy=f"Remove it, or set {SOCKET_DIR}."
        )
    return folder


class SchedulerHost:
    """The `Host` that a scheduler is."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        args = scheduler.server_args
        self._url = str(args.url())
        self.namespace = 0
        """Requests of different namespaces share no cached prefix."""
        key = getattr(args, "admin_api_key", None) or args.api_key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def model(self) -> Any:
        ((_, runner),) = self._scheduler.weight_updater._select_runners("target")
        return runner.model

    def can_flush(self) -> bool:
        return bool(self._scheduler.is_fully_idle(ignore_waiting=self._scheduler._engine_paused))

    def flush(self, keep_running: bool) -> None:
        if keep_running:
            self._part_from_running()
        if self.can_flush():
            if not self._scheduler.flush_cache(empty_cache=False):
                raise StateConflict("the engine did not flush its cache.")
            return
        if not keep_running:
            raise StateConflict("requests are running, so that the cache could not be flushed.")
        self._drop_unused()

    def _part_from_running(self) -> None:
        """Later requests must not share what running ones compute with their old cache."""
        if not hasattr(self._scheduler, _NAMESPACE):
            raise StateConflict(
                "this SGLang cannot keep later requests away from old caches.", remedy="Choose the pause mode retract."
            )
        self.namespace += 1
        for request in self._scheduler.waiting_queue:
            self.name(request)

    def name(self, request: Any) -> None:
        """Put a request into the namespace of now."""
        if self.namespace:
            request.extra_key = f"{request.extra_key or ''}|dte-{self.namespace}"

    def _drop_unused(self) -> None:
        """Evict every cached prefix that no running request holds."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        cache = self._scheduler.tree_cache
        size = cache.evictable_size()
        if size:
            cache.evict(EvictParams(num_tokens=int(size)))
        if cache.evictable_size():
            raise StateConflict("the engine did not drop what it had cached with the old weights.")

    def refresh_derived(self) -> None:
        from sglang.srt.model_loader.loader import post_load_weights

        post_load_weights(self.model)

    def set_version(self, label: str) -> None:
        self._scheduler.record_weight_version_change(new_version=label)

    def go_on(self) -> None:
        # To ourselves: no proxy, and whatever certificate we were given.
        httpx.post(
            f"{self._url}/continue_generation",
            json={},
            headers=self._headers,
            timeout=60.0,
            trust_env=False,
            verify=False,
        ).raise_for_status()


def unsupported(args: Any) -> str | None:
    """Why an engine started with these arguments cannot be served; None if it can."""
    checks: tuple[tuple[bool, str], ...] = (
        (args.dp_size > 1, "data-parallel replicas; run one server per replica and register each"),
        (args.pp_size > 1, "pipeline parallelism"),
        (args.nnodes > 1, "an engine on several nodes"),
        (bool(args.speculative_algorithm), "a draft model"),
        (bool(args.enable_hierarchical_cache), "a hierarchical cache"),
        (bool(getattr(args, "enable_lora", False)), "LoRA adapters"),
        (bool(getattr(args, "enable_eplb", False)), "experts that move between ranks"),
        (getattr(args, "elastic_ep_backend", None) not in (None, "none"), "elastic expert parallelism"),
        (bool(getattr(args, "enable_lmcache", False)), "a cache that it does not flush itself (LMCache)"),
        (getattr(args, "weight_cache_mode", None) not in (None, "off"), "weights shared with other engines"),
        (getattr(args, "disaggregation_mode", None) not in (None, "null"), "prefill and decoding apart"),
        (bool(args.quantization), f"quantization ({args.quantization})"),
    )
    return next((f"this engine has {what}, which is not supported." for bad, what in checks if bad), None)


class Plugin:
    """The hooks of one process. In a scheduler process it serves that rank from the end of its construction on."""

    def __init__(self) -> None:
        self._rank: SglangRank | None = None
        self._host: SchedulerHost | None = None
        self._announced: Announcement | None = None

    # --- binding ----------------------------------------------------------------------------------------------------

    def scheduler_built(self, result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """After a scheduler's construction: its model is loaded."""
        boot = uuid.uuid4().hex[:12]
        why = unsupported(scheduler.server_args)
        if why is not None:
            log.warning("dte does not serve this engine: %s", why)
            self._announced = Announcement(protocol=PLUGIN_PROTOCOL, boot=boot, sockets=[], error=why)
            return
        report: dict[str, Any] = {"path": None, "error": None}
        try:
            report["path"] = str(self._bind(scheduler))
        except Exception as error:
            report["error"] = plain(error.message if isinstance(error, DteError) else repr(error), 1000)
            log.warning("dte does not serve this rank", exc_info=True)
        # All ranks get here, so that none waits for another; one that cannot be served means the engine cannot.
        reports = share(report, int(scheduler.tp_size), scheduler.tp_cpu_group)
        errors = [f"rank {n}: {r['error']}" for n, r in enumerate(reports) if r["error"] is not None]
        self._announced = Announcement(
            protocol=PLUGIN_PROTOCOL,
            boot=boot,
            sockets=[] if errors else [r["path"] for r in reports],
            error=errors[0] if errors else None,
        )

    def _bind(self, scheduler: Any) -> Path:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        host = self._host = SchedulerHost(scheduler)
        rank, ranks = int(parallel.tp_rank), int(parallel.tp_size)
        model = scheduler.model_config
        config = {**model.hf_text_config.to_dict(), "dtype": dtype_name(model.dtype)}
        config["architectures"] = list(model.hf_config.architectures)
        place = (rank, ranks, int(parallel.moe_ep_rank), int(parallel.moe_ep_size))
        args = scheduler.server_args
        flags = {"sglang": importlib.metadata.version("sglang"), "moe": str(getattr(args, "moe_runner_backend", ""))}
        trained_in = getattr(model.hf_text_config, "dtype", None)
        found = find_layouts(
            host.model,
            config,
            args.model_path,
            place,
            flags,
            trained_in=None if trained_in is None else str(trained_in).removeprefix("torch."),
        )
        tied = bool(config.get("tie_word_embeddings"))
        aliases = {"model.embed_tokens.weight": ["lm_head.weight"]} if tied else {}
        loader = EngineLoader(lambda: host.model)
        dtypes = {name: dtype_name(tensor.dtype) for name, tensor in parameters_of(host.model).items()}
        units = units_of(found, dtypes, loader.steps())
        converter = Converter(units, found, lambda: parameters_of(host.model), loader.load, aliases=aliases)
        weights = EngineWeights(
            host.model,
            found.placements,
            aliases=aliases,
            partial=ranks > 1,
            converted={name for unit in units for name in unit.parameters},
            elsewhere=converter.names,
        )
        if units:
            log.info("%d tensors are converted, in %d units", sum(len(u.tensors) for u in units), len(units))
        port = scheduler.server_args.port
        path = socket_dir() / f"sgl-{port}-{os.getpid()}.sock"
        self._rank = SglangRank(
            weights,
            converter,
            host,
            lambda core, serves: ReceiverServer(core, path, serves),
            name=f"sglang-{port}",
            rank=rank,
            ranks=ranks,
            group=scheduler.tp_cpu_group,
            p2p_host=os.environ.get(P2P_HOST),
        )
        log.info("dte serves rank %d of %d at %s", rank, ranks, path)
        return path

    def internal_state(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """After the engine's own report: add where we listen."""
        if self._announced is not None:
            result.internal_state["dte"] = self._announced.model_dump(mode="json")
        return result

    # --- updates ----------------------------------------------------------------------------------------------------

    def from_disk(self, original: Callable[[Any, Any], Any], updater: Any, request: Any) -> Any:
        """Around the engine's update call: ours if the manifest says so, else its own."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

        try:
            call = parse_call(request.manifest)
        except DteError as error:
            return UpdateWeightFromDiskReqOutput(success=False, message=str(error))
        if call is None:
            return self.writer(original, updater, request)
        if self._rank is None:
            why = self._announced.error if self._announced is not None else "the plugin is not bound"
            return UpdateWeightFromDiskReqOutput(success=False, message=f"dte does not serve this engine: {why}")
        answer: EngineAnswer = self._rank.update(call)
        return UpdateWeightFromDiskReqOutput(success=answer.error is None, message=answer_text(answer))

    def writer(self, original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
        """Around every other call that may write weights: they count as touched before and after it."""
        rank = self._rank
        if rank is None:
            return original(updater, *args, **kwargs)
        rank.touch()
        try:
            return original(updater, *args, **kwargs)
        finally:
            rank.touch()

    def checker(self, original: Callable[[Any, Any], Any], updater: Any, request: Any) -> Any:
        """Around the engine's weight checker, one of whose actions overwrites the weights."""
        if getattr(request, "action", None) == "reset_tensors":
            return self.writer(original, updater, request)
        return original(updater, request)

    def namespaced(self, result: None, scheduler: Any, request: Any) -> None:
        """After the engine has chosen what a new request may share cached prefixes with."""
        if self._host is not None:
            self._host.name(request)

    def release(self, original: Callable[..., Any], updater: Any, request: Any) -> Any:
        """Around the release of memory: nothing of ours reads the weights while they are away."""
        if self._rank is not None and _weights_in(request.tags):
            self._rank.memory(away=True)
        return original(updater, request)

    def resume(self, original: Callable[..., Any], updater: Any, request: Any) -> Any:
        """Around the return of memory: what is in it has to be proven."""
        answer = original(updater, request)
        if self._rank is not None and _weights_in(request.tags):
            self._rank.memory(away=False)
        return answer


def _weights_in(tags: Any) -> bool:
    return not tags or "weights" in tags


def _has(owner: str, name: str) -> bool:
    """True if this process has loaded a class `owner` with a method `name`: not every version of the engine has all."""
    module, _, kind = owner.rpartition(".")
    return hasattr(getattr(sys.modules.get(module), kind, None), name)


def register() -> None:
    """Register the hooks. Called once in each process of the engine; only the front and the schedulers have some."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if multiprocessing.parent_process() is None:
        # The front process registers before it has loaded what it serves with.
        importlib.import_module(_FRONT.rpartition(".")[0])
        if _has(_FRONT, _FRONT_UPDATE):
            HookRegistry.register(f"{_FRONT}.{_FRONT_UPDATE}", Front().update, HookType.AROUND)
    if _SCHEDULER.rpartition(".")[0] not in sys.modules:
        return

    plugin = Plugin()
    HookRegistry.register(f"{_SCHEDULER}.__init__", plugin.scheduler_built, HookType.AFTER)
    optional: tuple[tuple[str, str, Callable[..., Any], HookType], ...] = (
        (_SCHEDULER, _NAMESPACE, plugin.namespaced, HookType.AFTER),
        (_UPDATER, "check_weights", plugin.checker, HookType.AROUND),
    )
    for owner, name, hook, kind in optional:
        if _has(owner, name):
            HookRegistry.register(f"{owner}.{name}", hook, kind)
    HookRegistry.register(f"{_STATE}.get_internal_state", plugin.internal_state, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.update_weights_from_disk", plugin.from_disk, HookType.AROUND)
    for name in _WRITERS:
        HookRegistry.register(f"{_UPDATER}.{name}", plugin.writer, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.release_memory_occupation", plugin.release, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.resume_memory_occupation", plugin.resume, HookType.AROUND)
