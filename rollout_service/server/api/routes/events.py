"""The stream of events, which a reader can leave and resume without missing anything.

Each wanted event is sent once, in order; those of different shards come in about the order of their times, and a shard
that is away holds up only its own. The stream begins with the id that it starts after, so a reader that gave no
position knows where to resume even if it has seen no event; an idle one says from time to time how far it has come. If
the store has lost events, as in a failover, the stream sends the id of the newest one left, and continues after it. A
reader that hangs up is not an error. When the service shuts down, or the reader's key is taken away, the stream ends
after a whole event.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT

from rollout_service.base.errors import InvalidFieldError, StoreError
from rollout_service.base.shutdown import ShuttingDownError
from rollout_service.base.signals import first_of
from rollout_service.server.api.routes.support.route import ServiceDep, StrictRoute, key_check, media_response
from rollout_service.server.api.routes.support.shared_answers import EVENT_STREAM, STREAM_HEADERS
from rollout_service.server.events import EventSelection
from rollout_service.server.lifecycle import Service
from rollout_service.store.contract import StoreShard
from rollout_service.store.retrying import STORE_RETRY_SECONDS

router = APIRouter(prefix="/v1", tags=["events"], route_class=StrictRoute)

MAX_FILTERS = 100
POSITION = r"^([0-9]{1,16}|-)(\.([0-9]{1,16}|-)){0,15}$"
"""The id of the last event that a reader has seen of each shard of the store; `-` for one that was away."""
UNKNOWN = -1
"""Stands for the id of the newest event of a shard that is away."""
PING_SECONDS = 15.0
"""How often an idle stream says something, because readers give up on a silent one."""
PAUSE_SECONDS = 0.05
"""The least time between two pieces of a stream, so that events leave together under load."""


@router.get(
    "/events",
    response_class=Response,
    responses=media_response("Server-sent events; the data of each is an `Event` in JSON.", EVENT_STREAM),
)
async def stream_events(
    service: ServiceDep,
    is_allowed: Annotated[Callable[[], bool], Depends(key_check)],
    last_event_id: Annotated[str | None, Header(pattern=POSITION)] = None,
    after: Annotated[
        str | None,
        Query(pattern=POSITION, description="Start after the event with this id; `Last-Event-ID` wins."),
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
    follow: Annotated[bool, Query(description="Whether the stream goes on, or ends with the newest event.")] = True,
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
    if last_event_id is not None:
        seen = _parse(service, last_event_id, "header.last-event-id")
    else:
        seen = await _newest_of_all(service) if after is None else _parse(service, after, "query.after")
    events = _events(service, wanted, seen, is_allowed) if follow else _past_events(service, wanted, seen)
    return StreamingResponse(events, media_type=EVENT_STREAM, headers=STREAM_HEADERS)


async def _past_events(service: Service, wanted: EventSelection, seen: list[int]) -> AsyncIterator[bytes]:
    yield _position(seen)
    newest = await _newest_of_all(service)
    seen = [end if there == UNKNOWN else there for there, end in zip(seen, newest, strict=True)]
    while ahead := {number: end for number, end in enumerate(newest) if seen[number] < end}:
        before = list(seen)
        if frames := await _frames(service, wanted, seen, ahead):
            yield frames
        if seen == before:  # the store has lost the others meanwhile
            yield _position(seen)
            return
    yield _position([there if end == UNKNOWN else end for there, end in zip(seen, newest, strict=True)])


async def _events(
    service: Service, wanted: EventSelection, seen: list[int], is_allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    yield _position(seen)
    told = time.monotonic()
    with suppress(ShuttingDownError), service.metrics.track_reader("events"):
        while True:
            newest = await _newest(service, seen)
            if not is_allowed():
                return
            if not newest:
                yield _position(seen) if wanted.is_partial else KEEPALIVE_COMMENT
                told = time.monotonic()
                continue
            # The store has lost events, or one of its shards was away when the stream began.
            jumps = {n: end for n, end in newest.items() if end < seen[n] or seen[n] == UNKNOWN}
            if jumps:
                for number, end in jumps.items():
                    service.event_tails[number].rewind(end)
                    seen[number] = end
                yield _position(seen)
                continue
            frames = await _frames(service, wanted, seen, newest)
            if not frames and time.monotonic() - told >= PING_SECONDS:
                frames = _position(seen)
            if frames:
                yield frames
                told = time.monotonic()
            await anyio.sleep(PAUSE_SECONDS)


async def _frames(service: Service, wanted: EventSelection, seen: list[int], newest: Mapping[int, int]) -> bytes:
    """Return some wanted events after `seen`, and advance it."""
    found = [
        [(number, event) for event in await service.event_tails[number].after(seen[number], end)]
        for number, end in newest.items()
    ]
    frames: list[bytes] = []
    for number, event in heapq.merge(*found, key=lambda each: each[1].time):
        seen[number] = event.event_id
        if wanted.has(event.kind, event.subject):
            frames.append(b"id: %s\n%s" % (_text(seen), event.frame))
    return b"".join(frames)


def _position(seen: Sequence[int]) -> bytes:
    """Return the line that tells a reader where to resume: without data it is no event, but sent as Last-Event-ID."""
    return b"id: %s\n\n" % _text(seen)


def _text(seen: Sequence[int]) -> bytes:
    return b".".join(b"-" if each == UNKNOWN else b"%d" % each for each in seen)


def _parse(service: Service, position: str, field: str) -> list[int]:
    seen = [UNKNOWN if each == "-" else int(each) for each in position.split(".")]
    shards = len(service.store.shards)
    if len(seen) != shards:
        raise InvalidFieldError.at(
            field,
            f"{position!r} is no position in {shards} logs of events",
            hint="Pass the last `id` of the stream, or leave it out.",
        )
    return seen


async def _newest_of_all(service: Service) -> list[int]:
    failing = service.store.failing
    return [
        UNKNOWN if number in failing else await shard.last_event() for number, shard in enumerate(service.store.shards)
    ]


async def _newest(service: Service, seen: Sequence[int]) -> Mapping[int, int]:
    """Wait for newer events, and return the newest of each shard that has some; none after `PING_SECONDS`."""
    newest: dict[int, int] = {}

    async def wait(number: int, shard: StoreShard) -> None:
        while number not in newest:
            try:
                is_known = seen[number] != UNKNOWN
                newest[number] = await (shard.wait_for_events(after=seen[number]) if is_known else shard.last_event())
            except StoreError:
                if len(seen) == 1:
                    raise
                await anyio.sleep(STORE_RETRY_SECONDS)
        if len(newest) < len(seen):  # a busy shard that always answers first must not keep the others out
            await anyio.sleep(PAUSE_SECONDS)

    waits = [partial(wait, number, shard) for number, shard in enumerate(service.store.shards)]
    with anyio.move_on_after(PING_SECONDS):
        await service.shutdown.until_begun(lambda: first_of(*waits))
    return newest
