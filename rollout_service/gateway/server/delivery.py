"""Sends an answer to one client, as it is sampled or as a whole.

The head of a stream leaves at once, and a sign of life follows whenever the policy has been silent for a while. Nothing
is sent faster than the client reads. The last event leaves only after the turn was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial

import anyio
from starlette.types import Message, Receive, Scope, Send

from rollout_service.gateway.bounds import in_thread
from rollout_service.gateway.contract import AnswerEnd, AnswerEvent, ModelCall
from rollout_service.gateway.dialects import AnswerStream, DialectCodec, ErrorAnswer, WholeAnswer
from rollout_service.gateway.sessions.answer import LiveAnswer

HEAD_SECONDS = 20.0
"""How long the head of a whole answer waits for it: until then, an error can still have a status of its own."""
BLANK = b" "
"""Keeps the client of a whole answer waiting: JSON may begin with white space."""
JSON = "application/json"


@dataclass(slots=True, eq=False)
class AnswerResponse:
    """An ASGI application."""

    codec: DialectCodec
    call: ModelCall
    answers: Sequence[LiveAnswer]
    """More than one only for a call that asks for `n`."""
    keep_alive_seconds: float
    _: KW_ONLY
    head_seconds: float = 0.0
    """How long the head of a whole answer waits for it; 0 is twice `keep_alive_seconds`, at most `HEAD_SECONDS`."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Added to the head."""
    _is_sent: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _ = scope
        with ExitStack() as readers:
            for answer in self.answers:
                readers.enter_context(answer.reading())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_on_disconnect, receive, tasks.cancel_scope)
                if self.call.stream:
                    await self._stream(send)
                    self._is_sent = True
                else:
                    self._is_sent = await self._send_whole(send)
                if not self._is_sent:
                    tasks.cancel_scope.cancel()

    async def _cancel_on_disconnect(self, receive: Receive, scope: anyio.CancelScope) -> None:
        """Cancel once the client is gone.

        ASGI ends a sent response with the same message. Cancelling then would cost every call more than the task
        itself.
        """
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_sent:
            scope.cancel()

    async def _stream(self, send: Send) -> None:
        answer, stream = self.answers[0], self.codec.open_stream(self.call)
        await send(_head(200, stream.media_type, more=self.headers))
        seen, is_last, is_whole = 0, False, False
        while not is_last:
            events = await answer.after(seen, self.keep_alive_seconds)
            seen += len(events)
            if events:
                is_last = is_whole = isinstance(events[-1], AnswerEnd)
                data = await self._write(partial(_write_all, stream, events), is_long=is_last)
            elif answer.error is not None:
                data, is_last = stream.fail(answer.error), True
            else:
                data = stream.keep_alive()
            if data or is_last:
                await send(_body(data, more=not is_last))
        if is_whole:
            answer.deliver()

    async def _send_whole(self, send: Send) -> bool:
        """Return whether the response is complete."""
        is_begun, head_seconds = False, self.head_seconds or min(HEAD_SECONDS, 2 * self.keep_alive_seconds)
        while not await self._wait(self.keep_alive_seconds if is_begun else head_seconds):
            if not is_begun:
                await send(_head(200, JSON, more=self.headers))
                is_begun = True
            await send(_body(BLANK, more=True))
        error = next((answer.error for answer in self.answers if answer.error is not None), None)
        if error is None:
            await self._send_body(send, is_begun=is_begun)
        elif not is_begun:
            await send_error(self.codec.error(error), send)
        # Otherwise the head has left, and only a body that breaks off tells of the error; the server sees to that.
        return error is None or not is_begun

    async def _wait(self, seconds: float) -> bool:
        """Return whether all answers came, or failed, in time."""
        with anyio.move_on_after(seconds):
            for answer in self.answers:
                await answer.until_whole()
            return True
        return False

    async def _send_body(self, send: Send, *, is_begun: bool) -> None:
        parts = [WholeAnswer.of(answer.events) for answer in self.answers]
        body = await self._write(partial(self.codec.whole, self.call, parts), is_long=True)
        if not is_begun:
            await send(_head(200, JSON, len(body), self.headers))
        await send(_body(body))
        for answer in self.answers:
            answer.deliver()

    async def _write(self, write: Callable[[], bytes], *, is_long: bool) -> bytes:
        """Use a thread for the log-probabilities of all tokens, of which there may be a hundred thousand."""
        return await in_thread(write) if is_long and self.call.logprobs else write()


def _write_all(stream: AnswerStream, events: Sequence[AnswerEvent]) -> bytes:
    return b"".join([stream.write(event) for event in events])


async def send_error(error: ErrorAnswer, send: Send) -> None:
    later = error.retry_after
    more = [(b"retry-after", b"%d" % later)] if later is not None else []
    await send(_head(error.status, JSON, len(error.body), more))
    await send(_body(error.body))


def _head(status: int, media_type: str, length: int | None = None, more: Sequence[tuple[bytes, bytes]] = ()) -> Message:
    headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-store"), *more]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
