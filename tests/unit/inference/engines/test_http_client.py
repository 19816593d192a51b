"""A call to an engine gives a whole answer or an error, and a connection is reused only where that is safe."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.abc
import pytest

from rollout_service.engines.kinds import http_client
from rollout_service.engines.kinds.http_client import AnswerTooLargeError, HttpClient
from tests.support.waiting import collect

pytestmark = pytest.mark.anyio

Handler = Callable[[anyio.abc.SocketStream], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers each request on each connection with the same bytes."""

    def __init__(self, answer: bytes, *, then_close: bool = False) -> None:
        self.answer = answer
        self.then_close = then_close
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = anyio.Event()

    async def __call__(self, stream: anyio.abc.SocketStream) -> None:
        """Serve one connection."""
        self.connections += 1
        async with stream:
            try:
                while True:
                    self.requests.append(await stream.receive())
                    for part in self.answer.split(b"|"):
                        await stream.send(part)
                        await anyio.sleep(0.005)
                    if self.then_close:
                        break
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                self.closed.set()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[HttpClient]:
    """Yield a client of a server that handles each connection with `handler`."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handler)
        client = HttpClient(f"http://127.0.0.1:{port}/below")
        with anyio.fail_after(10):
            yield client
        await client.close()
        tasks.cancel_scope.cancel()
    await listener.aclose()


async def ended(client: HttpClient) -> None:
    """Wait until no resting connection can be reused."""
    while any(connection.is_reusable for connection in client._resting):
        await anyio.sleep(0.001)


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    server = Server(OK)
    async with serving(server) as client:
        assert await client.exchange("GET", "/path", None) == (200, b"ok")
        assert await client.exchange("POST", "/path", b"[1]") == (200, b"ok")
    assert server.connections == 1
    assert server.requests[0].startswith(b"GET /below/path HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Content-Length: 3\r\n" in server.requests[1]
    assert server.requests[1].endswith(b"\r\n\r\n[1]")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc|\r\n3\r\ndef\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-|Length: 6\r\n\r\nabc|def",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabcdef",
    ],
    ids=["chunked", "in parts", "after an interim answer"],
)
async def test_an_answer_is_put_together(answer: bytes) -> None:
    async with serving(Server(answer)) as client:
        for _ in range(2):
            assert await client.exchange("GET", "/", None) == (200, b"abcdef")


async def test_an_unsuccessful_answer_is_returned() -> None:
    async with serving(Server(b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n")) as client:
        assert await client.exchange("GET", "/", None) == (302, b"")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut", "before the answer was whole"),
        (b"HTTP/1.1 200 OK\r\n\r\nof no stated length", "before the answer was whole"),
        (b"", "before the answer was whole"),
        (b"220 mail.example.com ESMTP\r\n", "is not HTTP"),
    ],
)
async def test_an_incomplete_answer_is_an_error(answer: bytes, why: str) -> None:
    async with serving(Server(answer, then_close=True)) as client:
        with pytest.raises(OSError, match=why):
            await client.exchange("GET", "/", None)


async def test_an_answer_that_is_larger_than_was_asked_for_is_not_read() -> None:
    body = b"x" * 3_000
    chunk = b"%x\r\n%s\r\n" % (len(body), body)
    for answer in (
        b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n" + body,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk + b"|" + chunk * 1_000,
        b"HTTP/1.1 200 OK\r\n" + b"X-More: y\r\n" * 1_000,
    ):
        server = Server(answer)
        async with serving(server) as client:
            with pytest.raises(AnswerTooLargeError):
                await client.exchange("GET", "/", None, max_bytes=2_000)
            await ended(client)
    async with serving(Server(b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n" + body)) as client:
        assert await client.exchange("GET", "/", None, max_bytes=4_000) == (200, body)
        assert await client.exchange("GET", "/", None, max_bytes=4_000) == (200, body), "counted anew"


@pytest.mark.parametrize(
    ("answer", "then_close"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", False),
        (OK + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong", False),
        (OK + b"HTTP/1.1 200", False),
        (OK + b"|HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong", False),
        (OK, True),
    ],
    ids=["said to end", "two answers", "one and a part", "a second one later", "closed while it rested"],
)
async def test_a_connection_that_is_closed_or_may_hold_something_else_is_not_used_again(
    answer: bytes, then_close: bool
) -> None:
    server = Server(answer, then_close=then_close)
    async with serving(server) as client:
        for _ in range(3):
            assert await client.exchange("GET", "/", None) == (200, b"ok")
            await ended(client)
    assert server.connections == 3


class Hasty:
    """A server that answers the first request of a connection, and closes at the next, after `said`."""

    def __init__(self, said: bytes = b"", *, first: int = 1) -> None:
        self.said = said
        self.first = first
        """Answers requests of only this many connections."""
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, stream: anyio.abc.SocketStream) -> None:
        """Serve one connection."""
        self.connections += 1
        async with stream:
            self.requests.append(await stream.receive())
            if self.connections > self.first:
                return
            await stream.send(OK)
            self.requests.append(await stream.receive())
            if self.said:
                await stream.send(self.said)


async def test_a_request_that_met_the_end_of_a_rested_connection_is_sent_again() -> None:
    server = Hasty(first=9)
    async with serving(server) as client:
        assert await client.exchange("GET", "/", None) == (200, b"ok")
        assert await client.exchange("POST", "/x", b"{}", seconds=5.0) == (200, b"ok")
    assert server.connections == 2
    assert server.requests[1] == server.requests[2], "the same request, whole"


@pytest.mark.parametrize(
    ("server", "connections"),
    [(Hasty(b"HTTP/1.1 200 OK\r\n", first=9), 1), (Hasty(first=1), 2), (Hasty(first=0), 1)],
    ids=["a byte came", "also the new one ends", "it is new"],
)
async def test_no_request_is_sent_more_than_twice_or_once_an_answer_began(server: Hasty, connections: int) -> None:
    async def ask(client: HttpClient) -> None:
        for _ in range(2):
            await client.exchange("GET", "/", None)

    async with serving(server) as client:
        with pytest.raises(ConnectionError):
            await ask(client)
    assert server.connections == connections


async def test_a_call_on_a_rested_connection_is_not_sent_again_by_a_client_that_is_closed() -> None:
    server = Stalling()
    async with serving(server) as client, anyio.create_task_group() as tasks:
        assert await client.exchange("GET", "/", None) == (200, b"ok")

        async def close() -> None:
            await server.asked_again.wait()
            await client.close()

        tasks.start_soon(close)
        with pytest.raises(ConnectionError):
            await client.exchange("GET", "/", None)
    assert server.connections == 1


class Stalling:
    """A server that answers the first request of a connection, and never the second."""

    def __init__(self) -> None:
        self.connections = 0
        self.asked_again = anyio.Event()

    async def __call__(self, stream: anyio.abc.SocketStream) -> None:
        """Serve one connection."""
        self.connections += 1
        async with stream:
            await stream.receive()
            await stream.send(OK)
            await stream.receive()
            self.asked_again.set()
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.receive()


async def test_a_connection_that_has_rested_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "REST_SECONDS", 0.0)
    server = Server(OK)
    async with serving(server) as client:
        for _ in range(2):
            assert await client.exchange("GET", "/", None) == (200, b"ok")
            await anyio.sleep(0.001)
        await server.closed.wait()
    assert server.connections == 2


async def test_calls_at_once_have_connections_of_their_own() -> None:
    server = Server(OK)
    answers: list[tuple[int, bytes]] = []
    async with serving(server) as client:
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(collect, answers, lambda: client.exchange("GET", "/", None))
    assert answers == [(200, b"ok")] * 10
    assert server.connections == 5


class Silent:
    """Reads a request and never answers."""

    def __init__(self) -> None:
        self.asked, self.left = anyio.Event(), anyio.Event()

    async def __call__(self, stream: anyio.abc.SocketStream) -> None:
        """Serve one connection."""
        async with stream:
            await stream.receive()
            self.asked.set()
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
            self.left.set()


async def test_the_engine_sees_that_a_call_was_cancelled() -> None:
    server = Silent()
    async with serving(server) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.exchange, "GET", "/", None)
        await server.asked.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await server.left.wait()


async def test_a_call_that_is_open_fails_when_the_client_is_closed() -> None:
    server = Silent()
    async with serving(server) as client, anyio.create_task_group() as tasks:

        async def close() -> None:
            await server.asked.wait()
            await client.close()

        tasks.start_soon(close)
        with pytest.raises(ConnectionError):
            await client.exchange("GET", "/", None)


@pytest.mark.parametrize("host", [".l8", "a..b", "x" * 64])
async def test_a_name_that_no_host_can_have_is_an_error(host: str) -> None:
    client = HttpClient(f"http://{host}")
    with pytest.raises(OSError, match=r"name|known|resolution|service"):
        await client.exchange("GET", "/", None)
    await client.close()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True}), ("asyncio", {})], ids=str)
async def test_a_connection_that_comes_too_late_holds_up_no_close(
    anyio_backend: tuple[str, dict[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 0
    async with serving(Server(OK)) as server:
        for step in range(40):
            monkeypatch.setattr(http_client, "CONNECT_SECONDS", step * 0.00002)
            client = HttpClient(f"http://{server._host}:{server._port}")
            try:
                await client.exchange("GET", "/", None)
            except TimeoutError:
                late += 1
                assert not client._open
            with anyio.fail_after(http_client.CLOSE_SECONDS / 2):
                await client.close()
    assert late


@pytest.mark.slow
async def test_closing_waits_for_connections_only_so_long() -> None:
    client = HttpClient("http://127.0.0.1:1")
    client._open.add(
        http_client._Connection(asyncio.get_running_loop(), client._open)
    )  # never established and never lost
    with anyio.fail_after(3 * http_client.CLOSE_SECONDS):
        await client.close()
    assert not client._open


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_events_are_passed_on_as_they_arrive() -> None:
    events: list[bytes] = []
    halves = chunk(b"data: 1\n\nda") + b"|" + chunk(b"ta: 2\n\n") + b"|" + b"0\r\n\r\n"
    async with serving(Server(CHUNKED + halves)) as client:
        for _ in range(2):
            assert await client.exchange("POST", "/", b"{}", on_event=events.append) == (200, b"")
    assert events == [b"1", b"2"] * 2


async def test_an_error_is_returned_whole_where_events_were_expected() -> None:
    server = Server(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\ndata: x\n\n")
    async with serving(server) as client:
        assert await client.exchange("GET", "/", None, on_event=pytest.fail) == (400, b"data: x\n\n")


async def test_a_stream_that_is_cut_off_is_an_error_after_its_events() -> None:
    events: list[bytes] = []
    async with serving(Server(CHUNKED + chunk(b"data: 1\n\n"), then_close=True)) as client:
        with pytest.raises(OSError, match="before the answer was whole"):
            await client.exchange("GET", "/", None, on_event=events.append)
    assert events == [b"1"]


async def test_one_event_may_not_exceed_the_limit_but_all_together_may() -> None:
    events: list[bytes] = []
    small = b"|".join(chunk(b"data: %s\n\n" % (b"x" * 400)) for _ in range(20))
    async with serving(Server(CHUNKED + small + b"0\r\n\r\n")) as client:
        await client.exchange("GET", "/", None, max_bytes=1_000, on_event=events.append)
    assert len(events) == 20
    endless = CHUNKED + b"|".join(chunk(b"data: " + b"x" * 400) for _ in range(20))
    async with serving(Server(endless)) as client:
        with pytest.raises(AnswerTooLargeError):
            await client.exchange("GET", "/", None, max_bytes=1_000, on_event=events.append)
    assert len(events) == 20


async def test_what_the_receiver_raises_ends_the_exchange() -> None:
    def refuse(event: bytes) -> None:
        raise ValueError(event.decode())

    server = Server(CHUNKED + b"|".join(chunk(b"data: %d\n\n" % i) for i in range(9)))
    async with serving(server) as client:
        with pytest.raises(ValueError, match="0"):
            await client.exchange("GET", "/", None, on_event=refuse)
        with anyio.fail_after(5):
            await server.closed.wait()


async def test_nothing_is_passed_on_after_the_call_has_ended() -> None:
    events: list[bytes] = []
    server = Server(CHUNKED + b"|".join(chunk(b"data: %d\n\n" % i) for i in range(50)))
    async with serving(server) as client:
        with anyio.move_on_after(5) as scope:

            def note(event: bytes) -> None:
                events.append(event)
                if len(events) == 3:
                    scope.cancel()

            await client.exchange("GET", "/", None, on_event=note)
        seen = len(events)
        with anyio.fail_after(5):
            await server.closed.wait()
    assert 3 <= seen == len(events) < 50
