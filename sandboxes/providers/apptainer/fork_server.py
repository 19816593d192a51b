"""The service's side of the process that launchers are forked from, which is started with the first of them.

Starting Python took two thirds of the processor time of a launch.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import anyio

from sandboxes.errors import SandboxClosedError, SandboxStartError
from sandboxes.host.children import ForkedChild, LingeringChildren, end_process
from sandboxes.host.kernel_calls import alone
from sandboxes.host.processes import MARKER
from sandboxes.providers.apptainer.launch.fork_server import ANSWER_BYTES, LaunchRequest
from sandboxes.providers.apptainer.launcher import PATH

ANSWER_SECONDS = 20.0
"""Long enough for the process to load before its first answer."""
GRACE = 2.0
TRIES = 2
"""A process that was killed is replaced at the next launch."""


class ForkServer:
    """Starts one launcher at a time."""

    def __init__(self, lingering: LingeringChildren) -> None:
        """`lingering` keeps a process that outlives its kill."""
        self._lingering = lingering
        self._lock = anyio.Lock(fast_acquire=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False

    async def launch(
        self, arguments: Sequence[str], env: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> ForkedChild:
        """Start a launcher with the variables `env` only; `descriptors` are by their number in it. The caller shields
        it from cancellation, since answers come in order.

        Raises:
            OSError: No process can be started.
            SandboxClosedError: The fork server has been closed.
            SandboxStartError: The process that it is forked from does not answer.
        """
        sandbox = env[MARKER]
        request = LaunchRequest(
            sandbox=sandbox, arguments=list(arguments), environ=dict(env), descriptors=list(descriptors)
        )
        message = json.dumps(request).encode()
        async with self._lock:
            for _ in range(TRIES):
                if self._closed:  # while this waited
                    raise SandboxClosedError("the provider has been closed")
                channel = self._channel or await self._start(sandbox.partition("-")[0])
                answer = await self._ask(channel, message, list(descriptors.values()))
                if answer is not None:
                    break
                await self._end()
            else:
                raise SandboxStartError(
                    "the process that launchers are forked from does not answer",
                    hint="see its lines in the service's log; the next start tries a new process",
                )
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return ForkedChild(answer)

    async def _ask(self, channel: socket.socket, message: bytes, descriptors: list[int]) -> int | None:
        """Return the answer, or None if the process has ended and left no launcher."""
        answer = b""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            socket.send_fds(channel, [message], descriptors)
            with anyio.move_on_after(ANSWER_SECONDS) as patience:
                await anyio.wait_readable(channel)
            if patience.cancelled_caught and self._process is not None:
                self._process.kill()  # the channel then ends, but for a launcher that is about to answer
                with anyio.move_on_after(GRACE):
                    await anyio.wait_readable(channel)
            answer = channel.recv(ANSWER_BYTES)
        return int.from_bytes(answer, sys.byteorder, signed=True) if answer else None

    async def _start(self, service: str) -> socket.socket:
        await self._end()
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        self._channel = channel
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220  it takes no time
                [*alone("sandboxes.providers.apptainer.launch.fork_server"), MARKER],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # No shorter than the name of a sandbox, which takes its place in a launcher.
                env={"PATH": PATH, MARKER: f"{service}-fork-server"},
                cwd="/",
                start_new_session=True,
            )
        return channel

    async def close(self) -> None:
        """End the process, but no launcher, after a launch under way. Idempotent."""
        self._closed = True
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        process, self._process = self._process, None
        if process is not None and not await end_process(process, grace=GRACE, kill_wait=GRACE):
            self._lingering.keep(process)
