"""Serves the gateway, or another API beside the service's own, on a listening socket, in this process's event loop.

Once the block is left, the socket and every connection are closed. Peers without a key cannot keep those with one out.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import uvicorn
from starlette.types import ASGIApp

from rollout_service.base.errors import ConfigurationError
from rollout_service.http.connections import ConnectionLimits, Connections
from rollout_service.http.protocol import Observe, RequestLimits
from rollout_service.http.server import Server
from sandboxes.task_groups import open_task_group

GRACE_SECONDS = 1
"""For answers to end once their sessions have."""
KEEP_ALIVE_SECONDS = 75
"""Between two calls; clients work on a task in between."""
HEAD_SECONDS = 10.0


class GatewayServer(Server):
    """Leaves the signals to the API."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, section: str) -> socket.socket:
    """Listen for an API; `section` of the settings has its address.

    Raises:
        ConfigurationError: The address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2_048)
    except OSError as error:
        raise ConfigurationError(
            f"the {section} cannot listen on {host}:{port}: {error.strerror}",
            hint=f"Choose another `host` or `port` in `[{section}]`, or stop the program that listens there.",
        ) from error


def address_of(listener: socket.socket, host: str) -> str:
    """Return the URL at which programs reach the listener."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - not bound here
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    limits: ConnectionLimits,
    requests: RequestLimits,
    observe: Observe,
) -> AsyncIterator[None]:
    """Close the socket at the end of the block; `observe` is called for refused connections."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        lifespan="off",
        ws="none",
    )
    server = GatewayServer(config, listener, connections=Connections(limits), limits=requests, observe=observe)

    async def serve() -> None:
        with anyio.CancelScope(shield=True):
            await server.serve(sockets=[])

    with listener:
        async with open_task_group() as tasks:  # what the block raises reaches its caller as it is
            tasks.start_soon(serve)
            try:
                yield
            finally:
                server.should_exit = True
