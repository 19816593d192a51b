"""The stream of events, which a reader can leave and resume without missing anything.

Guarantees: each event that the reader wants is sent once, in order. The stream begins with the id that it starts after,
so a reader that gave no position knows where to resume even if it has seen no event; and while nothing that it wants
happens, the stream says from time to time how far it has come. If the store has lost events, as in a failover, the
stream sends the id of the newest one left, and goes on after it. A reader that hangs up is not an error. When the
service shuts down, the stream ends after a whole event.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated

import anyio
from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT

from api_schemas.base import MAX_INT
from rollout_service.base.shutdown import ShuttingDownError
from rollout_service.server.api.openapi_responses import media_response
from rollout_service.server.api.routes.support.dependencies import ServiceDep
from rollout_service.server.api.routes.support.shared_answers import EVENT_STREAM, STREAM_HEADERS
from rollout_service.server.api.routes.support.strict import StrictRoute
from rollout_service.server.events import EventSelection
from rollout_service.server.lifecycle import Service

router = APIRouter(prefix="/v1", tags=["events"], route_class=StrictRoute)

MAX_FILTERS = 100
PING_SECONDS = 15.0
"""How often an idle stream says something: readers give up on a stream that stays silent for much longer."""
PAUSE_SECONDS = 0.05
"""The least time between two pieces of a stream: under load, events leave together."""


@router.get(
    "/events",
    response_class=Response,
    responses=media_response(
        EVENT_STREAM, "Server-sent events; the data of each is an `Event` in JSON.", schema={"type": "string"}
    ),
)
async def stream_events(
    service: ServiceDep,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_INT)] = None,
    after: Annotated[
        int | None,
        Query(ge=0, le=MAX_INT, description="Start after the event with this id; `Last-Event-ID` wins."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        Query(
            max_length=MAX_FILTERS,
            description="Send only events of this kind, such as `run.state`, or of all kinds with a prefix, such as "
            "`run.`; may be repeated.",
        ),
    ] = None,
    subject: Annotated[
        list[str] | None,
        Query(
            max_length=MAX_FILTERS,
            description="Send only events about this subject, such as a rollout's id; may be repeated.",
        ),
    ] = None,
    follow: Annotated[
        bool, Query(description="Whether the stream goes on, or ends with the newest event.")
    ] = True,
) -> StreamingResponse:
    """Follow the events of the service, as server-sent events.

    The stream starts after the event that `Last-Event-ID` or `after` names, or with the next event if neither is given.
    Its first line is the `id` that it starts after. To resume after a lost connection, send the last `id` that you saw
    as `Last-Event-ID`. An id that is lower than the last says that the store has lost events: look again at the things
    that you wait for. An idle stream carries a comment every 15 seconds, or, with `kind` or `subject`, the `id` up to
    which there was nothing that you want. With `follow=false`, the stream ends with the newest event.
    """
    service.shutdown.refuse()
    wanted = EventSelection.of(kind or [], subject or [])
    start = last_event_id if last_event_id is not None else after
    seen = await service.store.last_event() if start is None else start
    events = _events(service, wanted, seen) if follow else _past_events(service, wanted, seen)
    return StreamingResponse(events, media_type=EVENT_STREAM, headers=STREAM_HEADERS)


async def _past_events(service: Service, wanted: EventSelection, seen: int) -> AsyncIterator[bytes]:
    """Yield this id, then the events after it that there are by now, then the id of the newest one."""
    yield _position(seen)
    newest = await service.store.last_event()
    while seen < newest:
        events = await service.event_tail.after(seen, newest)
        seen = events[-1].event_id
        if frames := b"".join(event.frame for event in events if wanted.has(event.kind, event.subject)):
            yield frames
    yield _position(newest)


async def _events(service: Service, wanted: EventSelection, seen: int) -> AsyncIterator[bytes]:
    """Yield this id, then the events after it; end when the service does."""
    yield _position(seen)
    told = time.monotonic()
    with suppress(ShuttingDownError), service.metrics.track_reader("events"):
        while True:
            newest = await _newest(service, seen)
            if newest is None:
                yield _position(seen) if wanted.is_partial else KEEPALIVE_COMMENT
                told = time.monotonic()
                continue
            if newest < seen:  # the store has lost events
                service.event_tail.rewind(newest)
                seen = newest
                yield _position(seen)
                continue
            events = await service.event_tail.after(seen, newest)
            seen = events[-1].event_id if events else seen
            frames = b"".join(event.frame for event in events if wanted.has(event.kind, event.subject))
            if not frames and time.monotonic() - told >= PING_SECONDS:
                frames = _position(seen)
            if frames:
                yield frames
                told = time.monotonic()
            await anyio.sleep(PAUSE_SECONDS)


def _position(event_id: int) -> bytes:
    """Return the line that tells a reader where to resume: no event, since it has no data, but sent as
    Last-Event-ID."""
    return b"id: %d\n\n" % event_id


async def _newest(service: Service, seen: int) -> int | None:
    """Return the id of the newest event once it is another, or None if that takes longer than `PING_SECONDS`.

    Raises:
        ShuttingDownError: The service is shutting down.
    """
    with anyio.move_on_after(PING_SECONDS):
        return await service.shutdown.until_begun(lambda: service.store.wait_for_events(after=seen))
    return None
