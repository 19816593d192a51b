"""Saves the steps of attempts that have ended in the background, so that no rollout waits for the store.

Guarantees: `finished` returns at once; many attempts share one write; memory is bounded. `flush` waits until what has
ended is saved, so that a reader misses nothing. Steps that cannot be saved cost a rollout nothing but its timeline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread
import structlog

from rollout_service.activity import Activity, StepObserver
from rollout_service.base.signals import BatchQueue
from rollout_service.observability.tracing.steps.encoding import compress, encode
from rollout_service.store.retrying import retry_until_stored
from rollout_service.store.steps_contract import EncodedSteps, StepStore

log = structlog.get_logger(__name__)

COLLECT_SECONDS = 0.05
"""How long to collect attempts for one write."""
MAX_WAITING = 4_096
"""The most attempts that wait to be saved; the steps of later ones are dropped."""
MAX_AT_ONCE = 64
"""The most attempts in one write, so that other writes do not wait for long."""
CLOSE_SECONDS = 2.0
"""How long the end of the service waits until the last steps are saved."""


class StepWriter(StepObserver):
    """The attempts whose steps wait to be saved; `running` saves them."""

    def __init__(self, store: StepStore) -> None:
        self._store = store
        self._queue = BatchQueue[Activity](
            most=MAX_WAITING, at_once=MAX_AT_ONCE, collect_seconds=COLLECT_SECONDS
        )
        self.dropped = 0
        """The attempts whose steps were dropped."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Save steps until the block is left, those of the attempts that end with it included."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._save_forever)
            try:
                yield
            finally:
                with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                    await self.flush()
                tasks.cancel_scope.cancel()

    def finished(self, activity: Activity) -> None:
        """Save the steps of an attempt soon."""
        if activity.ended and not self._queue.put(activity):
            self.dropped += 1

    async def flush(self) -> None:
        """Wait until the steps of all attempts that have ended are saved."""
        await self._queue.until_done()

    async def _save_forever(self) -> None:
        while True:
            await self._save(await self._queue.next_batch())
            if self.dropped:
                log.warning("the steps of some attempts were dropped", attempts=self.dropped)
                self.dropped = 0

    async def _save(self, batch: list[Activity]) -> None:
        attempts = await anyio.to_thread.run_sync(_encode_all, batch)
        await retry_until_stored("save steps", partial(self._store.save_steps, attempts))


def _encode_all(batch: list[Activity]) -> list[EncodedSteps]:
    return [EncodedSteps(one.rollout_id, compress(encode(one))) for one in batch]
