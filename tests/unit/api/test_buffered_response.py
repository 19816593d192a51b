"""A buffered response keeps its chunks in order, buffers only a few, and makes none once the client has gone."""

from collections.abc import Awaitable, Callable

import anyio
from starlette.types import Message

from rollout_service.server.api.routes.support.shared_answers import MAX_BUFFERED_CHUNKS, BufferedResponse

PIECES = [bytes([number]) * 10 for number in range(12)]
SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}
MOST_UNSENT = MAX_BUFFERED_CHUNKS + 2
"""The most chunks made and not yet sent: those in the buffer, one being made, and one being sent."""


class Made:
    """Makes chunks and counts them."""

    def __init__(self) -> None:
        self.count = 0

    async def make(self, send: Callable[[memoryview], Awaitable[None]]) -> None:
        for piece in PIECES:
            self.count += 1
            await send(memoryview(piece))


def response_of(made: Made) -> BufferedResponse:
    return BufferedResponse(made.make, length=sum(map(len, PIECES)), media_type="a/b")


async def test_pieces_are_made_while_one_is_sent_and_no_more_than_wait():
    made = Made()
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        if message.get("body"):
            sent.append(bytes(message["body"]))
            while made.count < min(len(sent) + MAX_BUFFERED_CHUNKS, len(PIECES)):
                await anyio.sleep(0.001)
            assert made.count <= len(sent) + MOST_UNSENT

    with anyio.fail_after(30):
        await response_of(made)(SCOPE, anyio.sleep_forever, send)
    assert sent == PIECES


async def test_nothing_is_produced_once_the_client_has_gone():
    made = Made()
    stuck = anyio.Event()

    async def receive() -> Message:
        await stuck.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message.get("body"):
            stuck.set()
            await anyio.sleep_forever()

    with anyio.fail_after(30):
        await response_of(made)(SCOPE, receive, send)
    assert made.count <= 1 + MOST_UNSENT
