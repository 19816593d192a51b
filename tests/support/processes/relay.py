"""A relay between a client and a server, for tests that cut connections between them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream

END_OF_HEAD = b"\r\n\r\n"


class Relay:
    """Passes bytes on in both directions until it is cut."""

    def __init__(self, target: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.body_began = anyio.Event()
        """An event that is set once a part of an answer's body has been passed on."""
        self._target = urlsplit(target)
        self._up = True
        self._connections: set[anyio.CancelScope] = set()

    def cut(self) -> None:
        """Cut all connections, and every new one, until `mend` is called."""
        self._up = False
        for scope in self._connections:
            scope.cancel()

    def mend(self) -> None:
        """Relay new connections again."""
        self._up = True

    async def handle(self, near: SocketStream) -> None:
        """Relay one connection."""
        async with near:
            if not self._up:
                return
            assert self._target.hostname is not None
            assert self._target.port is not None
            async with await anyio.connect_tcp(self._target.hostname, self._target.port) as far:
                await self._relay(near, far)

    async def _relay(self, near: SocketStream, far: SocketStream) -> None:
        async with anyio.create_task_group() as tasks:
            self._connections.add(tasks.cancel_scope)
            tasks.start_soon(self._send_on, near, far)
            await self._answer(far, near)
            tasks.cancel_scope.cancel()
        self._connections.discard(tasks.cancel_scope)

    async def _send_on(self, source: SocketStream, target: SocketStream) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for piece in source:
                await target.send(piece)

    async def _answer(self, far: SocketStream, near: SocketStream) -> None:
        passed = b""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for piece in far:
                await near.send(piece)
                passed += piece
                if passed.partition(END_OF_HEAD)[2]:
                    self.body_began.set()


@asynccontextmanager
async def relay_to(target: str) -> AsyncIterator[Relay]:
    """Relay connections to the server at this URL for as long as the block lasts."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    async with listener, anyio.create_task_group() as tasks:
        relay = Relay(target, listener.extra(SocketAttribute.local_port))
        tasks.start_soon(listener.serve, relay.handle)
        yield relay
        tasks.cancel_scope.cancel()
