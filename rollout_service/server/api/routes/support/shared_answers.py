"""Answers that readers share if their `Cache-Control: max-age=SECONDS` accepts an older one, and streamed answers.

Without that header, each request gets its own answer. With it, an answer is never older than the request allows, nor
than `MAX_AGE_SECONDS`; readers who come while it is made wait for it, which spares the store. Errors are not shared.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import ObjectSendStream
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Send

from rollout_service.server.api.routes.support.route import StrictRoute

MAX_AGE_SECONDS = 10.0
MAX_ANSWERS = 32
_MAX_AGE = re.compile(r"max-age=([0-9]{1,6})")

Make = Callable[[], Awaitable[Response]]


@dataclass(slots=True)
class _LastAnswer:
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    response: Response | None = None
    asked_at: float = 0.0


class SharedAnswers:
    def __init__(self) -> None:
        self._answers: OrderedDict[str, _LastAnswer] = OrderedDict()

    async def get(self, question: str, max_age: float, make: Make) -> Response:
        answer = self._answers.setdefault(question, _LastAnswer())
        self._answers.move_to_end(question)
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        async with answer.turn:
            now = anyio.current_time()
            if answer.response is None or now - answer.asked_at > max_age:
                made = await make()
                answer.response, answer.asked_at = made, now
            shared, age = answer.response, int(now - answer.asked_at)
            headers = {"Age": str(age)} if age else None
            return Response(shared.body, shared.status_code, headers, media_type=shared.headers["content-type"])


class SharedRoute(StrictRoute):
    """A route that reads the same for everyone; those who allow it share its answers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        answers = SharedAnswers()

        async def shared(request: Request) -> Response:
            max_age = accepted_age(request.headers.get("cache-control", ""))
            if max_age <= 0:
                return await handle(request)
            question = f"{request.url.path}?{request.url.query}"
            return await answers.get(question, max_age, lambda: handle(request))

        return shared


def accepted_age(cache_control: str) -> float:
    """Return the seconds that an answer may be old; 0 without a `max-age`."""
    found = _MAX_AGE.search(cache_control.lower())
    return min(float(found[1]), MAX_AGE_SECONDS) if found else 0.0


MAX_BUFFERED_CHUNKS = 2

ProduceChunks = Callable[[Callable[[memoryview], Awaitable[None]]], Awaitable[None]]


class BufferedResponse(StreamingResponse):
    """Produces up to `MAX_BUFFERED_CHUNKS` while one is being sent; stops once the client has disconnected."""

    def __init__(self, produce: ProduceChunks, headers: Mapping[str, str], *, media_type: str) -> None:
        super().__init__((), media_type=media_type, headers=headers)
        self._produce = produce

    async def stream_response(self, send: Send) -> None:
        sender, receiver = anyio.create_memory_object_stream[memoryview](MAX_BUFFERED_CHUNKS)
        self.body_iterator = receiver
        with sender, receiver:
            async with anyio.create_task_group() as group:
                group.start_soon(self._fill, sender)
                await super().stream_response(send)

    async def _fill(self, sender: ObjectSendStream[memoryview]) -> None:
        async with sender:
            await self._produce(sender.send)


EVENT_STREAM = "text/event-stream"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that keep proxies from holding events back."""
