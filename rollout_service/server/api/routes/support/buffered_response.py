"""A streaming response that produces its next chunks while one is being sent.

Guarantees: at most `MAX_BUFFERED_CHUNKS` finished chunks wait; production stops once the client has disconnected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import ObjectSendStream
from fastapi.responses import StreamingResponse
from starlette.types import Send

MAX_BUFFERED_CHUNKS = 2

ProduceChunks = Callable[[Callable[[memoryview], Awaitable[None]]], Awaitable[None]]
"""Produces the chunks of a response, and passes each to a function that waits until there is room for it."""


class BufferedResponse(StreamingResponse):
    """A response of known length, in chunks."""

    def __init__(self, produce: ProduceChunks, *, length: int, media_type: str) -> None:
        super().__init__((), media_type=media_type, headers={"Content-Length": str(length)})
        self._produce = produce

    async def stream_response(self, send: Send) -> None:
        """Send chunks while others are produced."""
        sender, receiver = anyio.create_memory_object_stream[memoryview](MAX_BUFFERED_CHUNKS)
        self.body_iterator = receiver
        with sender, receiver:
            async with anyio.create_task_group() as group:
                group.start_soon(self._fill, sender)
                await super().stream_response(send)

    async def _fill(self, sender: ObjectSendStream[memoryview]) -> None:
        async with sender:
            await self._produce(sender.send)


# What streams of server-sent events share.

EVENT_STREAM = "text/event-stream"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that keep proxies from holding events back."""
