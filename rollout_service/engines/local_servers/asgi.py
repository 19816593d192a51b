"""Serves an ASGI application in a child process, on a port that the kernel may choose, until the parent ends.

Web pages in a browser on this machine cannot use the application; see `allowed_hosts`.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import uvicorn

from rollout_service.http.allowed_hosts import AllowedHosts, HostMiddleware

_GRACE_SECONDS = 2


def serve(
    app: Any,
    host: str,
    port: int,
    *,
    unsafe_get_paths: frozenset[str] = frozenset(),
    port_file: Path | None = None,
    exit_with_parent: bool = False,
) -> None:
    """Serve `app` until SIGTERM or, with `exit_with_parent`, until standard input closes.

    The port is written to `port_file` before the application starts. A GET on one of the `unsafe_get_paths` changes
    something, so these are closed to web pages too.
    """
    listener = bind(host, port)
    if port_file is not None:
        announce_port(listener, port_file)
    hosts = AllowedHosts((), bound=host, keyed=False)
    checked = HostMiddleware(app, hosts, unsafe_get_paths=unsafe_get_paths)
    config = uvicorn.Config(checked, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_SECONDS)
    server = uvicorn.Server(config)
    anyio.run(_serve, server, listener, exit_with_parent, backend_options={"use_uvloop": True})


async def _serve(server: uvicorn.Server, listener: socket.socket, exit_with_parent: bool) -> None:
    async with anyio.create_task_group() as tasks:
        if exit_with_parent:
            tasks.start_soon(_stop_at_end_of_input, server)
        await server.serve(sockets=[listener])
        tasks.cancel_scope.cancel()


async def _stop_at_end_of_input(server: uvicorn.Server) -> None:
    await anyio.to_thread.run_sync(wait_for_end_of_input, abandon_on_cancel=True)
    server.should_exit = True


def wait_for_end_of_input() -> None:
    """Return when standard input closes, which the kernel does when the parent ends for any reason."""
    while os.read(sys.stdin.fileno(), 4096):
        pass


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def announce_port(listener: socket.socket, port_file: Path) -> None:
    """Write the bound port atomically."""
    partial = port_file.with_name(f"{port_file.name}.partial")
    partial.write_text(str(listener.getsockname()[1]))
    partial.replace(port_file)
