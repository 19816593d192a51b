"""Serves the app until a signal or a failed part stops it; then refuses, drains, cancels, and closes, in this order.

The log says where the service listens, with which settings, and finally why it ended. The process ends within 3 s after
the drain: with exit code 4 if a part failed, and by the signal if one stopped it.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from rollout_service import __version__
from rollout_service.base.errors import ConfigurationError, ServiceError, find_known_error
from rollout_service.base.shutdown import Shutdown
from rollout_service.http.connections import ConnectionLimits, Connections, descriptor_limit
from rollout_service.http.drain import FAILED, DrainingServer
from rollout_service.http.protocol import RequestLimits
from rollout_service.http.server import Certificate
from rollout_service.observability.telemetry.logging import configure_logging
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.server.api.app import create_app
from rollout_service.settings import Settings
from sandboxes.errors import SandboxError

log = structlog.get_logger(__name__)

CONNECTIONS_GRACE_SECONDS = 1
GC_YOUNG_OBJECTS = 50_000
"""Allocations between garbage collections. The default of 700 collects several times in an agent's turn; each time
walks through the prompts in flight and stops every rollout for milliseconds."""
THREAD_SECONDS = 0.0005
"""How long a computing thread, such as one that renders a long prompt, may hold up the event loop each time it wakes.
The default of 5 ms is several times as long as a turn."""


def serve(settings: Settings, *, explain: Callable[[Exception], None], port_file: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT, and write the URL to `port_file` once the server listens.

    Returns the exit code; after a signal, the process ends by that signal. If the service cannot start, the process
    ends with exit code 3 after `explain` has said why; only a bug is worth the traceback in the log.

    Raises:
        ConfigurationError: The address cannot be bound, or the certificate cannot be used.
    """
    configure_logging(settings.log_format, settings.log_level)
    _settle_garbage_collector()
    sys.setswitchinterval(THREAD_SECONDS)
    os.environ.pop("ROLLOUT_KEYS", None)  # child processes must not inherit them
    shutdown = Shutdown(settings.pipeline.drain_seconds)
    metrics = Metrics()
    certificate = load_certificate(settings, metrics)
    with _bind(settings) as listener:
        app = create_app(settings.model_copy(update={"port": listener.getsockname()[1]}), shutdown, metrics)
        config = uvicorn.Config(
            QuietFailures(app),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=CONNECTIONS_GRACE_SECONDS,
            timeout_keep_alive=settings.http.keep_alive_seconds,
            lifespan="on",
            ws="none",
            **(certificate.options() if certificate else {}),
        )
        address = _address(listener, settings.host, "https" if certificate else "http")
        if port_file is not None:
            _announce(address, port_file)
        options = _connections(settings, metrics) | {"certificate": certificate}
        on_start = partial(_log_start, settings, address)
        server = DrainingServer(config, listener, **options, shutdown=shutdown, on_start=on_start)
        return _run(server, shutdown, partial(_explain_start, app, explain))


def load_certificate(settings: Settings, metrics: Metrics) -> Certificate | None:
    if settings.tls_certificate is None:
        return None
    password = settings.tls_key_password.get_secret_value() if settings.tls_key_password else None
    certificate = Certificate(settings.tls_certificate, settings.tls_key, password, reloaded=metrics.note_certificate)
    metrics.watch_certificate(lambda: certificate.expires_at)
    return certificate


def _connections(settings: Settings, metrics: Metrics) -> dict[str, Any]:
    http = settings.http
    connections = Connections(ConnectionLimits.within(descriptor_limit(), http.max_connections))
    metrics.watch_connections(connections.counts)
    limits = RequestLimits(
        max_head_bytes=http.max_head_bytes,
        head_seconds=http.head_seconds,
        body_seconds=http.body_seconds,
        write_seconds=http.write_seconds,
    )
    return {"connections": connections, "limits": limits, "observe": metrics.count_refused_connection}


def _run(server: DrainingServer, shutdown: Shutdown, explain_start: Callable[[], None]) -> int:
    try:
        server.run()
    except SystemExit:
        if server.signal is None:  # otherwise it was stopped while it started, as it should be
            explain_start()
            raise
    log.info("stopped", reason=shutdown.reason, seconds=round(shutdown.seconds, 2))
    if shutdown.failed:
        return FAILED
    if server.signal is not None:
        signal.raise_signal(server.signal)
    return 0


def _log_start(settings: Settings, address: str) -> None:
    engines = [str(backend.url) for backend in settings.backends]
    log.info(
        "listening",
        address=address,
        version=__version__,
        pid=os.getpid(),
        settings_file=str(settings.file.absolute()) if settings.file else None,
        state_dir=str(settings.state_dir.expanduser()),
        engine=engines or settings.engine.value,
        sandbox=settings.sandbox.provider,
        needs_key=settings.is_keyed,
    )


class QuietFailures:
    """Keeps uvicorn from logging tracebacks of known reasons not to start, and what the log has already."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def quiet(message: Message) -> None:
            is_known = message["type"] == "lifespan.startup.failed" and _known_failure(self._app)
            if is_known or message["type"] == "lifespan.shutdown.failed":
                message["message"] = ""
            await send(message)

        await self._app(scope, receive, quiet if scope["type"] == "lifespan" else send)


def _known_failure(app: FastAPI) -> ServiceError | SandboxError | None:
    return find_known_error(app.state.failure) if app.state.failure else None


def _explain_start(app: FastAPI, explain: Callable[[Exception], None]) -> None:
    if failure := _known_failure(app):
        explain(failure)


def _settle_garbage_collector() -> None:
    """Exclude the objects of imports, hundreds of thousands that are never freed, from every collection."""
    gc.freeze()
    gc.set_threshold(GC_YOUNG_OBJECTS)
    gc.enable()


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2_048)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            hint="Choose another port with --port, or stop the program that listens there.",
        ) from error


def _address(listener: socket.socket, host: str, scheme: str) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{listener.getsockname()[1]}"


def _announce(address: str, port_file: Path) -> None:
    """Write the address atomically, since a reader may look at any moment."""
    draft = port_file.with_name(f"{port_file.name}.draft")
    draft.write_text(address)
    draft.replace(port_file)
