"""The stream of events of a store that is spread over shards."""

from types import SimpleNamespace

import anyio
import anyio.lowlevel

from rollout_service.base.shutdown import Shutdown
from rollout_service.server.api.routes.events import _newest


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
