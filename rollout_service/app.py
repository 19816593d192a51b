"""The app factory. Everything with a lifetime is opened in the lifespan; the module holds no state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware

from rollout_service import __version__, problems
from rollout_service.errors import known_cause
from rollout_service.hosts import AllowedHosts
from rollout_service.middleware import BearerKeys, BodyLimit, CountRequests, HostCheck, JsonBodies
from rollout_service.openapi import pages
from rollout_service.routes import backends, environments, events, health, prorl, rollouts, runs, sandboxes
from rollout_service.service import open_service
from rollout_service.settings import Settings
from rollout_service.telemetry import Metrics

MODULES = (rollouts, runs, backends, environments, sandboxes, events, health, prorl)


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI app; it starts working when its lifespan starts."""
    metrics = Metrics()
    hosts = AllowedHosts(settings.allowed_hosts, bound=settings.host, keyed=bool(settings.keys))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                app.state.service = await stack.enter_async_context(open_service(settings, metrics))
            except Exception as error:
                app.state.failure = known_cause(error)
                raise
            yield

    app = FastAPI(
        title="Rollout service",
        version=__version__,
        summary="Agentic rollouts for any RL trainer",
        lifespan=lifespan,
        openapi_url=None,  # `pages` serves it, and a page that works offline
        generate_unique_id_function=lambda route: route.name,
        middleware=[
            Middleware(CountRequests, metrics=metrics),
            Middleware(HostCheck, hosts=hosts),
            Middleware(BearerKeys, keys=settings.keys),
            Middleware(JsonBodies),
            Middleware(BodyLimit, max_bytes=settings.max_body_bytes),
        ],
    )
    app.state.failure = None
    app.state.metrics = metrics
    problems.install(app)
    for module in MODULES:
        app.include_router(module.router)
    app.state.routes = [route for module in MODULES for route in module.router.routes]
    pages.install(app, keyed=bool(settings.keys))
    return app
