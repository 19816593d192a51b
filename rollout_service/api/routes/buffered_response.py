"""An answer whose pieces are made ahead: the next ones are made while one is sent.

Guarantees: no more than `MAX_BUFFERED_CHUNKS` finished pieces wait; nothing is made any more once the client has gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import ObjectSendStream
from fastapi.responses import StreamingResponse
from starlette.types import Send

MAX_BUFFERED_CHUNKS = 2

ProduceChunks = Callable[[Callable[[memoryview], Awaitable[None]]], Awaitable[None]]
"""Makes the pieces of an answer, and gives each to a function that waits until there is room for it."""


class BufferedResponse(StreamingResponse):
    """An answer of known length, in pieces."""

    def __init__(self, make: ProduceChunks, *, length: int, media_type: str) -> None:
        super().__init__((), media_type=media_type, headers={"Content-Length": str(length)})
        self._make = make

    async def stream_response(self, send: Send) -> None:
        """Send the pieces while others are made."""
        sender, receiver = anyio.create_memory_object_stream[memoryview](MAX_BUFFERED_CHUNKS)
        self.body_iterator = receiver
        with sender, receiver:
            async with anyio.create_task_group() as group:
                group.start_soon(self._work, sender)
                await super().stream_response(send)

    async def _work(self, sender: ObjectSendStream[memoryview]) -> None:
        async with sender:
            await self._make(sender.send)
