"""A scripted engine's streamed answer: its chunks, sent as server-sent events, and what goes wrong in the middle."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson
from aiohttp import web

from rollout_service.testing.faults import AfterTokens, Fault
from rollout_service.testing.turn import EngineTurn

_DONE = b"data: [DONE]\n\n"
_TEXTS = {
    Fault.GARBAGE: b'data: {"meta_info": {"completion_tok\n\n',
    Fault.ERROR: b'data: {"error": {"message": "scripted failure", "code": 500}}\n\n' + _DONE,
    Fault.CUT: _DONE,
}


class Render(Protocol):
    """Returns the events of a part of a turn; the last one has the end of the answer."""

    def __call__(self, turn: EngineTurn, fault: Fault | None, *, is_last: bool) -> list[dict[str, Any]]: ...


class EndOfStreamError(Exception):
    """The stream ends here."""


@dataclass(slots=True)
class ChunkStream:
    """Sends a turn while it is sampled, the first token alone and then chunks of `interval` tokens."""

    request: web.BaseRequest
    interval: int
    render: Render
    fault: AfterTokens | None
    break_off: Callable[[Fault, web.BaseRequest], Awaitable[object]]
    """Breaks the connection, or the whole engine."""
    sent: int = 0
    """Number of tokens that were sent."""
    response: web.StreamResponse = field(
        default_factory=lambda: web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    )

    @property
    def next_end(self) -> int:
        """Number of tokens that the next chunk waits for."""
        return self.sent + self.interval if self.sent else 1

    async def advance(self, turn: EngineTurn) -> None:
        """Send all whole chunks of what was sampled; the turn's last token stays for the end.

        Raises:
            EndOfStreamError: A fault has ended the stream.
        """
        while self.next_end <= min(turn.done, len(turn.reply.ids) - 1):
            await self._send(turn, self.next_end, is_last=False)

    async def end(self, turn: EngineTurn) -> None:
        """Send the rest, and the end of the answer.

        Raises:
            EndOfStreamError: A fault has ended the stream.
        """
        await self._send(turn, turn.done, is_last=True)
        await self._write(_DONE)

    async def _send(self, turn: EngineTurn, end: int, *, is_last: bool) -> None:
        fault = self.fault.fault if self.fault is not None and end > self.fault.tokens else None
        if fault in _TEXTS:
            await self._write(_TEXTS[fault])
            raise EndOfStreamError
        if fault in {Fault.DROP, Fault.DIE, Fault.HANG}:
            await self.break_off(fault, self.request)
            raise EndOfStreamError
        for event in self.render(replace(turn, since=self.sent, done=end), fault, is_last=is_last):
            await self._write(b"data: " + orjson.dumps(event) + b"\n\n")
        if fault is Fault.QUEUE_ABORT:
            await self._write(_DONE)
            raise EndOfStreamError
        self.sent = end

    async def _write(self, data: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self.request)
        await self.response.write(data)
