"""Serves the app until it is told to stop; refuses, drains, cancels and closes, in this order."""

from __future__ import annotations

import gc
import socket
from pathlib import Path

import uvicorn

from rollout_service.app import create_app
from rollout_service.errors import ConfigurationError
from rollout_service.settings import Settings
from rollout_service.telemetry import configure_logging

CONNECTIONS_GRACE_SECONDS = 3
GC_YOUNG_OBJECTS = 20_000
"""Allocations between collections. The default of 700 collects several times in a turn of an agent."""


def serve(settings: Settings, *, port_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT; writes `http://HOST:PORT` to `port_file` once it listens.

    Raises ConfigurationError when the address cannot be bound.
    """
    configure_logging(settings.log_format, settings.log_level)
    _settle_garbage_collector()
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=CONNECTIONS_GRACE_SECONDS,
        lifespan="on",
    )
    with _bind(settings) as listener:
        if port_file is not None:
            _announce(listener, settings.host, port_file)
        server = uvicorn.Server(config)
        server.run(sockets=[listener])
        if not server.started:
            raise ConfigurationError("the service did not start; the log above says why")


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
