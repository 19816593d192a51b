"""A large answer arrives whole and in one piece, or raises an error that the client's calls handle."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
from anyio.abc import SocketStream

from rollout_client._download import LargeBody


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
    headers = {"authorization": "Bearer k", "accept-encoding": "gzip"}
    request = httpx.Request("POST", f"{url}/lease?key=1", headers=headers)
    response = await body.fetch(
        request, connect_seconds=5.0, seconds=seconds, context=httpx.create_ssl_context()
    )
    return response, body.content


def http(status: str, body: bytes, length: int | None) -> bytes:
    announced = b"" if length is None else b"Content-Length: %d\r\n" % length
    return b"HTTP/1.1 " + status.encode() + b"\r\nContent-Type: a/b\r\n" + announced + b"\r\n" + body


@pytest.mark.parametrize("length", [300_000, None])
async def test_a_body_arrives_complete(length):
    async with answering(http("200 OK", bytes(range(250)) * 1_200, length)) as (url, asked):
        response, content = await fetch(url)
        assert (response.status_code, response.headers["content-type"]) == (200, "a/b")
        assert content == bytes(range(250)) * 1_200
        assert asked[0].startswith(b"POST /lease?key=1 HTTP/1.1\r\n")
        assert b"Bearer k" in asked[0]
        assert b"gzip" not in asked[0]


async def test_nothing_and_failures():
    async with answering(http("204 No Content", b"", None)) as (url, _):
        response, content = await fetch(url)
        assert (response.status_code, content) == (204, b"")
    async with answering(http("410 Gone", b'{"a": 1}', 8)) as (url, _):
        response, _ = await fetch(url)
        assert (response.status_code, response.json()) == (410, {"a": 1})


@pytest.mark.parametrize("answer", [http("200 OK", b"half", 8), b"", b"nonsense\r\n\r\n"])
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


async def test_a_call_that_is_cancelled_closes_its_connection():
    async with answering(http("200 OK", b"half", 8), hang=True) as (url, asked):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch, url)
            while not asked:
                await anyio.sleep(0.005)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            while asked[1:] != [b"gone"]:
                await anyio.sleep(0.005)
