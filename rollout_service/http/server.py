"""The HTTP server: uvicorn's, with connections that are counted from the moment they are accepted.

A connection has its slot before a byte of it is read, and also during its TLS handshake, which has a deadline. Running
out of descriptors or socket memory delays new connections and breaks nothing.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import ssl
from base64 import b64decode
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import structlog
import uvicorn

from rollout_service.base.errors import ConfigurationError
from rollout_service.http.connections import Connections, EvictionReason
from rollout_service.http.keyring import FileVersion, file_version
from rollout_service.http.protocol import BoundedProtocol, Observe, RequestLimits

log = structlog.get_logger(__name__)

POLL_SECONDS = 10.0


class Certificate:
    def __init__(
        self,
        certificate: Path,
        key: Path | None,
        password: str | None,
        *,
        reloaded: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Check the files. Later, an unusable certificate changes nothing and is logged; connections keep theirs.

        `reloaded` is called after each later reading with whether it succeeded.

        Raises:
            ConfigurationError: The files cannot be used.
        """
        self._certificate = certificate.expanduser()
        self._key = key.expanduser() if key is not None else None
        self._password = password
        self._reloaded = reloaded
        self.expires_at = math.nan
        """The Unix time when the certificate in use expires; NaN if it cannot be read."""
        self._version = self._file_versions()
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def options(self) -> dict[str, Any]:
        return {
            "ssl_certfile": self._certificate,
            "ssl_keyfile": self._key,
            "ssl_keyfile_password": self._password,
        }

    async def follow(self, context: ssl.SSLContext) -> None:
        """Use a renewed certificate for new connections."""
        while True:
            await anyio.sleep(POLL_SECONDS)
            version = await anyio.to_thread.run_sync(self._file_versions)
            if version == self._version:
                continue
            self._version = version
            try:
                self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a failure leaves a context without a key
                self._load(context)
            except ConfigurationError as error:
                log.error("new certificate is invalid; keeping the previous one", error=str(error))
                self._reloaded(False)
            else:
                self._reloaded(True)
                log.info("certificate reloaded", file=str(self._certificate))

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self._certificate, self._key, password=self._password or "")
            self.expires_at = expiry(self._certificate.read_bytes())
        except OSError as error:  # SSLError is one
            files = f"{self._certificate} and {self._key}" if self._key else str(self._certificate)
            why = getattr(error, "reason", None) or error.strerror or str(error)
            raise ConfigurationError(
                f"cannot use {files} for TLS: {why}",
                hint="Set `tls_certificate` to a PEM file with the chain, and `tls_key` to one with its private key.",
            ) from None

    def _file_versions(self) -> list[FileVersion | None]:
        return [file_version(path) for path in (self._certificate, self._key) if path is not None]


_FIRST_PEM = re.compile(rb"-----BEGIN (?:X509 )?CERTIFICATE-----(.*?)-----END", re.DOTALL)
_DER_VERSION, _DER_LONG_YEAR = 0xA0, 0x18
"""Tags of fields: the version of a certificate, which may be left out, and a time with a year of four digits."""


def expiry(pem: bytes) -> float:
    """Return the Unix time when the first certificate of a PEM file expires; NaN if it cannot be read.

    Python's `ssl` tells it only of a peer's certificate.
    """
    found = _FIRST_PEM.search(pem)
    try:
        [(_, certificate)] = _der_fields(b64decode(found[1] if found else b""))
        signed = [content for tag, content in _der_fields(next(_der_fields(certificate))[1]) if tag != _DER_VERSION]
        _serial, _algorithm, _issuer, validity, *_ = signed
        _, (tag, until) = _der_fields(validity)
        form = "%Y%m%d%H%M%S%z" if tag == _DER_LONG_YEAR else "%y%m%d%H%M%S%z"
        return datetime.strptime(until.decode(), form).timestamp()
    except (ValueError, IndexError, StopIteration):
        return math.nan


def _der_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tags and contents of the fields of a sequence in DER."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length >= 0x80:  # the length of the length
            length, at = int.from_bytes(data[at : at + length - 0x80]), at + length - 0x80
        yield tag, data[at : at + length]
        at += length


ACCEPT_PAUSE_SECONDS = 0.1
TICK_SECONDS = 1.0
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
"""A peer that vanishes during a long poll is noticed within two minutes."""


class Server(uvicorn.Server):
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()

    @property
    def should_exit(self) -> bool:
        """May be set from any thread, and in a signal handler."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopped.set)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [])  # uvicorn accepts nothing by itself

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def main_loop(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._accept)
            if self._certificate is not None and self.config.ssl is not None:
                tasks.start_soon(self._certificate.follow, self.config.ssl)
            await self._until_stopped()
            tasks.cancel_scope.cancel()
        self._listener.close()

    async def _until_stopped(self) -> None:
        """Tick once a second; uvicorn's own loop ticks ten times as often."""
        while not await self.on_tick(0):  # renews the date of the responses
            with anyio.move_on_after(TICK_SECONDS):
                await self._stopped.wait()

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
        """Hand a connection to its own protocol, after the TLS handshake if there is one.

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
        if scope.cancel_called and protocol.opened:
            protocol.transport.abort()
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
            with anyio.CancelScope(shield=True):  # it takes no time, and uvloop would not tell the protocol of its end
                await loop.connect_accepted_socket(factory, connection)
            return
        limit = self._limits.head_seconds
        await loop.connect_accepted_socket(
            factory, connection, ssl=context, ssl_handshake_timeout=limit, ssl_shutdown_timeout=limit
        )
