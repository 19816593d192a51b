"""The service's events, followed through lost connections.

Guarantee: each event is given once and in order, from the first connection on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx

from api_schemas.events import Event
from rollout_client._answers import error_from, parse
from rollout_client._connection import Connection
from rollout_client._sse import SSEParser
from rollout_client.errors import UnavailableError

SILENCE_SECONDS = 60.0
"""A stream that sends nothing for this long, not even a comment, is taken for dead and opened again."""


async def follow_events(connection: Connection, after: int | None) -> AsyncGenerator[Event]:
    """Yield events without end, from `after` on if it is given.

    A lost connection is resumed after the last event seen or, before the first, where the server began.
    """
    last, patience = after, connection.patience()
    while True:
        try:
            async for reached, events in _read_stream(connection, last):
                patience = connection.patience()
                for event in events:
                    last = event.event_id
                    yield event
                last = reached if last is None else last
        except (httpx.TransportError, UnavailableError) as error:
            await patience.wait(error)


async def _read_stream(
    connection: Connection, after: int | None
) -> AsyncGenerator[tuple[int | None, list[Event]]]:
    """Yield, for each piece that arrives, the last id that the stream has named and the events in the piece.

    A piece may hold no event: a comment, which shows that the server is there, or the id that the stream starts at.
    """
    headers = {"accept": "text/event-stream"} | ({} if after is None else {"last-event-id": str(after)})
    async with connection.stream("/v1/events", headers, seconds=SILENCE_SECONDS) as response:
        if not response.is_success:
            await response.aread()
            raise error_from(response)
        parser = SSEParser()
        async for chunk in response.aiter_bytes():
            events = [parse(Event, item.data.encode()) for item in parser.feed(chunk)]
            yield int(parser.last_id) if parser.last_id.isdecimal() else None, events
    raise httpx.RemoteProtocolError("the server ended the stream")
