"""Reads the steps of rollouts, wherever they are: in the store, about to be written to it, or of attempts under way.

Guarantee: what an attempt at this node did is found from its first step on, and each attempt once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import anyio
import anyio.to_thread
from pydantic_core import to_json

from api_schemas.rollouts.steps import RolloutSteps
from rollout_service.activity import Activity, ActivityBoard
from rollout_service.base.errors import RecordLostError
from rollout_service.base.ids import SampleId
from rollout_service.observability.tracing.steps.encoding import decode, decompress, encode, rows
from rollout_service.observability.tracing.steps.writer import StepWriter
from rollout_service.store.codec.rollouts import RESTORE, reading
from rollout_service.store.contract import Store

ROLLOUTS_AT_ONCE = 64
"""The most rollouts in one read and one piece of the answer."""
FLUSH_SECONDS = 1.0
"""How long a reader waits until what has just ended is saved; a store that fails does not keep the rest from it."""


class StepArchive:
    """The steps of rollouts."""

    def __init__(self, store: Store, board: ActivityBoard, writer: StepWriter) -> None:
        self._store = store
        self._board = board
        self._writer = writer

    async def of_rollout(self, rollout_id: str) -> RolloutSteps:
        """Return the steps of a rollout so far; none if it is unknown.

        Raises:
            RecordLostError: The record is damaged.
        """
        records = (await self._records([rollout_id])).get(rollout_id, [])
        return await anyio.to_thread.run_sync(_all_rows, rollout_id, records)

    async def of_run(self, run_id: str) -> Sequence[str]:
        """Return the ids of the rollouts of a run, about in the order in which they began, earlier tries included.

        Raises:
            NotFoundError: There is no such run.
        """
        runs = self._store.runs
        # The open groups first: one that is closed in between is found twice, and not missed.
        members = [member.rollout_id for group in await runs.open_groups(run_id) for member in group.members]
        closed = await runs.rollout_ids(run_id)
        return [name for one in dict.fromkeys((*closed, *members)) for name in _with_earlier(one)]

    async def lines(self, rollout_ids: Sequence[str]) -> AsyncIterator[bytes]:
        """Yield the steps of rollouts, those of one in a line of JSON: a `RolloutAttempts`; none without any.

        Raises:
            StoreError: The store fails.
        """
        for start in range(0, len(rollout_ids), ROLLOUTS_AT_ONCE):
            some = rollout_ids[start : start + ROLLOUTS_AT_ONCE]
            records = await self._records(some)
            if records:
                yield b"".join(_line(name, records[name]) for name in some if name in records)

    async def _records(self, rollout_ids: Sequence[str]) -> Mapping[str, list[bytes]]:
        """Return the encoded attempts of rollouts that have any."""
        live = {name: found for name in rollout_ids if (found := self._board.find(name)) is not None}
        with anyio.move_on_after(FLUSH_SECONDS):
            await self._writer.flush()
        stored = await self._store.saved_steps(rollout_ids)
        records = await anyio.to_thread.run_sync(_decompress_all, stored)
        for name, activity in live.items():
            kept = records.get(name, [])
            if activity.finished is None or not _has(kept, activity):
                records[name] = [*kept, encode(activity)]
        return records


def _has(records: Sequence[bytes], activity: Activity) -> bool:
    """Return whether an attempt that has ended meanwhile is among the stored ones."""
    mark = b'"started_at":' + to_json(activity.started_at) + b","
    return any(mark in record for record in records)


def _with_earlier(rollout_id: str) -> list[str]:
    """Return the ids of a sample's rollouts up to this one, the first one first."""
    try:
        last = SampleId.parse(rollout_id)
    except ValueError:
        return [rollout_id]
    return [str(SampleId(last.run, last.number, last.sample, retry)) for retry in range(last.retry + 1)]


def _decompress_all(stored: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for rollout_id, records in stored.items():
        with reading(rollout_id):
            found[rollout_id] = [decompress(data) for data in records]
    return found


def _line(rollout_id: str, records: Sequence[bytes]) -> bytes:
    return b'{"rollout_id":%b,"attempts":[%b]}\n' % (to_json(rollout_id), b",".join(records))


def _all_rows(rollout_id: str, records: Sequence[bytes]) -> RolloutSteps:
    try:
        attempts = [decode(record) for record in records]
    except ValueError as error:
        raise RecordLostError(f"the steps of rollout {rollout_id} cannot be read", hint=RESTORE) from error
    return RolloutSteps(
        rollout_id=rollout_id,
        steps=[step for attempt in attempts for step in rows(attempt)],
        dropped=sum(attempt.dropped for attempt in attempts),
    )
