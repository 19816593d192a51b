"""Saves the turns of all rollouts in the background, so that no turn waits for the store.

`add` returns at once; turns are saved in the order in which they were made, many in one write; memory is bounded. A
turn that cannot be saved costs its rollout only the chance to continue from it. A shard of the store that fails holds
up the turns of its own rollouts alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread
import structlog

from rollout_service.base.signals import BatchQueue, until_all_done
from rollout_service.engines.serving.saved_turns import SavedTurn, encode
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.store.contract import Lease, Store, UnsavedTurn
from rollout_service.store.retrying import retry_until_stored

log = structlog.get_logger(__name__)

COLLECT_SECONDS = 0.15
"""Turns are collected for one write: short next to a turn, and long next to a write."""
MAX_WAITING = 4_096
"""Turns that wait to be saved; later ones are dropped."""
MAX_AT_ONCE = 256
"""Turns in one write, so that other writes do not wait for long."""

NOT_REPLAYABLE = b""
"""Marks a rollout that has turns, of an environment whose turns are not worth saving."""


@dataclass(frozen=True, slots=True)
class _WaitingTurn:
    rollout_id: str
    token: int
    number: int
    turn: SavedTurn | None


class TurnWriter:
    def __init__(self, store: Store, owner: str, metrics: Metrics) -> None:
        self._store = store
        self._owner = owner
        self._metrics = metrics
        self._queues = [
            BatchQueue[_WaitingTurn](most=MAX_WAITING, at_once=MAX_AT_ONCE, collect_seconds=COLLECT_SECONDS)
            for _ in store.shards
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            for queue, shard in zip(self._queues, self._store.shards, strict=True):
                tasks.start_soon(self._save_forever, queue, shard)
            yield
            tasks.cancel_scope.cancel()

    def add(self, lease: Lease, number: int, turn: SavedTurn | None) -> None:
        """Save a turn soon; None only marks that there are turns."""
        queue = self._queues[self._store.shard_of(lease.rollout_id)]
        if not queue.put(_WaitingTurn(lease.rollout_id, lease.token, number, turn)):
            self._metrics.count_saved_turns("dropped", 1)

    def discard(self, rollout_id: str) -> None:
        """Leave out turns of a rollout that has its result: nobody continues from them."""
        queue = self._queues[self._store.shard_of(rollout_id)]
        queue.discard(lambda waiting: waiting.rollout_id == rollout_id)

    async def flush(self) -> None:
        """Wait until all added turns are saved; the lease must still be held."""
        await until_all_done(self._queues)

    async def _save_forever(self, queue: BatchQueue[_WaitingTurn], shard: Store) -> None:
        while True:
            await self._save(await queue.next_batch(), shard)

    async def _save(self, batch: list[_WaitingTurn], shard: Store) -> None:
        turns = await anyio.to_thread.run_sync(_encode_all, batch)
        saved = await retry_until_stored("save turns", partial(shard.save_turns, self._owner, turns))
        self._metrics.count_saved_turns("saved", saved)
        self._metrics.count_saved_turns("dropped", len(batch) - len(turns))


def _encode_all(batch: list[_WaitingTurn]) -> list[UnsavedTurn]:
    """Leave out a turn that cannot be encoded, and with it the later ones of its rollout."""
    turns = []
    for waiting in batch:
        try:
            data = NOT_REPLAYABLE if waiting.turn is None else encode(waiting.turn)
        except (ValueError, TypeError, OverflowError) as error:
            log.warning("a turn cannot be saved", rollout_id=waiting.rollout_id, error=str(error))
        else:
            turns.append(UnsavedTurn(waiting.rollout_id, waiting.token, waiting.number, data))
    return turns
