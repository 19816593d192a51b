"""The service's side of the proxies: one process for all sandboxes, started with the first that needs one."""

import os
import socket
import subprocess
import sys
from typing import NamedTuple, Self

import anyio

from sandboxes.egress.messages import PACKET_BYTES, EgressCounts, ProxyRequest, decode_answer
from sandboxes.egress.rules import AllowList
from sandboxes.errors import SandboxClosedError, SandboxStartError
from sandboxes.host.children import LingeringChildren, end_process
from sandboxes.host.processes import MARKER

ANSWER_SECONDS = 20.0
"""Long enough for the process to load before its first answer."""
GRACE = 2.0
MOST_SOCKETS = 2
"""One for the proxy and one for the sandbox's owner."""
ENV = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LOCALDOMAIN", "RES_OPTIONS")
"""The variables that Python and the resolver use. The process gets no others of the service's, such as its keys."""


class ProxyOwner(NamedTuple):
    service: str
    """The prefix of its sandboxes' ids, by which the guard finds the process if it hangs."""

    user: int
    """The process switches to it if this one is root."""

    group: int


class SocketHandover:
    """A socket pair over which a launcher hands over sockets of the sandbox's network."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)

    @property
    def descriptor(self) -> int:
        return self._theirs.fileno()

    def close_remote_end(self) -> None:
        """Close the launcher's end, once it has it, so that this process sees the launcher end."""
        self._theirs.close()

    async def receive(self) -> list[socket.socket]:
        """Return the sockets, or none if the launcher ended without sending them."""
        await anyio.wait_readable(self._ours)
        _, descriptors, _, _ = socket.recv_fds(self._ours, 64, MOST_SOCKETS)
        return [socket.socket(fileno=descriptor) for descriptor in descriptors]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._theirs.close()


class EgressHost:
    def __init__(self, lingering: LingeringChildren | None = None) -> None:
        """`lingering` keeps a process that outlives its kill."""
        self._lingering = LingeringChildren() if lingering is None else lingering
        self._lock = anyio.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ended = EgressCounts()
        self._open: set[str] = set()
        self._closed = False

    async def open(
        self,
        sandbox: str,
        allowed: AllowList,
        private: bool,
        listening: socket.socket,
        owner: ProxyOwner,
    ) -> None:
        """Serve a sandbox from a socket in its network, which is closed here.

        Raises:
            SandboxClosedError: `aclose` was called.
            SandboxStartError: The process of the proxies does not answer, or can serve no more.
        """
        with listening:
            request = ProxyRequest("open", sandbox, allowed.entries, private)
            async with self._lock:
                if self._closed:  # while this waited
                    raise SandboxClosedError("the provider has been closed")
                if self._channel is None:
                    await self._start(owner)
                if await self._ask(request, [listening.fileno()]) is None:
                    raise SandboxStartError(
                        "the process of the egress proxies does not answer, or has no descriptor left",
                        hint="see its lines in the service's log; raise the hard limit on open files",
                    )
                self._open.add(sandbox)

    def serves(self, sandbox: str) -> bool:
        """Return whether a sandbox's proxy runs, as far as is known without asking."""
        return sandbox in self._open and self.process is not None and self.process.poll() is None

    async def close(self, sandbox: str) -> EgressCounts:
        """Return the proxy's counts, which are zero if there was none."""
        async with self._lock:
            if sandbox not in self._open:
                return EgressCounts()
            self._open.discard(sandbox)
            counts = await self._ask(ProxyRequest("close", sandbox)) or EgressCounts()
            self._ended.add(counts)
        return counts

    async def counts(self) -> EgressCounts:
        """Count all proxies since the service began."""
        total = EgressCounts()
        async with self._lock:
            total.add(self._ended)
            if self._open:
                total.add(await self._ask(ProxyRequest("counts")) or EgressCounts())
        return total

    async def aclose(self) -> None:
        """End the process, after a request under way. Idempotent."""
        self._closed = True
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        self._hang_up()
        process, self.process = self.process, None
        if process is not None and not await end_process(process, grace=GRACE, kill_wait=GRACE):
            self._lingering.keep(process)

    async def _start(self, owner: ProxyOwner) -> None:
        await self._end()  # collects a process that ended by itself
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs:
            self.process = _spawn(theirs, owner)

    async def _ask(self, request: ProxyRequest, descriptors: list[int] | None = None) -> EgressCounts | None:
        """Return the answer, or None if there is none. Cancellation cannot separate request and answer."""
        packet = b""
        with anyio.move_on_after(ANSWER_SECONDS, shield=True):
            try:
                if self._channel is not None:
                    socket.send_fds(self._channel, [request.encode()], descriptors or [])
                    await anyio.wait_readable(self._channel)
                    packet = self._channel.recv(PACKET_BYTES)
            except OSError:
                packet = b""
        if not packet:
            self._hang_up()
            return None
        return decode_answer(packet)

    def _hang_up(self) -> None:
        """Close the channel; the process ends when it notices, and its proxies with it."""
        self._open.clear()
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _spawn(channel: socket.socket, owner: ProxyOwner) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sandboxes.egress.process", str(owner.user), str(owner.group)]
    return subprocess.Popen(
        command,
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        env={name: os.environ[name] for name in ENV if name in os.environ} | {MARKER: f"{owner.service}-egress"},
        start_new_session=True,
    )
