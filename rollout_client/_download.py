"""Download a large response body straight into the memory where it stays.

The body is in memory once, and the event loop is free while it arrives; errors are those of the client's other calls; a
cancelled call closes its connection.

httpx copies the bytes that it receives several times on the event loop, which costs more than the network between two
processes of one machine. It is still used through proxies, and with a transport that the caller provides.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec

import anyio
import anyio.to_thread
import httpx

from rollout_client import _wire as wire

_PASSED_ON = frozenset({"authorization", "accept", "user-agent"})
_PIECE = 1 << 20


def accepted(media_type: str) -> str:
    """Ask for compressed batches if they can be read here, which may take a third of the bytes."""
    if media_type != wire.BINARY_MEDIA_TYPE or find_spec("zstandard") is None:
        return media_type
    return f"{wire.COMPRESSED_MEDIA_TYPE}, {media_type}"


class LargeBody:
    def __init__(self) -> None:
        self.content = bytearray()

    async def receive(self, response: httpx.Response) -> None:
        self.content = bytearray(int(response.headers.get("content-length", 0)))
        at = 0
        async for piece in response.aiter_bytes():
            self.content[at : at + len(piece)] = piece
            at += len(piece)
        del self.content[at:]

    async def fetch(
        self, request: httpx.Request, *, connect_seconds: float, seconds: float, context: ssl.SSLContext
    ) -> httpx.Response:
        """Send a request without a body. The returned response has its body only if it is not a success.

        Raises:
            httpx.TransportError: The connection fails or times out.
        """
        fetch = _Fetch(request, connect_seconds=connect_seconds, seconds=seconds, context=context)
        try:
            response, self.content = await anyio.to_thread.run_sync(fetch.send, abandon_on_cancel=True)
        finally:
            fetch.break_off()
        return response


class _Fetch:
    """One request in a thread, over its own connection."""

    def __init__(
        self, request: httpx.Request, *, connect_seconds: float, seconds: float, context: ssl.SSLContext
    ) -> None:
        self._request = request
        self._seconds = seconds
        self._connection = _connection(request.url, connect_seconds, context)
        self._socket: socket.socket | None = None
        self._is_over = False

    def send(self) -> tuple[httpx.Response, bytearray]:
        request = self._request
        headers = {name: value for name, value in request.headers.items() if name in _PASSED_ON}
        headers["accept"] = accepted(headers.get("accept", "*/*"))
        try:
            self._connection.connect()
            self._socket = self._connection.sock  # the connection forgets it if the answer is its last
            if self._is_over:  # the request would lease a batch to nobody
                raise ConnectionAbortedError("the call was cancelled")
            self._socket.settimeout(self._seconds)
            self._connection.request(request.method, request.url.raw_path.decode(), headers=headers)
            with self._connection.getresponse() as answer:
                body = _whole(answer)
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise httpx.NetworkError(f"{type(error).__name__}: {error}") from error
        finally:
            self._connection.close()
        failed = answer.status >= http.client.BAD_REQUEST
        content = bytes(body) if failed else b""
        response = httpx.Response(answer.status, headers=answer.getheaders(), content=content, request=request)
        return response, body

    def break_off(self) -> None:
        """Stop a thread that still waits for the connection, if there is one."""
        self._is_over = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _connection(url: httpx.URL, seconds: float, context: ssl.SSLContext) -> http.client.HTTPConnection:
    if url.scheme == "https":
        return http.client.HTTPSConnection(url.host, url.port, timeout=seconds, context=context)
    return http.client.HTTPConnection(url.host, url.port, timeout=seconds)


def _whole(answer: http.client.HTTPResponse) -> bytearray:
    if answer.getheader("content-type") == wire.COMPRESSED_MEDIA_TYPE:
        return _decompressed(answer)
    if answer.length is None:
        return bytearray(answer.read())
    return _filled(answer.readinto, answer.length)


def _decompressed(answer: http.client.HTTPResponse) -> bytearray:
    """Decompress a body of zstd while the rest arrives."""
    import zstandard

    length = int(answer.getheader(wire.DECODED_LENGTH, ""))
    unpack = zstandard.ZstdDecompressor()
    try:
        with unpack.stream_reader(answer, read_size=_PIECE, read_across_frames=True, closefd=False) as reader:
            body = _filled(reader.readinto, length)
            if reader.read(1):
                raise http.client.HTTPException(f"the body has more than {length} bytes")
    except zstandard.ZstdError as error:
        raise http.client.HTTPException(f"the body cannot be decompressed: {error}") from error
    return body


def _filled(read_into: Callable[[memoryview], int], length: int) -> bytearray:
    body = bytearray(length)
    at = 0
    with memoryview(body) as view:
        while at < length and (count := read_into(view[at:])):
            at += count
    if at < length:
        raise http.client.IncompleteRead(b"", length - at)
    return body
