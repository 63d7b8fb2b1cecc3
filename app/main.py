"""Puts one daemon together: settings → node → roles → HTTP application → server.

Invariant: building the application touches no disk and no network; its lifespan starts the roles in order and stops
them in reverse, also when one of them fails to start.
"""

from __future__ import annotations

import importlib
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import locks, problems
from app.api import events as events_api
from app.api import health as health_api
from app.api import versions as versions_api
from app.auth import BearerAuth
from app.bodies import BodyLimit, DrainUnread
from app.chains import Chains
from app.decision_events import observer
from app.degraded import Degraded
from app.events import EventBus
from app.metrics import Metrics
from app.p2p.hub import Hub
from app.roles.base import Node, Role
from app.settings import RoleName, Settings
from app.worker.launching import Launcher, start_process
from clients.protocol import Problem
from engine.errors import DteError
from engine.records import Decision
from transports.store.base import ChunkStore
from transports.store.open import open_store

log = logging.getLogger(__name__)

_ROLE_CLASSES: dict[RoleName, tuple[str, str]] = {
    "store": ("app.roles.store", "StoreRole"),
    "coordinator": ("app.roles.coordinator", "CoordinatorRole"),
    "publisher": ("app.roles.publisher", "PublisherRole"),
    "subscriber": ("app.roles.subscriber", "SubscriberRole"),
}


class StartError(DteError):
    """The daemon could not start."""

    code = "start"


def package_version() -> str:
    """The installed version of this distribution."""
    try:
        return version("delta-transfer-engine")
    except PackageNotFoundError:
        return "0+unknown"


def build_node(settings: Settings, *, launch_worker: Launcher = start_process) -> Node:
    """The shared parts of a daemon. Opens nothing yet."""
    metrics = Metrics()
    events = EventBus(settings.event_history)
    secret = settings.store_token or settings.token
    store = open_store(
        settings.store or str(settings.store_dir), token=None if secret is None else secret.get_secret_value()
    )
    return Node(
        settings=settings,
        store=store,
        chains=Chains(_chain_factory(settings, store, observer(events, metrics)), settings.run),
        events=events,
        metrics=metrics,
        degraded=Degraded(metrics),
        p2p=Hub(settings, events),
        launch_worker=launch_worker,
    )


def _chain_factory(
    settings: Settings, store: ChunkStore, observe: Callable[[Decision, bool], None]
) -> Callable[[str], Any]:
    def make(run: str) -> Any:
        from app.chain import Chain

        key = settings.signing_key
        return Chain(
            run,
            store,
            poll_interval_s=settings.poll_interval_s,
            signing_key=None if key is None else key.get_secret_value().encode(),
            observer=observe,
        )

    return make


def build_roles(node: Node) -> list[Role]:
    """The daemon's roles in start order. Imports only those that are wanted."""
    roles = []
    for name in node.settings.ordered_roles:
        module, cls = _ROLE_CLASSES[name]
        role: Role = getattr(importlib.import_module(module), cls)(node)
        roles.append(role)
    return roles


def create_app(settings: Settings, *, launch_worker: Launcher = start_process) -> FastAPI:
    """The daemon as an ASGI application; `app.state.node` and `app.state.roles` hold its parts."""
    node = build_node(settings, launch_worker=launch_worker)
    roles = build_roles(node)

    app = FastAPI(
        title="Delta Transfer Engine",
        version=package_version(),
        lifespan=lifespan_of(node, roles),
        docs_url=None,
        redoc_url=None,
        responses={
            422: {"model": Problem, **problems.problem_responses({422: "What was sent can never work."})[422]},
            "default": {"model": Problem, "description": "A problem document (RFC 9457)."},
        },
    )
    app.state.node = node
    app.state.roles = roles
    app.state.start_error = None
    problems.install(app)
    app.include_router(health_api.router(node, roles))
    app.include_router(events_api.router(node.events))
    app.include_router(versions_api.router(node))
    for role in roles:
        router = role.router()
        if router is not None:
            app.include_router(router)

    # The last one added is the outermost.
    token = settings.token
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(BearerAuth, token=None if token is None else token.get_secret_value())
    app.add_middleware(RequestMetrics, metrics=node.metrics)
    app.add_middleware(problems.UnexpectedErrors)
    app.add_middleware(DrainUnread)
    return app


def lifespan_of(node: Node, roles: Sequence[Role]) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """The life of a daemon: roles start in order and stop in reverse, then the store is closed."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(node.store.aclose)
            stack.push_async_callback(node.p2p.aclose)
            stack.callback(node.events.close)
            try:
                _lock_data_dir(stack, node.settings)
                for role in roles:
                    # Pushed first: a role whose start fails half-way still owes a stop to what it started.
                    stack.push_async_callback(_stop, role.name, role.stop)
                    await role.start()
                    log.info("role %s started", role.name)
            except Exception as e:
                app.state.start_error = e
                raise
            node.events.publish("daemon-started", roles=[r.name for r in roles])
            yield

    return lifespan


def _lock_data_dir(stack: AsyncExitStack, settings: Settings) -> None:
    where = settings.data_dir
    try:
        stack.enter_context(locks.held(where, settings.ordered_roles))
    except locks.Taken as taken:
        raise StartError(
            f"another daemon (process {taken.pid or '?'}) has the role {taken.role} on the data directory {where}.",
            remedy="Stop it, or give this daemon a data_dir of its own (DTE_DATA_DIR), or other roles.",
        ) from None
    except OSError as error:
        raise StartError(
            f"the data directory {where} cannot be used: {error.strerror}.",
            remedy="Set DTE_DATA_DIR to a directory this user may write to.",
        ) from error


async def _stop(name: str, stop: Callable[[], Awaitable[None]]) -> None:
    try:
        await stop()
    except Exception:
        log.exception("role %s did not stop cleanly", name)


class RequestMetrics:
    """Counts and times requests by route template."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500
        started = time.monotonic()

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, observed)
        finally:
            route = getattr(scope.get("route"), "path", "(none)")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.http_requests.labels(method, route, str(status)).inc()
            self._metrics.http_seconds.labels(route).observe(time.monotonic() - started)


_METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})


class _Server(uvicorn.Server):
    """Ends event streams and long polls before it waits for open requests to finish, and says where it listens."""

    def __init__(self, config: uvicorn.Config, events: EventBus, ready: Callable[[str], None] | None) -> None:
        super().__init__(config)
        self._events = events
        self._ready = ready

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            log.info("listening on %s", url)
            if self._ready is not None:
                self._ready(url)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self._events.close()
        await super().shutdown(sockets=sockets)


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """The server raises the signal that stopped it once more when it is done; a stop that was asked for is a success,
    so that one is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def configure_logging(level: str) -> None:
    """Plain lines on stderr: time, level, logger, message."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def serve(
    settings: Settings, *, ready: Callable[[str], None] | None = None, launch_worker: Launcher = start_process
) -> None:
    """Run the daemon until SIGINT or SIGTERM. `ready` is called with the base URL once it listens.

    Raises StartError (or the role's own DteError) when it cannot start.
    """
    configure_logging(settings.log_level)
    app = create_app(settings, launch_worker=launch_worker)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout_s)),
    )
    server = _Server(config, app.state.node.events, ready)
    try:
        with _quiet_signals():
            server.run()
    except SystemExit as e:
        raise StartError(
            f"cannot listen on {settings.host}:{settings.port}.", remedy="Is another daemon running? Set DTE_PORT."
        ) from e
    if not server.started:
        error = app.state.start_error
        if isinstance(error, DteError):
            raise error
        raise StartError("the daemon could not start.", remedy="The log says why.") from error
