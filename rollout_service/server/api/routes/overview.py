"""The service at a glance: once, or once a second.

An overview is made and encoded once a second for all readers, and never without one. A reader that hangs up is not an
error. When the service shuts down, the stream ends after a whole event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from api_schemas.views.overview import Overview
from rollout_service.base.shutdown import ShuttingDownError
from rollout_service.server.api.routes.support.route import (
    ServiceDep,
    StrictRoute,
    as_json,
    media_response,
    role_of,
)
from rollout_service.server.api.routes.support.shared_answers import EVENT_STREAM, STREAM_HEADERS
from rollout_service.server.lifecycle import Service

router = APIRouter(prefix="/v1", tags=["overview"], route_class=StrictRoute)


@router.get("/overview", response_model=Overview)
async def get_overview(service: ServiceDep, http: Request) -> Response:
    """Read the service at a glance: stages, engines, runs, nodes, and the latest outcomes.

    It is at most a second old. Numbers are those of the node that answers, unless a field says otherwise.
    """
    frame = await service.overview.latest()
    return as_json(frame.overview.model_copy(update={"role": role_of(http).value}))


@router.get(
    "/overview/stream",
    response_class=Response,
    responses=media_response(
        "Server-sent events of the kind `overview`; the data of each is an `Overview` in JSON.", EVENT_STREAM
    ),
)
async def stream_overview(service: ServiceDep) -> Response:
    """Follow the service at a glance: the first overview at once, then one a second.

    All readers share the messages, so a page that stays open costs next to nothing. `role` is not that of the caller's
    key here.
    """
    service.shutdown.refuse()
    return StreamingResponse(_overviews(service), media_type=EVENT_STREAM, headers=STREAM_HEADERS)


async def _overviews(service: Service) -> AsyncIterator[bytes]:
    seen = 0
    with suppress(ShuttingDownError), service.metrics.track_reader("overview"):
        while True:
            frame = await service.shutdown.until_begun(partial(service.overview.after, seen))
            seen = frame.number
            yield frame.event
