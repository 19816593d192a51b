"""Serves the app until it is told to stop; refuses, drains, cancels and closes, in this order."""

from __future__ import annotations

import gc
import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from rollout_service.app import create_app
from rollout_service.errors import ConfigurationError, ServiceError
from rollout_service.http_connections import ConnectionLimits, Connections, descriptor_limit
from rollout_service.http_protocol import RequestLimits
from rollout_service.http_server import Server
from rollout_service.settings import Settings
from rollout_service.telemetry import Metrics, configure_logging
from sandboxes.errors import SandboxError

CONNECTIONS_GRACE_SECONDS = 3
GC_YOUNG_OBJECTS = 50_000
"""Allocations between collections. The default of 700 collects several times in a turn of an agent. Each one walks
through the prompts that engines work on at the moment, which stops every rollout for milliseconds."""
THREAD_SECONDS = 0.0005
"""For how long a thread that computes, as one that renders a long prompt, may hold up the event loop each time that it
wakes. The default of 5 ms is several times what all of a turn takes."""


def serve(settings: Settings, *, port_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT; writes `http://HOST:PORT` to `port_file` once it listens.

    Raises ConfigurationError when the address cannot be bound. Where the service itself cannot start, the log
    says why and the process ends with exit code 3.
    """
    configure_logging(settings.log_format, settings.log_level)
    _settle_garbage_collector()
    sys.setswitchinterval(THREAD_SECONDS)
    app = create_app(settings)
    config = uvicorn.Config(
        PlainStartup(app),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=CONNECTIONS_GRACE_SECONDS,
        timeout_keep_alive=settings.http.keep_alive_seconds,
        lifespan="on",
        ws="none",
    )
    with _bind(settings) as listener:
        if port_file is not None:
            _announce(listener, settings.host, port_file)
        _server(settings, config, listener, app.state.metrics).run()


def _server(settings: Settings, config: uvicorn.Config, listener: socket.socket, metrics: Metrics) -> Server:
    http = settings.http
    connections = Connections(ConnectionLimits.within(descriptor_limit(), http.max_connections))
    metrics.watch_connections(connections.counts)
    limits = RequestLimits(
        max_head_bytes=http.max_head_bytes,
        head_seconds=http.head_seconds,
        body_seconds=http.body_seconds,
        write_seconds=http.write_seconds,
    )
    observe = metrics.refused_connection
    return Server(config, listener, connections=connections, limits=limits, observe=observe)


class PlainStartup:
    """The app, which says why it does not start in a sentence; only a defect is worth a traceback."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def plain(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and (why := _why(self._app)):
                message["message"] = why
            await send(message)

        await self._app(scope, receive, plain if scope["type"] == "lifespan" else send)


def _why(app: FastAPI) -> str:
    failure: ServiceError | SandboxError | None = app.state.failure
    return f"{failure} {failure.hint}".strip() if failure else ""


def _settle_garbage_collector() -> None:
    """Leave what the imports made, hundreds of thousands of objects that never die, out of every collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG_OBJECTS)


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2_048)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            hint="Choose another port with --port, or end what listens there.",
        ) from error


def _announce(listener: socket.socket, host: str, port_file: Path) -> None:
    """Write the address whole or not at all: a reader may look at any moment."""
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}"
    draft = port_file.with_name(f"{port_file.name}.draft")
    draft.write_text(address)
    draft.replace(port_file)
