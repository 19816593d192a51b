"""Events: a stream that a reader can leave and take up again without missing anything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent

from api_schemas.base import MAX_INT
from rollout_service.routes.dependencies import ServiceDep
from rollout_service.routes.strict import StrictRoute

router = APIRouter(prefix="/v1", tags=["events"], route_class=StrictRoute)


@router.get("/events", response_class=EventSourceResponse)
async def stream_events(
    service: ServiceDep,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_INT)] = None,
    after: Annotated[
        int | None, Query(ge=0, le=MAX_INT, description="start after this id; the header wins")
    ] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events: after `Last-Event-ID`, or from now on when neither it nor `after` is given."""
    start = last_event_id if last_event_id is not None else after
    seen = await service.store.last_event() if start is None else start
    while True:
        for event in await service.store.events(after=seen):
            seen = event.event_id
            yield ServerSentEvent(raw_data=event.model_dump_json(), event=event.kind, id=str(event.event_id))
        await service.store.wait_for_events(after=seen)
