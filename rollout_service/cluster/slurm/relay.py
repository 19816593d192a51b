"""A tunnel from this machine, such as a login node, to whichever node of a job answers.

It listens on loopback alone; every new connection finds a node that accepts it; a connection that breaks ends alone, so
the tunnel outlives the death of nodes and the requeue of the job.
"""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import urlsplit

import anyio
import anyio.abc

from rollout_service.base.errors import ConfigurationError
from rollout_service.cluster.slurm.folder import JobFolder

CONNECT_SECONDS = 5.0
_BROKEN = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, RuntimeError)
"""The other end is gone; uvloop raises RuntimeError if it has closed the socket already."""


async def relay(folder: JobFolder, port: int, listening: anyio.Event | None = None) -> None:
    """
    Raises:
        ConfigurationError: The port is taken.
    """

    async def handle(near: anyio.abc.SocketStream) -> None:
        async with near:
            far = await _connect(folder)
            if far is None:
                return
            async with far, anyio.create_task_group() as tasks:
                tasks.start_soon(_copy, near, far, tasks.cancel_scope)
                tasks.start_soon(_copy, far, near, tasks.cancel_scope)

    try:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    except OSError as error:
        raise ConfigurationError(
            f"port {port} cannot be used: {error.strerror}", hint="Choose another with --port."
        ) from None
    async with listener:
        if listening is not None:
            listening.set()
        await listener.serve(handle)


async def _connect(folder: JobFolder) -> anyio.abc.SocketStream | None:
    with suppress(OSError):  # a shared file system may fail for a moment
        for node in folder.published("nodes"):
            parts = urlsplit(node.url)
            with suppress(OSError, TimeoutError), anyio.fail_after(CONNECT_SECONDS):
                return await anyio.connect_tcp(parts.hostname or "", parts.port or 80)
    return None


async def _copy(source: anyio.abc.SocketStream, target: anyio.abc.SocketStream, both: anyio.CancelScope) -> None:
    """Copy one direction to its end; if an end is broken, end both directions."""
    try:
        async for data in source:
            await target.send(data)
        await target.send_eof()
    except _BROKEN:
        both.cancel()
