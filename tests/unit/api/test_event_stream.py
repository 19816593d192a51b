"""The stream of events of a store that is spread over shards."""

from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest

from rollout_service.base.errors import InvalidFieldError
from rollout_service.base.shutdown import Shutdown
from rollout_service.server.api.routes.events import _newest, _past_events, stream_events
from rollout_service.server.events import EventSelection, SentEvent


class Shard:
    """A shard with an event, which answers after `answered` is set by another one, or at once."""

    def __init__(self, waits_for: anyio.Event, answered: anyio.Event) -> None:
        self._waits_for, self._answered = waits_for, answered

    async def wait_for_events(self, *, after: int) -> int:
        await self._waits_for.wait()
        await anyio.lowlevel.checkpoint()
        self._answered.set()
        return after + 1


async def test_a_shard_that_always_answers_first_keeps_no_other_out():
    begun, first, last = anyio.Event(), anyio.Event(), anyio.Event()
    begun.set()
    shards = [Shard(begun, first), Shard(first, last)]
    service = SimpleNamespace(store=SimpleNamespace(shards=shards), shutdown=Shutdown(0))
    assert await _newest(service, [5, 7]) == {0: 6, 1: 8}


@pytest.mark.parametrize(("last", "after", "field"), [("5", "5.6", "header.last-event-id"), (None, "5", "query.after")])
async def test_a_position_in_another_number_of_shards_is_named_by_where_it_was_sent(last, after, field):
    service = SimpleNamespace(store=SimpleNamespace(shards=[None, None]), shutdown=Shutdown(0))
    with pytest.raises(InvalidFieldError) as refused:
        await stream_events(service, lambda: True, last_event_id=last, after=after)
    assert [one.path for one in refused.value.fields] == [field]


async def test_past_events_end_though_the_store_has_lost_the_newest_meanwhile():
    class Lost:
        asked = 0

        async def last_event(self) -> int:
            return 9

        async def after(self, seen: int, newest: int) -> list[SentEvent]:
            assert (newest, self.asked) == (9, 0), "it asks for events that nobody has"
            self.asked += 1
            return []

    lost = Lost()
    service = SimpleNamespace(store=SimpleNamespace(shards=[lost], failing={}), event_tails=[lost])
    assert [piece async for piece in _past_events(service, EventSelection.of([], []), [5])] == [b"id: 5\n\n"] * 2
