"""The HTTP server: uvicorn's, with connections that are counted from the moment they are accepted.

Guarantees: a connection has its slot before a byte of it is read, and also during its TLS handshake, which has a
deadline. Running out of descriptors or socket memory delays new connections and breaks nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import anyio
import structlog
import uvicorn

from rollout_service.http.connections import Connections, EvictionReason
from rollout_service.http.protocol import BoundedProtocol, Observe, RequestLimits
from rollout_service.http.tls import Certificate

log = structlog.get_logger(__name__)

ACCEPT_PAUSE_SECONDS = 0.1
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
"""TCP keep-alive options: a peer that vanishes during a long poll is noticed within two minutes."""


class Server(uvicorn.Server):
    """Serves one listening socket."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        *,
        connections: Connections,
        limits: RequestLimits,
        observe: Observe,
        certificate: Certificate | None = None,
    ) -> None:
        """`observe` is called with the reason for each refused connection."""
        super().__init__(config)
        self._listener = listener
        self._connections = connections
        self._limits = limits
        self._observe = observe
        self._certificate = certificate

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [])  # uvicorn accepts nothing by itself

    async def main_loop(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._accept)
            if self._certificate is not None and self.config.ssl is not None:
                tasks.start_soon(self._certificate.follow, self.config.ssl)
            await super().main_loop()
            tasks.cancel_scope.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        async with anyio.create_task_group() as opening:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listener)
                except OSError as error:
                    log.warning("cannot accept a connection", error=error.strerror)
                    await anyio.sleep(ACCEPT_PAUSE_SECONDS)
                else:
                    opening.start_soon(self._open, connection, str(address[0]))

    async def _open(self, connection: socket.socket, address: str) -> None:
        """Hand a connection to a protocol of its own, after the TLS handshake if there is one.

        Only the handshake has a deadline: without TLS the peer owes nothing yet, and any delay is this process's own.
        """
        scope = anyio.CancelScope()
        if self.config.ssl is not None:
            scope.deadline = anyio.current_time() + self._limits.head_seconds

        def evict(reason: EvictionReason) -> None:
            self._observe(reason.value)
            scope.cancel()

        slot = self._connections.add(address, evict)
        protocol = BoundedProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            limits=self._limits,
            slot=slot,
            observe=self._observe,
        )
        try:
            with scope:
                await self._connect(connection, lambda: protocol)
        except OSError as error:  # a failed handshake, or a peer that is gone
            log.debug("connection failed while opening", peer=address, error=str(error))
        if not protocol.opened:
            self._observe("handshake_failed")
            slot.release()
            connection.close()

    async def _connect(self, connection: socket.socket, factory: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        if (context := self.config.ssl) is None:
            await loop.connect_accepted_socket(factory, connection)
            return
        limit = self._limits.head_seconds
        await loop.connect_accepted_socket(
            factory, connection, ssl=context, ssl_handshake_timeout=limit, ssl_shutdown_timeout=limit
        )
