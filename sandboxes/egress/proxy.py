"""An HTTP proxy for one sandbox: CONNECT and plain HTTP, to the listed hosts and to nothing else.

Guarantees:
- A host that is not listed is refused before its name is resolved.
- The proxy connects to the very address it checked, so a name that changes its address gains nothing.
- Memory, connections and their rate are bounded, whatever the client does.
- Every refusal says why, and what to do.

It never looks into a tunnel.
"""

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
import h11
import structlog
from anyio.abc import SocketListener, SocketStream

from sandboxes.egress.messages import EgressCounts
from sandboxes.egress.rules import Address, AllowList, normalize_host, parse_address, split_port
from sandboxes.limits.token_bucket import TokenBucket

log = structlog.get_logger(__name__)

HEAD_BYTES = 16 * 1024
CHUNK_BYTES = 64 * 1024
LOGGED_HOSTS = 256
HTTP_PORT = 80
BURST, PER_SECOND = 64, 50
"""Connections accepted at once, and per second in the long run."""
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer", b"upgrade")
)
ACCEPT_PAUSE = 0.5
LOOKUPS = 8
"""Names that are resolved at once. Each takes a thread, of which all sandboxes together have a number."""
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    connections: int = 128
    head_seconds: float = 20.0
    connect_seconds: float = 15.0
    idle_seconds: float = 300.0


class RefusedError(Exception):
    """A refused request; `code` is stable, for counters."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Target(NamedTuple):
    host: str
    port: int
    path: str | None
    """None for a tunnel."""

    @classmethod
    def of(cls, request: h11.Request) -> "Target":
        """
        Raises:
            RefusedError: The request does not name a host in a form that a proxy serves.
        """
        try:
            return cls._parse(request.method == b"CONNECT", request.target.decode("latin-1"))
        except ValueError as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "bad_request", str(error)) from error

    @classmethod
    def _parse(cls, tunnel: bool, text: str) -> "Target":
        if tunnel:
            host, port = split_port(text)
            if port is None:
                raise ValueError("CONNECT needs HOST:PORT")
            return cls(normalize_host(host), port, None)
        parts = urlsplit(text)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError("this is a proxy: give http://HOST/PATH, or CONNECT HOST:PORT")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(normalize_host(parts.hostname), parts.port or HTTP_PORT, path)

    @property
    def authority(self) -> str:
        """The value of a Host header, with a port unless it is HTTP's default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == HTTP_PORT else f"{host}:{self.port}"


async def resolve(host: str, port: int) -> Sequence[str]:
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class EgressProxy:
    def __init__(
        self,
        label: str,
        allowed: AllowList,
        *,
        private: bool = False,
        limits: ProxyLimits | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        """`label` is the sandbox's id, for the log; `private` allows listed names to be private."""
        self._log = log.bind(sandbox=label)
        self._allowed = allowed
        self._private = private
        self._limits = limits or ProxyLimits()
        self._resolve = resolve
        self._logged: set[str] = set()
        self._pace = TokenBucket(BURST, 1 / PER_SECOND)
        self._places = anyio.Semaphore(self._limits.connections)
        self._lookups = anyio.Semaphore(LOOKUPS)
        self.counts = EgressCounts()

    async def serve(self, listening: socket.socket) -> None:
        """Serve until cancelled. Beyond the limit of connections, a client waits until another has ended."""
        listener = await SocketListener.from_socket(listening)
        async with listener, anyio.create_task_group() as tasks:
            while True:
                await self._places.acquire()
                await self._pace.take()
                tasks.start_soon(self._client, await self._accept(listener))

    async def _accept(self, listener: SocketListener) -> SocketStream:
        while True:
            try:
                return await listener.accept()
            except OSError as error:  # no descriptors left: some will be freed
                self._log.warning("egress connection not accepted", error=str(error))
                await anyio.sleep(ACCEPT_PAUSE)

    async def _client(self, client: SocketStream) -> None:
        self.counts.connections += 1
        try:
            async with client:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
                    await self._answer(client)
        except Exception:  # noqa: BLE001  only this connection fails: other sandboxes' proxies go on
            self._log.exception("egress connection failed")
        finally:
            self._places.release()

    async def _answer(self, client: SocketStream) -> None:
        wire = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        request: h11.Request | None = None
        try:
            request = await self._request(client, wire)
            target = Target.of(request)
            server = await self._open(target)
        except RefusedError as refused:
            self._count(refused)
            await client.send(_refusal(wire, refused, has_body=request is None or request.method != b"HEAD"))
            return
        self.counts.allowed += 1
        async with server:
            early = wire.trailing_data[0]
            if target.path is None:
                await client.send(wire.send(h11.Response(status_code=200, headers=[])) or b"")
            else:
                early = _forwarded(request, target, target.path) + early
            if early:
                self.counts.bytes_out += len(early)
                await server.send(early)
            await self._relay(client, server)

    async def _request(self, client: SocketStream, wire: h11.Connection) -> h11.Request:
        try:
            with anyio.fail_after(self._limits.head_seconds):
                while (event := wire.next_event()) is h11.NEED_DATA:
                    wire.receive_data(await client.receive(HEAD_BYTES))
        except TimeoutError:
            raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, "timeout", "no request arrived in time") from None
        except h11.RemoteProtocolError as error:
            status = HTTPStatus(error.error_status_hint)
            raise RefusedError(status, "bad_request", f"the request is malformed: {error}") from error
        if not isinstance(event, h11.Request):
            raise anyio.EndOfStream
        return event

    async def _open(self, target: Target) -> SocketStream:
        """Connect to an address that was checked.

        Raises:
            RefusedError: The list or the address forbids it, or the host does not answer.
        """
        host, port, _ = target
        self._check_name(host, port)
        addresses = await self._addresses(host, port)
        accepted = [one for one in addresses if self._allowed.accepts_address(one, port, private=self._private)]
        if not accepted:
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                "address",
                f"host {host} resolves to {addresses[0]}, which is not public; list that address to allow it",
            )
        with anyio.move_on_after(self._limits.connect_seconds):
            for address in accepted:
                with suppress(OSError):
                    return await anyio.connect_tcp(str(address), port)
        raise RefusedError(HTTPStatus.BAD_GATEWAY, "unreachable", f"host {host}:{port} does not answer")

    def _check_name(self, host: str, port: int) -> None:
        if self._allowed.allows(host, port):
            return
        if self._allowed.has_host(host):
            message = f"port {port} of host {host} is not in the environment's network list: add {host}:{port}"
            raise RefusedError(HTTPStatus.FORBIDDEN, "port", f"{message} to sandbox.network to allow it")
        message = f"host {host} is not in the environment's network list: add it to sandbox.network to allow it"
        raise RefusedError(HTTPStatus.FORBIDDEN, "host", message)

    async def _addresses(self, host: str, port: int) -> list[Address]:
        if (literal := parse_address(host)) is not None:
            return [literal]
        found: Sequence[str] = ()
        with anyio.move_on_after(self._limits.connect_seconds), suppress(OSError, UnicodeError):
            async with self._lookups:
                found = await self._resolve(host, port)
        addresses = [address for text in found if (address := parse_address(text)) is not None]
        if not addresses:
            raise RefusedError(HTTPStatus.BAD_GATEWAY, "unresolved", f"host {host} has no address")
        return addresses

    async def _relay(self, client: SocketStream, server: SocketStream) -> None:
        """Copy both ways until both end, or nothing has arrived for long. A slow reader holds up its writer."""
        async with _idle_limit(self._limits.idle_seconds) as touch:

            def sent(size: int) -> None:
                touch()
                self.counts.bytes_out += size

            def received(size: int) -> None:
                touch()
                self.counts.bytes_in += size

            async with anyio.create_task_group() as ways:
                ways.start_soon(_pump, client, server, sent)
                ways.start_soon(_pump, server, client, received)

    def _count(self, refused: RefusedError) -> None:
        self.counts.refused[refused.code] = self.counts.refused.get(refused.code, 0) + 1
        message = str(refused)
        if message not in self._logged and len(self._logged) < LOGGED_HOSTS:
            self._logged.add(message)
            self._log.info("egress refused", reason=refused.code, detail=message)


async def _pump(source: SocketStream, sink: SocketStream, count: Callable[[int], None]) -> None:
    try:
        async for chunk in source:
            await sink.send(chunk)
            count(len(chunk))
        await sink.send_eof()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        await sink.aclose()  # the other way ends too


@asynccontextmanager
async def _idle_limit(seconds: float) -> AsyncIterator[Callable[[], None]]:
    """Cancel the block if the function that it yields is not called for `seconds`."""
    last = time.monotonic()

    def touch() -> None:
        nonlocal last
        last = time.monotonic()

    async def watch(scope: anyio.CancelScope) -> None:
        while (left := last + seconds - time.monotonic()) > 0:  # noqa: ASYNC110  time is what it waits for
            await anyio.sleep(left)
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, tasks.cancel_scope)
        yield touch
        tasks.cancel_scope.cancel()


def _refusal(wire: h11.Connection, refused: RefusedError, *, has_body: bool) -> bytes:
    """Give the reason in the status line too, which is all that many clients show."""
    message = str(refused)
    body = f"{message}\n".encode()
    headers = [
        ("content-type", "text/plain; charset=utf-8"),
        ("content-length", str(len(body))),
        ("x-egress-refused", refused.code),
        ("connection", "close"),
    ]
    reason = message.encode("ascii", "replace")[:200]
    response = h11.Response(status_code=refused.status, headers=headers, reason=reason)
    parts = [wire.send(response), wire.send(h11.Data(body if has_body else b"")), wire.send(h11.EndOfMessage())]
    return b"".join(part for part in parts if part)


def _forwarded(request: h11.Request, target: Target, path: str) -> bytes:
    """Return the head of a plain request as its server should see it: for one answer and no more."""
    named = {
        name.strip().lower()
        for header, value in request.headers
        if header == b"connection"
        for name in value.split(b",")
    }
    drop = HOP_BY_HOP | named | {b"host"}
    headers = [(name, value) for name, value in request.headers if name not in drop]
    headers += [(b"host", target.authority.encode()), (b"connection", b"close")]
    wire = h11.Connection(h11.CLIENT)
    return wire.send(h11.Request(method=request.method, target=path, headers=headers)) or b""
