"""The HTTP server withstands slow, greedy and faulty peers over real connections."""

import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio
import pytest
import uvicorn
from anyio.abc import SocketStream
from starlette.types import Receive, Scope, Send

from rollout_service.http.connections import ConnectionLimits, Connections, find_slot
from rollout_service.http.protocol import RequestLimits
from rollout_service.http.server import Server
from tests.support.api.server import make_certificate
from tests.support.waiting import until

KEY = b"opens"
GET = b"GET %s HTTP/1.1\r\nHost: here\r\n%s\r\n"
WITH_KEY = b"Authorization: " + KEY + b"\r\n"
PATIENCE = 20.0
QUICK = RequestLimits(head_seconds=0.3, body_seconds=0.3, write_seconds=0.3, max_head_bytes=4_096)


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


class Bench:
    """A server of a small app, and the names of the events that it reported."""

    def __init__(self, server: Server, port: int, connections: Connections, noted: list[str]) -> None:
        self.server = server
        self.port = port
        self.connections = connections
        self.noted = noted
        self.bodies: list[bytes] = []

    async def connect(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def send(self, data: bytes) -> bytes:
        """Send data and return everything that the server answers until it closes the connection."""
        async with await self.connect() as stream:
            with anyio.fail_after(PATIENCE):
                with suppress(anyio.BrokenResourceError):
                    await stream.send(data)
                return await rest_of(stream)


async def rest_of(stream: Any) -> bytes:
    answer = b""
    with suppress(anyio.BrokenResourceError):
        async for piece in stream:
            answer += piece
    return answer


async def until_closed(stream: SocketStream, data: bytes) -> None:
    """Send data repeatedly until the server closes the connection."""
    with anyio.fail_after(PATIENCE), suppress(anyio.BrokenResourceError, anyio.EndOfStream):
        while True:
            await stream.send(data)
            with anyio.move_on_after(0.05):
                await stream.receive()


async def until_answered(stream: Any, end: bytes = b"done") -> bytes:
    answer = b""
    with anyio.fail_after(PATIENCE):
        while end not in answer:
            answer += await stream.receive()
    return answer


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `/wait` after a second, `/large` with more than any buffer holds, and the rest with the body's length."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    headers = dict(scope["headers"])
    slot = find_slot(scope)
    assert slot is not None
    if headers.get(b"authorization") == KEY:
        assert slot.admit()
    more, body = True, b""
    while more and scope["path"] != "/unread":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    if scope["path"] == "/wait":
        await anyio.sleep(1)
    size = 64 << 20 if scope["path"] == "/large" else 0
    text = b"%d %d done" % (len(body), len(scope["headers"]))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": text + bytes(size)})


@asynccontextmanager
async def serving(
    limits: RequestLimits = QUICK, *, admitted: int = 100, pending: int = 100, **options: Any
) -> AsyncIterator[Bench]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2_048)
    connections = Connections(ConnectionLimits(admitted=admitted, pending=pending))
    noted: list[str] = []
    options = {"log_config": None, "timeout_graceful_shutdown": 2, "ws": "none"} | options
    config = uvicorn.Config(app, **options)
    server = Server(config, listener, connections=connections, limits=limits, observe=noted.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve, [])
        bench = Bench(server, listener.getsockname()[1], connections, noted)
        await until(lambda: server.started)
        yield bench
        server.should_exit = True


def refusal(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"application/problem+json" in head
    assert b"connection: close" in head
    problem = json.loads(body)
    assert problem["status"] == status
    return str(problem["detail"])


@pytest.mark.parametrize(
    "head",
    [
        b"Host: here\r\n" + b"a: b\r\n" * 500_000,
        b"Host: here\r\na: " + b"b" * 3_000_000,
        b"Host: here\r\n" + b"a" * 3_000_000,
        b"Host: here\r\n" + b"".join(b"a%d: %s\r\n" % (i, b"b" * 100) for i in range(90)),
    ],
    ids=["many", "long value", "long name", "large together"],
)
async def test_a_head_over_the_limit_is_a_431(head):
    async with serving() as bench:
        refusal(await bench.send(b"GET / HTTP/1.1\r\n" + head), 431)
        refusal(await bench.send(b"GET /" + b"x" * 1_000_000), 431)
        assert bench.noted == ["request_header_fields_too_large"] * 2
        assert b"0 1 done" in await bench.send(GET % (b"/", b"") + b"GET")


async def test_five_hundred_half_heads_are_closed_in_time():
    async with serving(pending=1_000) as bench:
        async with anyio.create_task_group() as peers:
            for head in [b"", b"G", b"GET / HTTP/1.1\r\nHost: he", b"GET / HTTP/1.1\r\nHost: here\r\n"] * 125:
                peers.start_soon(bench.send, head)
        assert bench.noted == ["request_timeout"] * 500
        await until(lambda: not bench.server.server_state.connections)
        assert bench.connections.counts() == {"pending": 0, "idle": 0, "busy": 0}


async def test_a_server_too_busy_to_open_a_connection_in_time_blames_no_handshake():
    async with serving(replace(QUICK, head_seconds=0.0)) as bench:
        await bench.send(b"")
        assert bench.noted == ["request_timeout"]


@pytest.mark.parametrize("drip", [b"\r\n", b"x", b"a: b\r\n"])
async def test_a_head_that_drips_has_one_deadline(drip):
    async with serving() as bench, await bench.connect() as stream:
        await stream.send(GET % (b"/", b""))
        await until_answered(stream)
        await stream.send(b"" if drip == b"\r\n" else b"GET / HTTP/1.1\r\nHost: here\r\n")
        await until_closed(stream, drip)
        assert bench.noted == ["request_timeout"]


@pytest.mark.parametrize("start", [b"Content-Length: 1000\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_body_that_never_arrives_is_a_408(start):
    async with serving() as bench:
        body = b"" if b"chunked" not in start else b"5\r\nhello\r\n"
        refusal(await bench.send(b"POST / HTTP/1.1\r\nHost: here\r\n" + start + b"\r\n" + body), 408)


async def test_a_large_body_gets_the_time_that_it_needs():
    size = 3 * 16_384
    async with serving() as bench, await bench.connect() as stream:
        await stream.send(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % size)
        for _ in range(3):
            await stream.send(bytes(16_384))
            await anyio.sleep(0.2)
        assert b"%d 3 done" % size in await rest_of(stream)


async def test_the_wait_for_an_unread_body_is_bounded():
    async with serving() as bench, await bench.connect() as stream:
        await stream.send(b"POST /unread HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000000\r\n\r\n")
        await until_answered(stream)
        await until_closed(stream, bytes(100_000))


@pytest.mark.parametrize(
    "body",
    [
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 100_000,
        b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 2_000_000,
        b"Transfer-Encoding: chunked\r\n\r\n0\r\na: " + b"x" * 2_000_000,
    ],
    ids=["trailers", "extension", "long trailer"],
)
async def test_trailers_and_extensions_of_chunks_count_too(body):
    async with serving() as bench:
        refusal(await bench.send(b"POST / HTTP/1.1\r\nHost: here\r\n" + body), 431)


async def test_an_absolute_target_for_this_host_and_http_1_0_are_answered():
    async with serving() as bench:
        absolute = b"GET http://here/ HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
        assert b"0 2 done" in await bench.send(absolute)
        assert b"0 0 done" in await bench.send(b"GET / HTTP/1.0\r\n\r\n")


async def test_requests_sent_ahead_are_answered_in_order_up_to_a_bound():
    async with serving() as bench:
        answer = await bench.send(GET % (b"/", b"") * 20 + GET % (b"/", b"Connection: close\r\n"))
        assert answer.count(b"done") == 21
        await bench.send(GET % (b"/wait", b"") * 5_000)
        assert bench.noted == ["malformed_request"]


async def test_a_long_poll_outlasts_every_deadline():
    async with serving() as bench:
        assert b"done" in await bench.send(GET % (b"/wait", b"Connection: close\r\n"))
        assert bench.noted == []


async def test_a_peer_that_leaves_its_answer_unread_is_closed_and_a_slow_one_is_not():
    async with serving() as bench, await bench.connect() as unread, await bench.connect() as slow:
        await unread.send(GET % (b"/large", b""))
        await slow.send(GET % (b"/large", b"Connection: close\r\n"))
        size = 0
        with anyio.fail_after(60):
            while size < 64 << 20:
                size += len(await slow.receive(1 << 20))
                if size % (4 << 20) < 1 << 16:
                    await anyio.sleep(0.02)
            await until(lambda: "write_timeout" in bench.noted)
        assert bench.noted == ["write_timeout"]


async def test_an_idle_connection_is_closed():
    async with serving(timeout_keep_alive=1) as bench, await bench.connect() as stream:
        await stream.send(GET % (b"/", WITH_KEY))
        await until_answered(stream)
        assert bench.connections.counts() == {"pending": 0, "idle": 1, "busy": 0}
        with anyio.fail_after(PATIENCE):
            assert await rest_of(stream) == b""
        assert bench.connections.counts()["idle"] == 0


async def test_a_flood_without_a_key_displaces_itself_and_not_busy_clients():
    async with serving(RequestLimits(), pending=20) as bench, await bench.connect() as worker:
        await worker.send(GET % (b"/wait", WITH_KEY))
        await until(lambda: bench.connections.counts()["busy"] == 1)
        flood = [await bench.connect() for _ in range(100)]
        await until(lambda: bench.noted.count("too_many_unauthenticated") == 80)
        async with await bench.connect() as newcomer:
            await newcomer.send(GET % (b"/", WITH_KEY))
            assert b"done" in await until_answered(newcomer)
        assert b"done" in await until_answered(worker)
        for stream in flood:
            await stream.aclose()


async def test_an_idle_connection_makes_room_for_a_busy_one():
    async with serving(RequestLimits(), admitted=1) as bench, await bench.connect() as idle:
        await idle.send(GET % (b"/", WITH_KEY))
        await until_answered(idle)
        async with await bench.connect() as other:
            await other.send(GET % (b"/", WITH_KEY))
            await until_answered(other)
        assert await rest_of(idle) == b""
        assert bench.noted == ["too_many_connections"]


async def test_the_answer_leaves_at_once():
    """Small writes are sent at once, not joined with later ones, which would cost 40 ms a turn."""
    async with serving() as bench, await bench.connect() as stream:
        await stream.send(GET % (b"/", b""))
        await until_answered(stream)
        (connection,) = bench.server.server_state.connections
        inner = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert inner.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert inner.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_tls_handshakes_have_places_and_a_deadline(tmp_path):
    certificate, key = make_certificate(tmp_path)
    options = {"ssl_certfile": certificate, "ssl_keyfile": key}
    unhurried = replace(
        QUICK, head_seconds=3
    )  # on a busy machine, the first connection would time out before the last one arrived
    async with serving(unhurried, pending=10, **options) as bench:
        silent = [await bench.connect() for _ in range(30)]
        await until(lambda: bench.noted.count("too_many_unauthenticated") == 20)
        context = ssl.create_default_context(cafile=str(certificate))
        tls = await anyio.connect_tcp(
            "127.0.0.1", bench.port, tls=True, ssl_context=context, tls_standard_compatible=False
        )
        async with tls:
            await tls.send(GET % (b"/", WITH_KEY))
            assert b"done" in await until_answered(tls)
            assert bench.connections.counts()["idle"] == 1
        await until(lambda: bench.connections.counts()["pending"] == 0)
        for stream in silent:
            await stream.aclose()
