"""Large files are downloaded whole, compressed or not, or not at all."""

import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.client import HTTPConnection

import anyio
import anyio.to_thread
import httpx
import pytest
import zstandard
from anyio.abc import SocketStream

from api_schemas.runs import BINARY_MEDIA_TYPE, COMPRESSED_MEDIA_TYPE, DECODED_LENGTH
from rollout_client._download import LargeBody
from tests.support.waiting import until


@asynccontextmanager
async def answering(answer: bytes, *, hang: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Yield the URL of a server that sends `answer` on each connection, and a list of what it received.

    The server then closes the connection; with `hang`, it waits for the client to do so.
    """
    asked: list[bytes] = []

    async def handle(stream: SocketStream) -> None:
        async with stream:
            asked.append(await stream.receive())
            await stream.send(answer)
            if hang:
                asked.append(await read_end(stream))

    async def read_end(stream: SocketStream) -> bytes:
        try:
            return await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return b"gone"

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}", asked
        tasks.cancel_scope.cancel()


async def fetch(url: str, *, seconds: float = 10.0) -> tuple[httpx.Response, bytearray]:
    body = LargeBody()
    headers = {"authorization": "Bearer k", "accept-encoding": "gzip", "accept": BINARY_MEDIA_TYPE}
    request = httpx.Request("POST", f"{url}/lease?key=1", headers=headers)
    response = await body.fetch(request, connect_seconds=5.0, seconds=seconds, context=httpx.create_ssl_context())
    return response, body.content


def http(status: str, body: bytes, length: int | None, **headers: str) -> bytes:
    """Return an answer; underscores in the names of headers stand for hyphens."""
    announced = {} if length is None else {"content-length": str(length)}
    fields = {"server": "one"} | announced | headers
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def chunked(content: bytes) -> bytes:
    """Return the content in chunks of HTTP."""
    pieces = [content[start : start + 3000] for start in range(0, len(content), 3000)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


BODY = bytes(range(250)) * 1_200
pack = zstandard.ZstdCompressor().compress
FRAMES = pack(BODY[:1000]) + pack(b"") + pack(BODY[1000:])
ZSTD = {"content_type": COMPRESSED_MEDIA_TYPE, DECODED_LENGTH: str(len(BODY))}
CHUNKED = {"transfer_encoding": "chunked"}


@pytest.mark.parametrize(
    "answer",
    [
        http("200 OK", BODY, len(BODY)),
        http("200 OK", BODY, None),
        http("200 OK", FRAMES, len(FRAMES), **ZSTD),
        http("200 OK", FRAMES, None, **ZSTD),
        http("200 OK", chunked(FRAMES), None, **ZSTD, **CHUNKED),
    ],
    ids=["of known length", "to the end", "zstd of known length", "zstd to the end", "zstd in chunks"],
)
async def test_a_body_arrives_complete(answer):
    async with answering(answer) as (url, asked):
        response, content = await fetch(url)
        assert (response.status_code, response.headers["server"]) == (200, "one")
        assert content == BODY
        assert asked[0].startswith(b"POST /lease?key=1 HTTP/1.1\r\n")
        assert b"Bearer k" in asked[0]
        assert f"accept: {COMPRESSED_MEDIA_TYPE}, {BINARY_MEDIA_TYPE}\r\n".encode() in asked[0]
        assert b"gzip" not in asked[0]


async def test_nothing_and_failures():
    async with answering(http("204 No Content", b"", None)) as (url, _):
        response, content = await fetch(url)
        assert (response.status_code, content) == (204, b"")
    async with answering(http("410 Gone", b'{"a": 1}', 8)) as (url, _):
        response, _ = await fetch(url)
        assert (response.status_code, response.json()) == (410, {"a": 1})


@pytest.mark.parametrize(
    "answer",
    [
        http("200 OK", b"half", 8),
        b"",
        b"nonsense\r\n\r\n",
        http("200 OK", FRAMES[:-1], None, **ZSTD),
        http("200 OK", pack(BODY[:1000]), None, **ZSTD),
        http("200 OK", FRAMES + pack(b"more"), None, **ZSTD),
        http("200 OK", b"not a frame of zstd", None, **ZSTD),
        http("200 OK", chunked(FRAMES)[:-20], None, **ZSTD, **CHUNKED),
        http("200 OK", FRAMES, None, content_type=COMPRESSED_MEDIA_TYPE),
    ],
    ids=[
        "cut",
        "nothing",
        "nonsense",
        "cut frame",
        "frames missing",
        "more",
        "damaged",
        "cut chunk",
        "unknown length",
    ],
)
async def test_a_broken_response_is_a_transport_error(answer):
    async with answering(answer) as (url, _):
        with pytest.raises(httpx.TransportError):
            await fetch(url)


async def test_a_silent_server_is_given_up():
    async with answering(http("200 OK", b"half", 8), hang=True) as (url, _):
        with pytest.raises(httpx.ReadTimeout):
            await fetch(url, seconds=0.05)
    with pytest.raises(httpx.TransportError):
        await fetch("http://127.0.0.1:1")


@pytest.mark.parametrize("headers", [{}, {"connection": "close"}], ids=["kept alive", "closing"])
async def test_a_call_that_is_cancelled_closes_its_connection(headers):
    async with answering(http("200 OK", b"half", 8, **headers), hang=True) as (url, asked):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch, url)
            await until(lambda: asked)
            tasks.cancel_scope.cancel()
        await until(lambda: asked[1:] == [b"gone"], 5)


async def test_a_call_that_is_cancelled_while_it_connects_sends_nothing(monkeypatch):
    begun, cancelled = threading.Event(), threading.Event()
    connect = HTTPConnection.connect

    def connect_late(connection: HTTPConnection) -> None:
        begun.set()
        cancelled.wait(20)
        connect(connection)

    monkeypatch.setattr(HTTPConnection, "connect", connect_late)
    with socket.create_server(("127.0.0.1", 0)) as server, anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch, f"http://127.0.0.1:{server.getsockname()[1]}")
            await anyio.to_thread.run_sync(begun.wait, 20)
            tasks.cancel_scope.cancel()
        cancelled.set()
        ours, _ = await anyio.to_thread.run_sync(server.accept)
        with ours:
            assert await anyio.to_thread.run_sync(ours.recv, 100) == b""
