"""The app factory. The lifespan opens everything that has a lifetime; the module holds no state."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import anyio
import structlog
from fastapi import FastAPI
from pydantic.warnings import UnsupportedFieldAttributeWarning
from starlette.middleware import Middleware

from rollout_service import __version__
from rollout_service.base.errors import ConfigurationError, describe, root_cause
from rollout_service.base.shutdown import Shutdown
from rollout_service.http import problems
from rollout_service.http.access_log import AccessLogMiddleware
from rollout_service.http.allowed_hosts import AllowedHosts, HostMiddleware
from rollout_service.http.drain import ShutdownMiddleware
from rollout_service.http.keyring import Keyring
from rollout_service.live.serving.app import SessionCalls
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.server.api import openapi
from rollout_service.server.api.middleware import (
    BearerAuthMiddleware,
    BodyLimitMiddleware,
    JsonBodyMiddleware,
    PathPrefixMiddleware,
    RequestMetricsMiddleware,
)
from rollout_service.server.api.routes import (
    backends,
    environments,
    events,
    hangs,
    health,
    lists,
    nodes,
    overview,
    prorl,
    rollouts,
    runs,
    sandboxes,
    sessions,
    trajectories,
)
from rollout_service.server.dashboard import routes as dashboard
from rollout_service.server.lifecycle import open_service
from rollout_service.settings import Settings
from sandboxes.extras import extra_hint

MODULES = (
    health,
    rollouts,
    runs,
    lists,
    backends,
    environments,
    sandboxes,
    nodes,
    events,
    hangs,
    prorl,
    sessions,
    overview,
    trajectories,
)
"""In the order of matching: probes first, since matching is a large part of their cost."""

# FastAPI silences this warning of pydantic's for parameters, but not for wire models, which it builds with the first
# request.
warnings.filterwarnings("ignore", "The 'alias' attribute", UnsupportedFieldAttributeWarning)

log = structlog.get_logger(__name__)


def create_app(settings: Settings, shutdown: Shutdown | None = None, metrics: Metrics | None = None) -> FastAPI:
    """Return the service as an ASGI app, which drains once the shutdown begins."""
    metrics = metrics or Metrics()
    hosts = AllowedHosts(settings.allowed_hosts, bound=settings.host, keyed=settings.is_keyed)
    keyring = Keyring(settings.keys, settings.keys_file, reloaded=metrics.count_key_reload)
    ending = shutdown or Shutdown(settings.pipeline.drain_seconds)
    serving_e2b = _import_e2b() if settings.e2b.enabled else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        is_started = False
        try:
            with anyio.CancelScope() as scope:
                async with AsyncExitStack() as stack:
                    with ending.starting(scope):
                        service = await stack.enter_async_context(open_service(settings, metrics, ending))
                        if serving_e2b is not None:
                            observe = metrics.count_refused_connection
                            e2b = serving_e2b(settings, service.node, keyring, lambda: ending.begun, observe)
                            await stack.enter_async_context(e2b)
                    app.state.service, is_started = service, True
                    await stack.enter_async_context(keyring.watching())
                    async with _draining(ending, service.pipeline):
                        yield
            if not is_started:
                ending.refuse()
        except Exception as error:
            app.state.failure = root_cause(error)
            if is_started:
                _report_failure(error)
                ending.begin("a part of the service failed", failed=True)
            raise
        finally:
            ending.end()

    app = FastAPI(
        title="Rollout service",
        version=__version__,
        summary="Agentic rollouts for any RL trainer",
        lifespan=lifespan,
        openapi_url=None,  # `openapi.install` serves it, with a page that works offline
        generate_unique_id_function=lambda route: route.name,
        middleware=[
            Middleware(PathPrefixMiddleware, prefix=settings.path_prefix),
            Middleware(AccessLogMiddleware),
            Middleware(RequestMetricsMiddleware, metrics=metrics),
            Middleware(ShutdownMiddleware, shutdown=ending),
            Middleware(HostMiddleware, hosts=hosts),
            Middleware(BearerAuthMiddleware, keyring=keyring),
            Middleware(SessionCalls),
            Middleware(JsonBodyMiddleware),
            Middleware(
                BodyLimitMiddleware,
                max_bytes=settings.max_body_bytes,
                max_bytes_in_flight=settings.http.max_bytes_in_flight,
            ),
        ],
    )
    app.state.failure = None
    app.state.metrics = metrics
    app.state.shutdown = ending
    problems.install(app)
    for module in MODULES:
        app.include_router(module.router)
    app.state.routes = [route for module in MODULES for route in module.router.routes]
    openapi.install(app, keyed=settings.is_keyed, prefix=settings.path_prefix)
    dashboard.install(app)
    return app


def _import_e2b() -> Callable[..., AbstractAsyncContextManager[None]]:
    """Import this before the service starts: it takes so long that the event loop would be found blocked."""
    try:
        from rollout_service.server.e2b.app import serving_e2b
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            f"e2b.enabled is set, but {missing.name} is not installed", hint=f"{extra_hint('e2b')}."
        ) from missing
    return serving_e2b


@asynccontextmanager
async def _draining(shutdown: Shutdown, pipeline: Pipeline) -> AsyncIterator[None]:
    """Drain once the shutdown begins; a part that fails inside the block begins it."""

    async def drain() -> None:
        await shutdown.wait()
        log.info("shutting down", reason=shutdown.reason, rollouts=pipeline.live())
        await shutdown.drain(pipeline.drain)
        shutdown.end()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        try:
            yield
        except anyio.get_cancelled_exc_class():
            shutdown.begin("a part of the service failed", failed=True)
            raise
        finally:
            tasks.cancel_scope.cancel()


def _report_failure(error: Exception) -> None:
    cause = root_cause(error)
    info = describe(cause)
    log.error(
        "a part of the service failed; shutting down",
        code=info.code,
        error=info.message,
        hint=info.hint,
        exc_info=cause if info.code == "internal_error" else None,
    )
