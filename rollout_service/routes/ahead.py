"""An answer whose pieces are made ahead: some threads' work is done while the piece before it is sent.

Guarantees: no more than `PIECES_AHEAD` finished pieces wait; nothing is made any more once the client has gone.
"""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import anyio.to_thread
from anyio.abc import ObjectSendStream
from fastapi.responses import StreamingResponse
from starlette.types import Send

PIECES_AHEAD = 2
_END = memoryview(b"")


class AheadResponse(StreamingResponse):
    """An answer of known length; its pieces, none of them empty, are taken from an iterator in threads."""

    def __init__(self, pieces: Iterator[memoryview], *, length: int, media_type: str) -> None:
        super().__init__((), media_type=media_type, headers={"Content-Length": str(length)})
        self._pieces = pieces

    async def stream_response(self, send: Send) -> None:
        """Send the pieces while others are made."""
        sender, receiver = anyio.create_memory_object_stream[memoryview](PIECES_AHEAD)
        self.body_iterator = receiver
        with sender, receiver:
            async with anyio.create_task_group() as group:
                group.start_soon(self._make, sender)
                await super().stream_response(send)

    async def _make(self, sender: ObjectSendStream[memoryview]) -> None:
        async with sender:
            while piece := await anyio.to_thread.run_sync(next, self._pieces, _END):
                await sender.send(piece)
