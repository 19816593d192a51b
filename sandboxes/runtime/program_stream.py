"""A program in a sandbox as a stream of anyio."""

import anyio
from anyio.abc import ByteStream

from sandboxes.contract import RunningProgram


class ProgramStream(ByteStream):
    """The program ends with its own block, not with the stream."""

    def __init__(self, program: RunningProgram) -> None:
        self._program = program
        self._rest = b""

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        data = self._rest or await self._program.receive()
        if not data:
            raise anyio.EndOfStream
        self._rest = data[max_bytes:]
        return data[:max_bytes]

    async def send(self, item: bytes) -> None:
        if not await self._program.send(item):
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        self._program.close_input()

    async def aclose(self) -> None:
        self._program.close_input()
