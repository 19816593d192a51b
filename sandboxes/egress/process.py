"""The process that runs the proxies of one service, so sandbox traffic takes none of the service's time.

It gives up root once it has loaded. It ends when the service's end of its socket closes, even if the service was
killed.
"""

import asyncio
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import anyio
import structlog

from sandboxes.egress.messages import PACKET_BYTES, EgressCounts, ProxyRequest, encode_answer
from sandboxes.egress.proxy import EgressProxy, resolve
from sandboxes.egress.rules import AllowList, normalize_host
from sandboxes.limits.cgroups import raise_open_files


@dataclass(slots=True)
class RunningProxy:
    proxy: EgressProxy
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self, listening: socket.socket) -> None:
        try:
            with self.scope:
                await self.proxy.serve(listening)
        finally:
            self.ended.set()

    async def close(self) -> None:
        self.scope.cancel()
        await self.ended.wait()


class ProxySet:
    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[str, RunningProxy] = {}

    async def answer(self, request: ProxyRequest, descriptors: list[int]) -> EgressCounts | None:
        """Return None if this process has no descriptor left for the socket of one more proxy."""
        if request.act == "open":
            if not descriptors:
                return None
            proxy = EgressProxy(request.sandbox, AllowList(request.allowed), private=request.private)
            one = self._running[request.sandbox] = RunningProxy(proxy)
            self._tasks.start_soon(one.serve, socket.socket(fileno=descriptors[0]))
            return proxy.counts
        if request.act == "counts":
            total = EgressCounts()
            for one in self._running.values():
                total.add(one.proxy.counts)
            return total
        found = self._running.pop(request.sandbox, None)
        if found is None:
            return EgressCounts()
        await found.close()
        return found.proxy.counts


LOOKUP_THREADS = 256
"""asyncio's own number, 6 with two processors, would let one slow name server take the network from all sandboxes."""


async def serve(channel: socket.socket, user: int, group: int) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(LOOKUP_THREADS, "lookup"))
    await load_everything()
    drop_root(user, group)
    async with anyio.create_task_group() as tasks:
        proxies = ProxySet(tasks)
        while True:
            await anyio.wait_readable(channel)
            packet, descriptors, _, _ = socket.recv_fds(channel, PACKET_BYTES, 1)
            if not packet:
                tasks.cancel_scope.cancel()
                return
            channel.send(encode_answer(await proxies.answer(ProxyRequest.decode(packet), descriptors)))


async def load_everything() -> None:
    """Serve one request of our own, because modules that load on demand may be unreadable without root."""
    normalize_host("ü.example")
    await resolve("localhost", 80)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        port = server.getsockname()[1]
        proxy = EgressProxy("", AllowList([f"127.0.0.1:{port}"]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proxy.serve, listening)
            async with await anyio.connect_tcp(*listening.getsockname()) as client:
                await client.send(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                await client.receive()
            tasks.cancel_scope.cancel()


def drop_root(user: int, group: int) -> None:
    """Do nothing if this process is not root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)


def configure_logging() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def main() -> None:
    """Run `python -m sandboxes.egress.process USER GROUP`, with the channel as standard input."""
    user, group = map(int, sys.argv[1:])
    configure_logging()
    raise_open_files()
    with socket.socket(fileno=0) as channel:
        channel.setblocking(False)
        anyio.run(serve, channel, user, group)


if __name__ == "__main__":
    main()
