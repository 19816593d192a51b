"""HTTP from inside a sandbox, whatever its image has: connections are made there, and the service speaks over them.

A bash in the sandbox opens each connection, to the egress proxy or to a server inside, and copies bytes between it and
its pipes; the service speaks HTTP and TLS over them. None is made from the service's own network. The egress proxy
decides on each where the sandbox has a list of hosts. The caller bounds everything that arrives.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpcore
import httpx
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from sandboxes import Network, RunningProgram, Sandbox
from sandboxes.egress.rules import AllowList, normalize_host, parse_address
from sandboxes.runtime.execution import ProgramStream

# "+" says that the connection is open. The main program is the one that reads it, so its end is the end of the tunnel.
CONNECT = """
host=$1 port=$2
if [[ $host == proxy ]]; then
  at=${HTTP_PROXY-}
  at=${at#*://} at=${at%/}
  host=${at%:*} port=${at##*:}
fi
exec 3<>"/dev/tcp/$host/$port" || exit 1
printf +
exec 4<&0
cat <&4 >&3 2>/dev/null &
exec cat <&3
"""
ERROR_CHARS = 300
PORTS = {"http": 80, "https": 443}
HTTP_ERRORS = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)
"""Failures for which another side is to blame."""


class _TunnelStream(ProgramStream):
    """A connection of a sandbox, which ends with its program."""

    def __init__(self, program: RunningProgram, stack: AsyncExitStack) -> None:
        super().__init__(program)
        self._stack = stack

    async def aclose(self) -> None:
        await self._stack.aclose()


class _NetworkStream(httpcore.AsyncNetworkStream):
    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            with anyio.fail_after(timeout):
                return await self._stream.receive(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout("no answer in time") from error
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, ssl.SSLError) as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            with anyio.fail_after(timeout):
                await self._stream.send(buffer)
        except TimeoutError as error:
            raise httpcore.WriteTimeout("the server takes nothing") from error
        except (anyio.BrokenResourceError, ssl.SSLError) as error:
            raise httpcore.WriteError("the connection was closed") from error

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        try:
            with anyio.fail_after(timeout):
                wrapped = await TLSStream.wrap(
                    self._stream,
                    ssl_context=ssl_context,
                    hostname=server_hostname,
                    standard_compatible=False,
                    server_side=False,
                )
        except TimeoutError as error:
            await self.aclose()
            raise httpcore.ConnectTimeout("no TLS handshake in time") from error
        except (anyio.BrokenResourceError, anyio.EndOfStream, ssl.SSLError) as error:
            await self.aclose()
            raise httpcore.ConnectError(f"TLS failed: {error}") from error
        return _NetworkStream(wrapped)

    def get_extra_info(self, info: str) -> Any:  # noqa: ARG002  nothing is known of the other side
        return None


class _SandboxNetwork(httpcore.AsyncNetworkBackend):
    """Makes connections from inside a sandbox."""

    def __init__(self, sandbox: Sandbox, *, proxied: bool) -> None:
        self._sandbox = sandbox
        self._proxied = proxied

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,  # noqa: ARG002  the sandbox's own
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        target = "proxy" if self._proxied else host
        stack = AsyncExitStack()
        try:
            with anyio.fail_after(timeout):
                argv = ["bash", "--norc", "-c", CONNECT, "tunnel", target, str(port)]
                program = await stack.enter_async_context(self._sandbox.program(argv, cwd="/"))
                stream = _TunnelStream(program, stack)
                await stream.receive(1)  # the "+"
        except TimeoutError as error:
            await _discard(stack)
            raise httpcore.ConnectTimeout("no connection in time") from error
        except anyio.EndOfStream as error:
            await program.wait()  # then all that it said is there
            said = program.errors().strip().rsplit("\n", 1)[-1]
            await _discard(stack)
            raise httpcore.ConnectError(said[-ERROR_CHARS:] or "no connection") from error
        except BaseException:
            await _discard(stack)
            raise
        return _NetworkStream(stream)


async def _discard(stack: AsyncExitStack) -> None:
    with anyio.CancelScope(shield=True):
        await stack.aclose()


async def connection_pool(sandbox: Sandbox, url: str) -> httpcore.AsyncConnectionPool:
    """Make a pool of connections from inside a sandbox to one server; use it as an async context manager.

    Raises:
        httpcore.UnsupportedProtocol: The address is not one of HTTP.
        httpcore.ConnectError: The sandbox has no network, and the server is not on its own loopback.
    """
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise httpcore.UnsupportedProtocol("it is not an address such as https://example.com/page")
    host, port = normalize_host(parts.hostname), parts.port or PORTS[parts.scheme]
    context = await anyio.to_thread.run_sync(tls_context)
    network = sandbox.spec.network
    local = _is_loopback(host)
    if network == "none" and not local:
        raise httpcore.ConnectError(f"this sandbox has no network, so {host} cannot be reached")
    if isinstance(network, tuple) and (not local or AllowList(network).allows(host, port)):
        # A loopback address on the list is that of the proxy's machine.
        proxy = _SandboxNetwork(sandbox, proxied=True)
        return httpcore.AsyncHTTPProxy("http://egress", ssl_context=context, network_backend=proxy)
    direct = _SandboxNetwork(sandbox, proxied=False)
    return httpcore.AsyncConnectionPool(ssl_context=context, network_backend=direct)


def unreachable(url: str, network: Network) -> str | None:
    """Return the reason, or None if the address can be reached as far as is known."""
    try:
        parts = urlsplit(url)
        host, port = normalize_host(parts.hostname or ""), parts.port or PORTS[parts.scheme]
    except (ValueError, KeyError):
        return "it is not an address such as https://example.com/mcp"
    if network == "full" or _is_loopback(host):
        return None
    if network == "none":
        return "the sandbox has no network"
    return None if AllowList(network).allows(host, port) else f"{host}:{port} is not in the list of hosts"


def _is_loopback(host: str) -> bool:
    """Return whether a host, in its normal form, is the sandbox's own loopback."""
    address = parse_address(host)
    return host == "localhost" if address is None else address.is_loopback


@lru_cache(maxsize=1)
def tls_context() -> ssl.SSLContext:
    """Make one context; the first call reads files, so do it in a thread."""
    return httpx.create_ssl_context()
