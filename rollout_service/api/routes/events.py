"""The stream of events, which a reader can leave and resume without missing anything.

Guarantees: each event is sent once, in order. The stream begins with the id that it starts after, so a reader that
gave no position knows where to resume even if it has seen no event. If the store has lost events, as in a failover, the
stream sends the id of the newest one left, and goes on after it. A reader that hangs up is not an error. When the
service shuts down, the stream ends after a whole event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated

import anyio
from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from api_schemas.base import MAX_INT
from rollout_service.api.openapi.responses import media_response
from rollout_service.api.routes.support.dependencies import ServiceDep
from rollout_service.api.routes.support.strict import StrictRoute
from rollout_service.service import Service
from rollout_service.shutdown import ShuttingDownError

router = APIRouter(prefix="/v1", tags=["events"], route_class=StrictRoute)

MEDIA_TYPE = "text/event-stream"
PING_SECONDS = 15.0
"""How often an idle stream sends a comment: readers give up on a stream that stays silent for much longer."""


@router.get(
    "/events",
    response_class=Response,
    responses=media_response(
        MEDIA_TYPE, "Server-sent events; the data of each is an `Event` in JSON.", schema={"type": "string"}
    ),
)
async def stream_events(
    service: ServiceDep,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_INT)] = None,
    after: Annotated[
        int | None,
        Query(ge=0, le=MAX_INT, description="Start after the event with this id; `Last-Event-ID` wins."),
    ] = None,
) -> StreamingResponse:
    """Follow what happens in the service, as server-sent events.

    The stream starts after the event that `Last-Event-ID` or `after` names, or with the next event if neither is given.
    Its first line is the `id` that it starts after. To resume after a lost connection, send the last `id` that you saw
    as `Last-Event-ID`. An id that is lower than the last says that the store has lost events: look again at what you
    wait for. Idle streams carry a comment every 15 seconds.
    """
    service.shutdown.refuse()
    start = last_event_id if last_event_id is not None else after
    seen = await service.store.last_event() if start is None else start
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(service, seen), media_type=MEDIA_TYPE, headers=headers)


async def _events(service: Service, seen: int) -> AsyncIterator[bytes]:
    """Yield this id, then the events after it; end when the service does."""
    yield b"id: %d\n\n" % seen  # not an event, since it has no data, but readers send it as Last-Event-ID
    with suppress(ShuttingDownError), service.metrics.track_reader("events"):
        while True:
            for event in await service.store.events(after=seen):
                seen = event.event_id
                yield format_sse_event(
                    data_str=event.model_dump_json(), event=event.kind, id=str(event.event_id)
                )
            newest = await _newest(service, seen)
            if newest is None:
                yield KEEPALIVE_COMMENT
            elif newest < seen:  # the store has lost events
                seen = newest
                yield b"id: %d\n\n" % seen


async def _newest(service: Service, seen: int) -> int | None:
    """Return the id of the newest event once it is another, or None if that takes longer than `PING_SECONDS`.

    Raises:
        ShuttingDownError: The service is shutting down.
    """
    with anyio.move_on_after(PING_SECONDS):
        return await service.shutdown.until_begun(lambda: service.store.wait_for_events(after=seen))
    return None
